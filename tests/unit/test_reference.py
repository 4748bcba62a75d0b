"""The reference pages: the tables they are made from are complete, and every command is on its page."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ringfence import cli
from ringfence.admission.policy_file import policy_file
from ringfence.admission.proofs import kinds, tdx
from ringfence.config.settings import KNOWN
from ringfence.errors import RecordError
from ringfence.record import signing_key
from scripts.site import reference
from scripts.site.reference import FORMS, POLICY_KEYS, SETTINGS
from tests.unit import record_samples
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
    assert described("private_sum") == keys_read_by(policy_file._private_sum, "table")
    assert {name for tables in TABLES.values() for name in tables} == POLICY_KEYS.keys() - {
        "top",
        "rule",
        "private_sum",
    }


def test_the_reference_has_every_setting() -> None:
    assert [each["name"] for each in SETTINGS] == [*KNOWN]


def test_the_page_of_commands_has_every_command() -> None:
    names = {parser.prog for parser in reference.parsers(cli._parser())}
    assert len(names) > 20
    assert not {name for name in names if f"\n## {name}\n" not in reference.commands()}


def hand_in(folder: Path, name: str, key: Ed25519PrivateKey, **changes: Any) -> None:
    (folder / f"{name}.json").write_bytes(record_samples.record(**changes))
    (folder / f"{name}.pem").write_bytes(signing_key.public_pem(key.public_key()))


def test_records_are_listed_as_text(tmp_path: Path) -> None:
    hand_in(tmp_path, "gpu", record_samples.KEY, environment={"device": "a|b <script> [c](d)\n| e", "torch": "2.13.0"})
    row = reference.records(tmp_path).splitlines()[2]
    assert "a&#124;b &lt;script&gt; &#91;c&#93;(d) &#124; e" in row
    assert "| PASSED: 2 of 2 checks | 2026-11-18 12:00 UTC |" in row
    assert row.count("|") == 9


def test_a_record_that_its_key_did_not_sign_ends_the_build(tmp_path: Path) -> None:
    hand_in(tmp_path, "gpu", record_samples.OTHER_KEY)
    with pytest.raises(RecordError, match="signed with another key"):
        reference.records(tmp_path)


def test_every_record_has_a_key_and_every_key_a_record() -> None:
    records, public = ({file.stem for file in reference.RECORDS.glob(f"*.{end}")} for end in ("json", "pem"))
    assert records and records == public
    assert not [file for file in reference.RECORDS.iterdir() if file.suffix not in (".json", ".pem")]
