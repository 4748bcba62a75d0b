"""No transport outside the lab can put an unsealed tensor on a network.

A tensor leaves a worker through an engine, which seals it with the sealers that it makes, or through a process group of
torch's own, which does not seal. So the product is safe if all of the following hold:

1. The product's wheel holds nothing of the lab, where the engine without sealing is (tests/integration/test_wheels.py), and
   imports nothing of it (test_imports.py).
2. Only `Session` chooses the engine's class, and it chooses `Engine`. Only `Engine` makes sealers, and it makes those of
   `ringfence.link.seal`. No class of the product derives from any of them.
3. The product makes no process group of another backend, with two exceptions: `ringfence demo`, which shows what a network
   sees of plaintext Gloo, and groups inside one machine (tests/attack/test_inside_machine.py).
4. Frames that are not sealed exist on links inside one machine only. One file makes what writes them, for links whose stream
   is a Unix socket, and two files say which links those are (tests/attack/test_shared_memory.py, test_local_links.py).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import fields

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfence.backend import sessions
from ringfence.backend.process_group import create
from ringfence.config.settings import Settings
from ringfence.keys import Secret
from ringfence.link.seal import Opener, OriginKeys, Sealer
from ringfence.runtime.engine import Engine
from ringfence.runtime.link_keys import LinkKeys
from ringfence.session.session import Session
from ringfence_lab.bench.unsealed import UnsealedKeys, UnsealedSession
from tests.unit.test_imports import FILES, PACKAGE, tree_of, violations

MAKERS = {"sealer", "opener", "origin_keys"}
SEALERS = {"Sealer", "Opener", "OriginKeys"}
SEALED = SEALERS | {"Engine", "LinkKeys", "Session"}
LOCAL = {"LocalSealer", "LocalOpener"}  # copy, for links inside one machine
LINKS = "runtime/links.py"  # makes them
# Where a link, or a communicator, is said to be inside one machine.
DECIDES = {LINKS, "transport/tcp.py", "runtime/communicator.py"}
CHANNELS = {"runtime/channels.py": {"Engine"}}  # further threads of the same engine, with the keys of the session
HOOKS = {"engine_type", "keys_type"}  # of a session; the benchmark replaces them
KEYS, SESSION = "runtime/link_keys.py", "session/session.py"
PLAINTEXT = {"gloo", "nccl", "mpi", "ucc"}  # backends of torch that do not seal
# Files of the product that name a plaintext backend or choose a backend at run time, and why they may.
EXCEPTIONS = {
    "backend/inside.py": "makes groups inside one machine, on the loopback interface, if a policy permits them",
    "admission/policy_file/policy_file.py": "names the backends that a policy may permit there",
    "cli/demo/__init__.py": "shows what a network sees of plaintext Gloo",
    "cli/demo/worker.py": "is the worker of that demonstration",
    "cli/one_worker.py": "checks that ringfence makes a group for which a program asks Gloo",
}
GUARD = "guard.py"  # defines `plaintext_allowed`, and uses it once a group has been considered
INSIDE = "backend/inside.py"  # uses it once all members have proved to be on one machine


def unsealed(tree: ast.AST, where: str) -> Iterator[str]:
    """Yield each construct of a product file that could lead a tensor past the sealers."""
    protocols = {
        member
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "Protocol" in _names(node.bases)
        for member in node.body
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in MAKERS and where != KEYS and node not in protocols:
            yield f"makes a {node.name} of its own"
        if isinstance(node, ast.ClassDef) and (
            found := _names(node.bases) & ((SEALED | LOCAL) - CHANNELS.get(where, set()))
        ):
            yield f"{node.name} derives from {found}"
        if isinstance(node, ast.Call) and where != KEYS and (found := _names([node.func]) & SEALERS):
            yield f"constructs {found}"
        if isinstance(node, ast.Call) and where != LINKS and (found := _names([node.func]) & LOCAL):
            yield f"constructs {found}"
        assigned = isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
        if assigned and "is_local" in _names([node]) and where not in DECIDES:
            yield "says that a link is inside one machine"
        if isinstance(node, ast.Constant) and node.value in HOOKS:
            yield "names the class of the engine or of its keys in a string"
        if isinstance(node, ast.Attribute) and node.attr in HOOKS and where != SESSION:
            yield "reads the class of the engine or of its keys"
        if isinstance(node, ast.Attribute) and node.attr in HOOKS and not isinstance(node.ctx, ast.Load):
            yield "replaces the class of the engine or of its keys"
        if where not in (GUARD, INSIDE) and _names([node]) & {"plaintext_allowed"}:
            yield "allows plaintext"
        if where not in EXCEPTIONS:
            yield from _plaintext(node)


def _plaintext(node: ast.AST) -> Iterator[str]:
    """Yield how a node makes a process group of another backend, if it does."""
    if isinstance(node, ast.Constant) and node.value in PLAINTEXT:
        yield f"names the backend {node.value}"
    if any(name.lower().removeprefix("processgroup") in PLAINTEXT for name in _names([node])):
        yield "uses a process group of torch's own"
    if isinstance(node, ast.Call) and _names([node.func]) == {"init_process_group"}:
        backend = node.args[0] if node.args else None
        if not isinstance(backend, ast.Constant) or backend.value != "ringfence":
            yield "makes a process group of a backend that is not ringfence"


def _names(nodes: Sequence[ast.AST]) -> set[str]:
    """The names that nodes use or import: `Engine` for `Engine`, `engine.Engine` and `from ... import Engine`."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.name for alias in node.names)
    return found


