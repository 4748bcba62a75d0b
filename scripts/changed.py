"""Lists the test files that a change can reach, nearest first: `scripts/test --changed` runs them.

A file reaches what it imports. Import statements count wherever they stand, and so do strings that name a module, since the
command line and a few packages import by name.
"""

from __future__ import annotations

import argparse
import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
SOURCES: Final = ("src/ringfence", "lab/src", "lab/tests", "tests", "scripts")
TESTS: Final = ("tests/unit/", "tests/vectors/", "tests/fuzz/", "lab/tests/unit/")  # within one process
FACADE: Final = "src/ringfence/__init__.py"  # imports the rest by name, for users; the package only reads its version
NEAR: Final = 2  # imports between a change and a test that is worth waiting for
# What is read and not imported, by the beginnings of paths.
READERS: Final[Mapping[str, tuple[str, ...]]] = {
    "src/": ("tests/unit/test_imports.py", "tests/unit/test_product_seals.py"),
    "src/ringfence/dataplane/csrc/": ("src/ringfence/dataplane/native.py",),
    "lab/src/ringfence_lab/accelerator/": ("lab/src/ringfence_lab/accelerator/__init__.py",),
    "lab/src/ringfence_lab/plan/": ("lab/src/ringfence_lab/plan/__init__.py",),
    "lab/src/ringfence_lab/report/": ("lab/src/ringfence_lab/report/__init__.py",),
    "lab/src/ringfence_lab/study/": ("lab/src/ringfence_lab/study/__init__.py",),
    "docs/": ("tests/unit/test_documents.py", "tests/unit/test_site.py", "tests/unit/test_reference.py"),
    "README.md": ("tests/unit/test_documents.py",),
    "examples/": ("tests/unit/test_manifests.py",),
    "spec/": ("tests/unit/test_documents.py", "tests/unit/test_formal.py", "tests/vectors/test_link_spec.py"),
    "formal/": ("tests/unit/test_formal.py", "tests/unit/test_formal_cheats.py"),
    **{
        f"tests/vectors/{name}.json": (f"tests/vectors/test_{name}_vectors.py",)
        for name in ("azure", "checkpoint", "launch", "link", "record")
    },
    "tests/promises.toml": ("tests/unit/test_promises.py",),
}


def changed_files(base: str) -> list[str]:
    """Return the files that differ from a commit, and those that git does not know yet."""
    commands = (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"])
    found: set[str] = set()
    for command in commands:
        output = subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout  # noqa: S603, S607
        found |= set(output.split("\n")) - {""}
    return sorted(found)


def module_of(file: str) -> str:
    """Return the dotted name under which a Python file is imported."""
    parts = Path(file.removeprefix("lab/src/").removeprefix("src/")).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_named_in(tree: ast.Module, modules: Iterable[str]) -> Iterator[str]:
    """Yield the modules that a file names in import statements or in strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            if node.value in modules:
                yield node.value
            elif node.value.endswith("."):  # the beginning of a name that is put together
                yield from (module for module in modules if module.rpartition(".")[0] == node.value[:-1])


def imported_files(file: str, modules: Mapping[str, str]) -> set[str]:
    """Return the files that a file imports."""
    found: set[str] = set()
    for name in modules_named_in(ast.parse((ROOT / file).read_text()), modules):
        while name and name not in modules:  # a name imported from a module, or something of another package
            name = name.rpartition(".")[0]
        if name:
            found.add(modules[name])
    return found - {file}


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Return for each Python file the files that import it."""
    files = [str(path.relative_to(ROOT)) for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    modules = {module_of(file): file for file in files}
    importers: dict[str, set[str]] = {file: set() for file in files}
    for file in files:
        for other in imported_files(file, modules):
            importers[other].add(file)
    return importers


def reached_from(files: Iterable[str], importers: Mapping[str, set[str]]) -> dict[str, int]:
    """Return every file that these reach, with the smallest number of imports between."""
    distance: dict[str, int] = {}
    front = {file for file in files if file in importers}
    steps = 0
    while front:
        distance.update(dict.fromkeys(front, steps))
        found = {(file, other) for file in front for other in importers[file]}
        front = {
            other for file, other in found if file != FACADE or other.startswith(("tests/", "lab/tests/"))
        } - distance.keys()
        steps += 1
    return distance


def starting_points(files: Iterable[str]) -> Iterator[str]:
    """Yield the Python files to begin at: the changed ones, and those that read a changed file."""
    for file in files:
        yield file
        yield from (reader for prefix, readers in READERS.items() if file.startswith(prefix) for reader in readers)


def reached_tests(files: Iterable[str]) -> dict[str, int]:
    """Return the test files that a change of these files can reach, nearest first, and through how many imports."""
    distance = reached_from(starting_points(files), import_graph())
    tests = [file for file in distance if file.startswith(TESTS) and Path(file).name.startswith("test_")]
    return {file: distance[file] for file in sorted(tests, key=lambda file: (distance[file], file))}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/test --changed", description=__doc__)
    parser.add_argument("base", nargs="?", default="HEAD", help="the commit to compare with; otherwise the last one")
    found = reached_tests(changed_files(parser.parse_args().base))
    near = [test for test, distance in found.items() if distance <= NEAR]
    print("\n".join(near))
    if len(near) < len(found):
        print(f"{len(found) - len(near)} files are more than {NEAR} imports away: scripts/test --fast", file=sys.stderr)


if __name__ == "__main__":
    main()
