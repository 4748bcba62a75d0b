"""The table of seeded faults fits the tree: every text is there once, and every test that it lists exists."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from scripts import mutants
from scripts.mutants import ROOT, Mutant, Untested, parsed

TABLE = mutants.read()
LAYERS = ("admission", "checkpoint", "cli", "collectives", "dataplane", "launch", "link", "runtime", "device")


@cache
def definitions(file: Path) -> frozenset[str]:
    """The functions and classes of a test file, methods with their class."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{node.name}::{each.name}" for each in inner if isinstance(each, ast.FunctionDef)}
    return frozenset(found)


def exists(test: str) -> bool:
    file, _, rest = test.partition("[")[0].partition("::")
    return (ROOT / file).is_file() and (not rest or rest in definitions(ROOT / file))


@pytest.mark.parametrize("mutant", TABLE, ids=lambda mutant: mutant.name)
def test_every_fault_applies_once_and_lists_tests_that_exist(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    changed = mutant.applied(text)
    assert changed != text
    if mutant.file.endswith(".py"):
        ast.parse(changed)
    assert mutant.tests and all(exists(test) for test in mutant.tests), mutant.tests
    assert mutant.fault.endswith(".") and mutant.dataplane in ("compiled", "python")


def test_the_faults_are_over_all_layers_and_have_different_names() -> None:
    names = Counter(mutant.name for mutant in TABLE)
    assert len(names) == len(TABLE) >= 24
    assert {mutant.file.split("/")[2] for mutant in TABLE} >= {*LAYERS}
    assert any(mutant.file.endswith(".c") for mutant in TABLE)
    assert any(mutant.dataplane == "python" for mutant in TABLE)


@pytest.mark.parametrize(("text", "count"), [("a = 2", 0), ("a = 1; b = 1; a = 1", 2)])
def test_a_text_that_is_not_there_exactly_once_is_an_error(text: str, count: int) -> None:
    mutant = Mutant("name", "file.py", "a = 1", "a = 2", "A fault.", ("tests/unit/test_mutants.py",))
    with pytest.raises(Untested, match=f"occurs {count} times in file.py"):
        mutant.applied(text)


def test_a_test_that_does_not_exist_is_noticed() -> None:
    assert exists("tests/unit/test_mutants.py::exists[any]")
    assert not exists("tests/unit/test_mutants.py::test_of_another_file")
    assert not exists("tests/unit/test_of_no_file.py")


def test_the_first_failure_is_read_from_the_summary_of_pytest() -> None:
    summary = (
        "PASSED tests/a.py::test_one[x]\nFAILED tests/a.py::test_two[a b] - AssertionError: no\nERROR tests/b.py - E\n"
    )
    tests = parsed(1, summary)
    assert tests.first_failure == "tests/a.py::test_two[a b]"
    assert tests.failed == ("tests/a.py::test_two[a b]", "tests/b.py")
    assert tests.ran("tests/a.py") and tests.ran("tests/a.py::test_one") and not tests.ran("tests/a.py::test_o")
    assert parsed(-11, "output\nthe last line\n").first_failure == "pytest ended with signal 11: the last line"