def test_no_file_of_the_product_leads_past_the_sealers() -> None:
    assert not violations(FILES, lambda file: list(unsealed(tree_of(file), str(file.relative_to(PACKAGE)))))


@pytest.mark.parametrize(
    "code",
    [
        "class Fast(Engine): pass",
        "class Fast(engine.Engine): pass",
        "class Quiet(Session): pass",
        "class Copier(Sealer): pass",
        "class Links:\n    def sealer(self, secret): return Copier()",
        "sealer = Sealer(secret, alive)",
        "class Copier(LocalSealer): pass",
        "link.sealer = LocalSealer(alive)",
        "link.opener = unsealed.LocalOpener()",
        "link.is_local = True",
        "session.engine_type = Fast",
        "session.keys_type = Copiers",
        "setattr(session, 'engine_type', Fast)",
        "dist.new_group(backend='gloo')",
        "dist.init_process_group(backend)",
        "dist.init_process_group()",
        "ProcessGroupGloo(store, 0, 2)",
        "c10d.ProcessGroupNCCL(store, 0, 2)",
        "from ringfence.guard import plaintext_allowed",
        "with guard.plaintext_allowed(): pass",
    ],
)
def test_the_check_finds_each_way_past_the_sealers(code: str) -> None:
    assert list(unsealed(ast.parse(code), "backend/new.py"))


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_each_exception_is_one(name: str) -> None:
    """A file that no longer needs its exception loses it."""
    assert list(unsealed(ast.parse((PACKAGE / name).read_text()), "without exceptions"))


def test_frames_that_are_not_sealed_are_made_for_links_inside_a_machine_only() -> None:
    """Each of them is constructed under `if self.is_local`."""
    tree = ast.parse((PACKAGE / LINKS).read_text())
    conditions = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "self.is_local"
    ]
    inside = {id(each) for node in conditions for statement in node.body for each in ast.walk(statement)}
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _names([node.func]) & LOCAL]
    assert len(made) == 2 and all(id(node) in inside for node in made)


def test_a_session_uses_the_sealing_engine_whatever_its_settings() -> None:
    assert Session.engine_type is Engine
    assert Session.keys_type is LinkKeys
    assert list(inspect.signature(Session).parameters) == ["store", "rank", "world_size", "timeout", "members"]
    assert {field.name for field in fields(Settings)} == {
        "secret",
        "run_id",
        "generation",
        "host",
        "ports",
        "advertise",
        "join_timeout",
        "outage",
        "channels",
        "metrics_file",
        "record",
        "stage_times",
        "same_host",
        "policy",
        "policy_path",
        "certificate",
        "certificate_source",
        "vcek",
        "token_command",
    }
    assert inspect.getclosurevars(create).globals["sessions"] is sessions
    assert inspect.getclosurevars(sessions._begin).globals["Session"] is Session


def test_the_engine_seals_and_the_benchmarks_variant_copies() -> None:
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
