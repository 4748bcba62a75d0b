"""The layers of the package: which part imports which, no cycle of files, no faked types, small constructors.

A part is a top-level module or folder of the package. Imports under TYPE_CHECKING count like any other.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from tests.limits import HANG

PACKAGE = Path(__file__).parents[2] / "src" / "ringfence"

GROUND = {"errors", "keys", "release"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "log": set(),
    "machines": set(),
    "own_process": set(),
    "release": set(),
    "keys": {"errors"},
    "guard": {"errors", "log"},
    "link": GROUND,
    "collectives": GROUND | {"link", "machines"},
    "transport": GROUND | {"machines"},
    "admission": GROUND,
    "dataplane": GROUND | {"collectives", "link"},
    "evidence": GROUND | {"admission", "own_process"},
    "config": GROUND | {"admission", "evidence"},
    "record": GROUND | {"admission", "config"},
    "runtime": GROUND | {"admission", "collectives", "dataplane", "link", "machines", "transport"},
    "device": GROUND | {"collectives", "dataplane", "link", "runtime"},
    "session": GROUND
    | {"admission", "collectives", "config", "dataplane", "evidence", "log", "machines", "record", "runtime"}
    | {"transport"},
    "launch": GROUND | {"admission", "config", "guard", "log", "own_process", "session", "transport"},
    "backend": GROUND
    | {"collectives", "dataplane", "device", "guard", "launch", "link", "log", "machines", "record", "runtime"}
    | {"session"},
    "private_sums": GROUND | {"admission", "backend", "runtime", "session", "transport"},
    "__init__": GROUND | {"backend"},
    "checkpoint": GROUND | {"admission", "backend", "config", "dataplane"},
    "hooks": {"device", "errors"},
    "diloco": GROUND | {"backend", "hooks"},
    "cli": GROUND
    | {"__init__", "admission", "backend", "checkpoint", "config", "dataplane", "device", "evidence", "guard"}
    | {"own_process", "record", "runtime", "session", "transport"},
}
PURE = ("errors", "keys", "machines", "backend.torch_versions", "link", "collectives", "admission")
OUTSIDE = {
    "asyncio", "fcntl", "glob", "io", "logging", "multiprocessing", "os", "pathlib", "queue", "random", "resource",
    "secrets", "select", "selectors", "shutil", "signal", "socket", "ssl", "subprocess", "sys", "tempfile",
    "threading", "time", "torch", "uuid", "OpenSSL",
}  # fmt: skip


def part_of(file: Path) -> str:
    """Return the top-level module or folder of the package that a file belongs to."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_within(file: Path, name: str) -> bool:
    """Return whether a file is the module of that dotted name, or belongs to the package of that name."""
    path = PACKAGE / name.replace(".", "/")
    return file == path.with_suffix(".py") or path in file.parents


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def imports_of(file: Path) -> tuple[str, ...]:
    """Return everything that a file imports, by full name, wherever the import statement is."""
    found: list[str] = []
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def parts_imported_by(file: Path) -> set[str]:
    """Return the parts of ringfence that a file imports, and the lab; the package itself counts as `__init__`."""
    found = set()
    for name in imports_of(file):
        parts = name.split(".")
        if parts[0] == "ringfence_lab":  # another distribution, which imports this one
            found.add(parts[0])
        elif parts[0] == "ringfence":
            known = len(parts) > 1 and ((PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").exists())
            found.add(parts[1] if known else "__init__")
    return found


FILES = sorted(PACKAGE.rglob("*.py"))
PURE_FILES = [file for file in FILES if any(is_within(file, name) for name in PURE)]


def violations(files: Iterable[Path], check: Callable[[Path], list[str]]) -> list[str]:
    """Return what `check` finds in each of the files, with their names."""
    return [f"{file.relative_to(PACKAGE)}: {text}" for file in files for text in check(file)]


def wrong_directions(file: Path) -> list[str]:
    part = part_of(file)
    if part not in ALLOWED:
        return [f"{part} is new: add to ALLOWED what it may import"]
    relative = [name for name in imports_of(file) if name.startswith(".")]
    wrong = sorted(parts_imported_by(file) - ALLOWED[part] - {part})
    return [f"relative imports hide the direction: {name}" for name in relative] + [
        f"{part} may not import {each}" for each in wrong
    ]


def test_imports_point_one_way() -> None:
    assert not violations(FILES, wrong_directions)


def test_violations_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check of single files finds what it is for."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "keys.py").write_text(
        "import time\nfrom . import errors\nfrom ringfence.session.session import Session\nimport ringfence_lab.bench\n"
        "value = cast(Session, 1)\nclass Large:\n    def __init__(self, a, b, c, d, e, f, g, h, i): ...\n"
    )
    (tmp_path / "session.py").write_text("class Session: ...\n")
    file = tmp_path / "keys.py"
    assert wrong_directions(file) == [
        "relative imports hide the direction: .None.errors",
        "keys may not import ringfence_lab",
        "keys may not import session",
    ]
    assert faked_types(file, {"Session"}) == ["line 5: cast to Session"]
    assert large_constructors(file) == ["line 7: 9 arguments; group them in a dataclass"]
    assert imports_from_outside(file) == ["time, entropy and bytes are arguments here, not imports: time"]
    assert violations([file, tmp_path / "session.py"], large_constructors) == [
        "keys.py: line 7: 9 arguments; group them in a dataclass"
    ]


def test_the_table_lists_exactly_the_parts_of_the_package() -> None:
    assert set(ALLOWED) == {part_of(file) for file in FILES}


def test_allowed_directions_have_no_cycle() -> None:
    order: list[str] = []
    left = dict(ALLOWED)
    while left:
        free = [part for part, needs in left.items() if not needs - set(order)]
        assert free, f"a cycle among {sorted(left)}"
        order.extend(free)
        for part in free:
            del left[part]


def module_of(file: Path, source: Path) -> str:
    """Return the dotted name of the module that a file below a source folder holds."""
    parts = file.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(files: Iterable[Path], source: Path) -> dict[str, set[str]]:
    """Return for each module among these files those that its file imports."""
    modules = {module_of(file, source): file for file in files}
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        graph[module] = set()
        for name in imports_of(file):
            while name and name not in modules:  # a name imported from a module, or something of another package
                name = name.rpartition(".")[0]
            graph[module] |= {name} - {"", module}
    return graph


def cycle_in(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Return a cycle, its first module repeated at the end; an empty list if there is none."""
    done: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in done:
            for other in sorted(graph[module]):
                if found := search(other, [*path, module]):
                    return found
            done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := search(module, []))), [])


def test_the_import_graph_of_files_has_no_cycle() -> None:
    cycle = cycle_in(import_graph(FILES, PACKAGE.parent))
    assert not cycle, f"these files import each other: {' -> '.join(cycle)}"


def test_a_cycle_is_found() -> None:
    """The test of the import graph relies on this search."""
    assert cycle_in({"a": ["b"], "b": ["c", "d"], "c": [], "d": ["b"]}) == ["b", "d", "b"]
    assert cycle_in({"a": ["b", "c"], "b": ["c"], "c": []}) == []


@functools.cache
def classes_of_the_package() -> set[str]:
    return {node.name for file in FILES for node in ast.walk(tree_of(file)) if isinstance(node, ast.ClassDef)}


def faked_types(file: Path, classes: set[str]) -> list[str]:
    """Return calls of `typing.cast` to a class of the package, unless the value is a module imported at run time."""
    found = []
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cast":
            target, value = (ast.unparse(argument) for argument in node.args)
            if target.strip("'\"") in classes and not value.startswith("importlib.import_module("):
                found.append(f"line {node.lineno}: cast to {target}")
    return found


def test_no_cast_fakes_a_type() -> None:
    """An object that stands in for another one implements a protocol instead."""
    assert not violations(FILES, lambda file: faked_types(file, classes_of_the_package()))


def large_constructors(file: Path) -> list[str]:
    found = []
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            given = node.args
            count = len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1
            if count > 8:
                found.append(f"line {node.lineno}: {count} arguments; group them in a dataclass")
    return found


def test_constructors_take_at_most_eight_arguments() -> None:
    assert not violations(FILES, large_constructors)


def imports_from_outside(file: Path) -> list[str]:
    wrong = sorted({name for name in imports_of(file) if name.split(".")[0] in OUTSIDE})
    return [f"time, entropy and bytes are arguments here, not imports: {name}" for name in wrong]


def test_pure_parts_import_nothing_outside() -> None:
    assert not violations(PURE_FILES, imports_from_outside)


@pytest.mark.processes
def test_import_ringfence_needs_no_torch() -> None:
    modules = [
        "ringfence",
        "ringfence.cli",
        "ringfence.cli.audit",
        "ringfence.record.evidence",
        *(f"ringfence.{name}" for name in PURE),
    ]
    program = (
        f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=HANG).returncode == 0


def test_every_package_says_what_its_modules_are_for() -> None:
    for file in PACKAGE.rglob("*/__init__.py"):
        said = ast.get_docstring(ast.parse(file.read_text())) or ""
        here = {each.stem for each in file.parent.glob("*.py")} - {"__init__"}
        assert not {name for name in here if not re.search(rf"\b{name}\b", said)}, file.parent
