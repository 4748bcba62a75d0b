"""The promises of tests/promises.toml, the tests that are marked with them, and the page that lists both.

python -m tests.promises            write docs/security/coverage.md
python -m tests.promises --check    fail if that page is stale, a promise has no test or a marker names no promise
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests/promises.toml"
PAGE = ROOT / "docs/security/coverage.md"
MARKER = "pytest.mark.promise"
OPENING = """\
<!-- Written by scripts/promises from tests/promises.toml and the tests. Do not edit. -->
# Coverage: promises and their tests

Each row is one promise and the tests that attack it or check it. A test is listed because it carries
`@pytest.mark.promise("…")` with that text; its name is written as words here. CI fails if a promise has no test or if this
page is stale.

A test shows that the listed attacks fail, not that every attack fails. [Threat model](threat-model.md) states the assumptions
behind this page, and [Limitations](limitations.md) what is not protected.
"""


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


def page(listed: Sequence[Section], tests: Mapping[str, Sequence[str]]) -> str:
    """Return the page of promises and tests, in Markdown."""
    lines = [OPENING]
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or check it; return the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/promises", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page would change")
    options = parser.parse_args(arguments)
    listed, tests = sections(), marked_tests()
    found = problems(listed, tests)
    text = page(listed, tests)
    if options.check and (not PAGE.is_file() or PAGE.read_text() != text):
        found.append(f"{PAGE.relative_to(ROOT)} is stale: run scripts/promises")
    for problem in found:
        print(problem, file=sys.stderr)
    if not options.check and not found:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
