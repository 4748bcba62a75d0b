"""Which tests `scripts/test --changed` selects."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import changed
from scripts.changed import import_graph, imported_files, module_of, reached_from, reached_tests

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("src/ringfence/collectives/ring.py", "tests/unit/test_collectives.py"),
        ("src/ringfence/runtime/engine.py", "tests/unit/test_runtime.py"),
        ("src/ringfence/admission/tree.py", "tests/unit/test_admission_tree.py"),
        ("src/ringfence/checkpoint/folder.py", "tests/unit/test_checkpoint_api.py"),  # by name, from its package
        ("src/ringfence/dataplane/csrc/chunks.c", "tests/unit/test_core.py"),
        ("src/ringfence/keys.py", "tests/vectors/test_link_vectors.py"),
        ("docs/index.md", "tests/unit/test_documents.py"),
        ("formal/README.md", "tests/unit/test_formal.py"),
        ("lab/src/ringfence_lab/plan/cost.py", "lab/tests/unit/test_plan_cost.py"),
        ("tests/memory_cluster.py", "tests/unit/test_runtime.py"),
        ("tests/unit/test_keys.py", "tests/unit/test_keys.py"),
    ],
)
def test_a_change_reaches_its_tests(file: str, test: str) -> None:
    assert (ROOT / file).exists()
    assert test in reached_tests([file])


def test_the_nearest_tests_come_first() -> None:
    tests = list(reached_tests(["src/ringfence/runtime/engine.py"]))
    assert tests.index("tests/unit/test_runtime_endings.py") < tests.index("lab/tests/unit/test_bench.py")


def test_a_change_does_not_reach_what_is_below_it() -> None:
    assert "tests/unit/test_keys.py" not in reached_tests(["src/ringfence/cli/policy.py"])
    assert reached_tests(["LICENSE"]) == {}


def test_every_unit_test_is_reached_by_something_else() -> None:
    """Otherwise a change of what it tests would not select it."""
    importers = import_graph()
    start = [file for file in importers if not file.startswith(("tests/unit/", "lab/tests/unit/"))]
    read = {reader for readers in changed.READERS.values() for reader in readers}
    reached = reached_from(start, importers).keys() | read
    tests = {
        f"{folder}/{path.name}"
        for folder in ("tests/unit", "lab/tests/unit")
        for path in (ROOT / folder).glob("test_*.py")
    }
    assert tests - reached == set()


def test_the_command_line_reaches_commands_that_it_imports_by_name() -> None:
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "src").rglob("*.py"))]
    modules = {module_of(file): file for file in files}
    assert "src/ringfence/cli/policy.py" in imported_files("src/ringfence/cli/__init__.py", modules)
