"""The unsealed variant exists in the benchmark and nowhere else: nothing of the product leads to it."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfence.backend import create
from ringfence.keys import Secret
from ringfence.lab.bench.unsealed import UnsealedKeys, UnsealedSession
from ringfence.link.seal import Opener, OriginKeys, Sealer
from ringfence.runtime.engine import Engine
from ringfence.runtime.link_keys import LinkKeys
from ringfence.session import Session
from ringfence.settings import Settings
from tests.unit.test_imports import FILES, PACKAGE, imports_of, name_of

PRODUCT = [file for file in FILES if file.relative_to(PACKAGE).parts[0] != "lab"]
COMMANDS = tuple(PACKAGE.glob("cli/*.py"))
MAKERS = {"sealer", "opener", "origin_keys"}
HOOKS = ("engine_type", "keys_type")  # of a session; the benchmark replaces them


@pytest.mark.parametrize("file", PRODUCT, ids=name_of)
def test_the_product_does_not_import_the_lab(file: Path) -> None:
    """Commands of the lab do, and may not import what makes a variant: that is left to the benchmark's own processes."""
    imported = {name for name in imports_of(file) if name.startswith("ringfence.lab")}
    if file in COMMANDS:
        parts = {part for name in imported for part in name.split(".")}
        assert not parts & {"unsealed", "variants", "worker", "training", "profile", "forced", "replay"}
    else:
        assert not imported


@pytest.mark.parametrize("file", PRODUCT, ids=name_of)
def test_nothing_of_the_product_chooses_another_engine_or_other_sealers(file: Path) -> None:
    """Only Session chooses the engine and the link keys, and only LinkKeys makes sealers and openers."""
    where = name_of(file)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in MAKERS:
            assert where == "runtime/link_keys.py", f"{where} makes a {node.name} of its own"
        if isinstance(node, ast.ClassDef):
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            assert not bases & {"Engine", "LinkKeys", "Session", "Sealer", "Opener", "OriginKeys"}, (
                f"{where}: {node.name}"
            )
        if isinstance(node, ast.Constant):
            assert node.value not in HOOKS, f"{where} names {node.value} in a string"
        if isinstance(node, ast.Attribute) and node.attr in HOOKS:
            assert where == "session.py"
            assert isinstance(node.ctx, ast.Load)


def test_the_engine_of_a_session_is_the_sealing_one_and_no_argument_says_otherwise() -> None:
    assert Session.engine_type is Engine
    assert Session.keys_type is LinkKeys
    assert list(inspect.signature(Session).parameters) == ["store", "rank", "world_size", "timeout"]
    assert {field.name for field in fields(Settings)} == {
        "secret",
        "run_id",
        "generation",
        "host",
        "ports",
        "advertise",
        "join_timeout",
        "outage",
        "metrics_file",
        "stage_times",
        "policy",
        "certificate",
        "vcek",
        "token_command",
    }
    assert inspect.getclosurevars(create).globals["Session"] is Session


def test_an_engine_seals_and_the_benchmarks_variant_copies() -> None:
    header, plain, secret = b"header", b"plaintext of a frame", Secret(bytes(range(32)))
    for kind, sealed in ((LinkKeys, True), (UnsealedKeys, False)):
        keys = kind(secret, X25519PrivateKey.generate(), [], alive=b"\1")
        frame, opened = bytearray(len(plain) + 16), bytearray(len(plain))
        keys.sealer(secret).seal_into(header, plain, memoryview(frame))
        assert (plain not in frame) is sealed
        keys.opener(secret).open_into(header, frame, memoryview(opened))
        assert opened == plain
        origin = keys.origin_keys(secret, 0)
        origin.seal_into(origin.take(), header, plain, memoryview(frame))
        assert (plain not in frame) is sealed
        kinds = [type(keys.sealer(secret)), type(keys.opener(secret)), type(origin)]
        assert (kinds == [Sealer, Opener, OriginKeys]) is sealed
    assert UnsealedSession.keys_type is UnsealedKeys
