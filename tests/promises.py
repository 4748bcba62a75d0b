"""The promises of tests/promises.toml and the tests that are marked with them; docs/security/coverage.md lists both."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests/promises.toml"
MARKER = "pytest.mark.promise"


class Promise(NamedTuple):
    """One sentence, and where it ends."""

    text: str
    limits: str = ""


class Section(NamedTuple):
    """A group of promises under one heading."""

    title: str
    promises: tuple[Promise, ...]
    note: str = ""


def sections(path: Path = LIST) -> list[Section]:
    """Return the promises of a file, by section.

    Raises TypeError if a table has an unknown key or lacks a required one.
    """
    found = []
    for table in tomllib.loads(path.read_text())["section"]:
        promises = tuple(Promise(**each) for each in table.pop("promise"))
        found.append(Section(promises=promises, **table))
    return found


def marked_tests(folder: Path = ROOT / "tests") -> dict[str, list[str]]:
    """Return the tests that carry each promise, as `path::name` in the order of paths and lines. No test is imported."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        for name, text in _markers(path):
            found.setdefault(text, []).append(f"{path.relative_to(folder.parent)}::{name}")
    return found


def _markers(path: Path) -> Iterator[tuple[str, str]]:
    """Every marker in a file: the name of its test, and its text."""
    source = path.read_text()
    if MARKER not in source:
        return
    for node in ast.parse(source).body:
        tests = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        for test in tests:
            if isinstance(test, ast.FunctionDef):
                for text in _texts(test):
                    yield prefix + test.name, text


def _texts(test: ast.FunctionDef) -> Iterator[str]:
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == MARKER:
            (text,) = decorator.args
            yield ast.literal_eval(text)


def problems(listed: Sequence[Section], tests: Mapping[str, Sequence[str]]) -> list[str]:
    """Return what is wrong between the list and the markers; empty if nothing is."""
    texts = [promise.text for section in listed for promise in section.promises]
    return [
        *(f"listed twice: {text}" for text in sorted({text for text in texts if texts.count(text) > 1})),
        *(f"no test has the marker: {text}" for text in texts if text not in tests),
        *(f"not in {LIST.name}: {text!r}, on {where[0]}" for text, where in tests.items() if text not in texts),
    ]


def tables(listed: Sequence[Section], tests: Mapping[str, Sequence[str]]) -> str:
    """Return the tables of promises and tests, in Markdown."""
    lines = []
    for section in listed:
        lines += [f"## {section.title}\n"]
        lines += [f"{section.note}\n"] if section.note else []
        lines += ["| promise and its limits | tests |", "|---|---|"]
        for promise in section.promises:
            limits = f"<br>{promise.limits}" if promise.limits else ""
            lines.append(f"| **{promise.text}**{limits} | {_names(tests.get(promise.text, ()))} |")
        lines.append("")
    return "\n".join(lines)


def _names(tests: Sequence[str]) -> str:
    """Tests by file, their names as words: long names without a space do not fit a table."""
    files: dict[str, list[str]] = {}
    for test in tests:
        path, _, name = test.removeprefix("tests/").partition("::")
        files.setdefault(path, []).append(name.replace("test_", "", 1).replace("::", ": ").replace("_", " "))
    return "<br>".join(f"`{path}`: {'; '.join(names)}" for path, names in files.items())
