"""The rooms of the package import in one direction only, and the pure ones touch nothing outside themselves."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "ringfence"

GROUND = {"errors", "keys"}
ALLOWED: dict[str, set[str]] = {
    "__init__": {"errors", "groups"},
    "errors": set(),
    "keys": {"errors"},
    "torch_versions": set(),
    "log": set(),
    "link": GROUND,
    "collectives": {"errors"},
    "policy": GROUND,
    "admission": GROUND | {"policy"},
    "evidence": GROUND | {"admission"},
    "interfaces": {"errors"},
    "private_files": GROUND,
    "settings": GROUND | {"admission", "interfaces", "policy", "private_files"},
    "settings_reference": set(),
    "transport": GROUND,
    "control": GROUND | {"admission", "transport"},
    "join": GROUND | {"admission", "control", "evidence", "policy", "settings", "transport"},
    "dataplane": GROUND | {"collectives", "link", "runtime", "transport"},
    "runtime": GROUND | {"collectives", "control", "dataplane", "link", "transport"},
    "rendezvous": set(),
    "metrics": {"admission", "dataplane", "errors", "runtime", "settings"},
    "session": GROUND
    | {"collectives", "dataplane", "join", "log", "metrics", "rendezvous", "runtime", "settings", "transport"},
    "backend": {"collectives", "dataplane", "errors", "link", "runtime", "session", "torch_versions"},
    "guard": {"errors"},
    "autoload": {"backend", "errors", "guard", "log"},
    "groups": {"autoload", "backend", "errors"},
    "lab": GROUND
    | {
        "__init__",
        "admission",
        "backend",
        "collectives",
        "control",
        "dataplane",
        "guard",
        "join",
        "link",
        "runtime",
        "session",
    }
    | {"private_files", "settings", "transport"},
    "cli": GROUND
    | {"__init__", "admission", "dataplane", "evidence", "guard", "join", "lab", "policy", "private_files"}
    | {"runtime", "settings", "torch_versions", "transport"},
}
PURE = ("errors", "keys", "torch_versions", "link", "collectives", "policy", "admission", "lab.plan")
OUTSIDE = {
    "asyncio", "fcntl", "glob", "io", "logging", "multiprocessing", "os", "pathlib", "queue", "random", "resource",
    "secrets", "select", "selectors", "shutil", "signal", "socket", "ssl", "subprocess", "sys", "tempfile",
    "threading", "time", "torch", "uuid", "OpenSSL",
}  # fmt: skip


def room_of(file: Path) -> str:
    """The top-level module or folder of the package that a file lies in."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_within(file: Path, name: str) -> bool:
    """Whether a file is the module of that dotted name, or lies in the package of that name."""
    path = PACKAGE / name.replace(".", "/")
    return file == path.with_suffix(".py") or path in file.parents


def imports_of(file: Path) -> Iterator[str]:
    """Every module that a file imports, by full name, wherever in it the import stands."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide the direction"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported_by(file: Path) -> set[str]:
    """The rooms of ringfence that a file imports; the package itself counts as `__init__`."""
    rooms = set()
    for name in imports_of(file):
        parts = name.split(".")
        if parts[0] == "ringfence":
            known = len(parts) > 1 and ((PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").exists())
            rooms.add(parts[1] if known else "__init__")
    return rooms


FILES = sorted(PACKAGE.rglob("*.py"))
PURE_FILES = [file for file in FILES if any(is_within(file, room) for room in PURE)]


def name_of(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_point_one_way(file: Path) -> None:
    room = room_of(file)
    assert room in ALLOWED, f"{room} is a new room: say in ALLOWED what it may import"
    wrong = rooms_imported_by(file) - ALLOWED[room] - {room}
    assert not wrong, f"{room} may not import {sorted(wrong)}"


def test_the_table_names_no_room_that_is_gone() -> None:
    assert set(ALLOWED) == {room_of(file) for file in FILES}


def test_allowed_directions_have_no_cycle() -> None:
    order: list[str] = []
    left = {**ALLOWED, "dataplane": ALLOWED["dataplane"] - {"runtime"}}  # which it imports for types only
    while left:
        free = [room for room, needs in left.items() if not needs - set(order)]
        assert free, f"a cycle among {sorted(left)}"
        order.extend(free)
        for room in free:
            del left[room]


@pytest.mark.parametrize("file", PURE_FILES, ids=name_of)
def test_pure_rooms_import_nothing_outside(file: Path) -> None:
    wrong = {name for name in imports_of(file) if name.split(".")[0] in OUTSIDE}
    assert not wrong, f"time, entropy and bytes are arguments here, not imports: {sorted(wrong)}"


def test_import_ringfence_needs_no_torch() -> None:
    modules = ["ringfence", "ringfence.cli", *(f"ringfence.{room}" for room in PURE)]
    program = (
        f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
