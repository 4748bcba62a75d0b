"""The reference pages: the tables they are made from are complete, and every command is on its page."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable

import pytest

from ringfence import cli
from ringfence.admission.policy_file import policy_file
from ringfence.admission.proofs import kinds, tdx
from ringfence.config.settings import KNOWN
from scripts.site import reference
from scripts.site.reference import FORMS, POLICY_KEYS, SETTINGS
from tests.unit.policy_readers import readers


def keys_read_by(reader: Callable[..., object], variable: str) -> dict[str, tuple[str, bool]]:
    """Each key that a reader asks its table for: the method that reads it, and whether the key is required."""
    found: dict[str, tuple[str, bool]] = {}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(reader)))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in FORMS:
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != variable:
            continue
        form, name = node.func.attr, node.args[0]
        required = len(node.args) == (2 if form == "hexes" else 1)
        # the only names that are no literals: the registers of TDX, and the kinds of proof in a rule
        names = [name.value] if isinstance(name, ast.Constant) else [*tdx.REGISTERS] if form == "hexes" else []
        found.update({str(each): (form, required) for each in names})
    return found


TABLES = {  # of policy-keys.toml, for each kind of proof
    **{kind: (kind,) for kind in kinds.KINDS},
    "secret": (),
    "azure_snp": ("snp", "vtpm"),
    "azure_tdx": ("tdx", "vtpm"),
}


def described(*tables: str) -> dict[str, tuple[str, bool]]:
    return {key["name"]: (key["form"], "default" not in key) for table in tables for key in POLICY_KEYS[table]}


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_the_key_reference_matches_the_reader_of_each_table(kind: str) -> None:
    read = {name: form for reader in readers(kind) for name, form in keys_read_by(reader, "table").items()}
    assert described(*TABLES[kind]) == read


def test_the_key_reference_matches_the_reader_of_a_policy() -> None:
    assert described("top") == keys_read_by(policy_file.read_policy, "root")
    assert described("rule") == keys_read_by(policy_file._rule, "table")
    assert {name for tables in TABLES.values() for name in tables} == POLICY_KEYS.keys() - {"top", "rule"}


def test_the_reference_has_every_setting() -> None:
    assert [each["name"] for each in SETTINGS] == [*KNOWN]


def test_the_page_of_commands_has_every_command() -> None:
    names = {parser.prog for parser in reference.parsers(cli._parser())}
    assert len(names) > 20
    assert not {name for name in names if f"\n## {name}\n" not in reference.commands()}
