"""The unsealed variant exists in the benchmark and nowhere else: nothing of the product leads to it."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from ringfence.backend import create
from ringfence.keys import Secret
from ringfence.lab.bench.unsealed import UnsealedEngine, UnsealedSession
from ringfence.link.seal import Opener, OriginKeys, Sealer
from ringfence.runtime.engine import Engine
from ringfence.session import Session
from ringfence.settings import Settings
from tests.unit.test_imports import FILES, PACKAGE, imports_of, name_of

PRODUCT = [file for file in FILES if file.relative_to(PACKAGE).parts[0] != "lab"]
COMMANDS = tuple(PACKAGE.glob("cli/*.py"))
MAKERS = {"sealer", "opener", "origin_keys"}


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
    """Only Session says which engine it makes, and only Engine says which sealers."""
    where = name_of(file)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in MAKERS:
            assert where == "runtime/engine.py", f"{where} makes a {node.name} of its own"
        if isinstance(node, ast.ClassDef):
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            assert not bases & {"Engine", "Session", "Sealer", "Opener", "OriginKeys"}, f"{where}: {node.name}"
        if isinstance(node, ast.Constant):
            assert node.value != "engine_type", f"{where} names the engine's type in a string"
        if isinstance(node, ast.Attribute) and node.attr == "engine_type":
            assert where == "session.py"
            assert isinstance(node.ctx, ast.Load)


def test_the_engine_of_a_session_is_the_sealing_one_and_no_argument_says_otherwise() -> None:
    assert Session.engine_type is Engine
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
    for kind, sealed in ((Engine, True), (UnsealedEngine, False)):
        engine = kind.__new__(kind)
        engine.alive = b"\1"
        frame, opened = bytearray(len(plain) + 16), bytearray(len(plain))
        engine.sealer(secret).seal_into(header, plain, memoryview(frame))
        assert (plain not in frame) is sealed
        engine.opener(secret).open_into(header, frame, memoryview(opened))
        assert opened == plain
        origin = engine.origin_keys(secret, 0)
        origin.seal_into(origin.take(), header, plain, memoryview(frame))
        assert (plain not in frame) is sealed
        kinds = [type(engine.sealer(secret)), type(engine.opener(secret)), type(origin)]
        assert (kinds == [Sealer, Opener, OriginKeys]) is sealed
    assert UnsealedSession.engine_type is UnsealedEngine
