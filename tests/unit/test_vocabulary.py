"""Words that were replaced by the field's own do not come back. docs/glossary.md has the words to use."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = tomllib.loads((ROOT / "tests" / "vocabulary.toml").read_text())
FOLDERS = ("src", "tests", "docs", "spec", "scripts", "formal")
TEXTS = {".py", ".pyi", ".c", ".h", ".cpp", ".hpp", ".md", ".toml", ".css", ".html", ".j2", ".sh", ".pv", ".pvl", ""}
RECORDED = ("docs/results", "docs/figures", "tests/evidence", "tests/fuzz/found")  # bytes that others made, or tools
FILES = sorted(
    file
    for folder in FOLDERS
    for file in (ROOT / folder).rglob("*")
    if file.is_file() and file.suffix in TEXTS and "__pycache__" not in file.parts and ".egg-info" not in str(file)
    if not any(file.is_relative_to(ROOT / each) for each in RECORDED)
) + sorted(ROOT.glob("*.md"))


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def patterns() -> Iterator[tuple[str, re.Pattern[str], str]]:
    """Every word, how to find it, and what to say instead."""
    for word, instead in TABLE["words"].items():
        camel = word.capitalize()
        plural = "(?:s|es|d|ed|ing)?"
        found = rf"(?<![a-z])(?:{word}{plural}|{word.upper()}S?)(?![a-z])|(?<![A-Z]){camel}{plural}(?![a-z])"
        yield word, re.compile(found), instead
    for phrase, instead in TABLE["phrases"].items():
        yield phrase, re.compile(rf"\b{phrase}\b", re.IGNORECASE), instead
    for name, instead in TABLE["identifiers"].items():
        yield name, re.compile(rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9])"), instead


PATTERNS = list(patterns())


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_no_replaced_word(file: Path) -> None:
    excused = TABLE["exceptions"].get(name_of(file), [])
    if "*" in excused:
        return
    text = file.read_text()
    for word, pattern, instead in PATTERNS:
        if word in excused:
            continue
        found = pattern.search(text)
        if found:
            line = text.count("\n", 0, found.start()) + 1
            pytest.fail(f"{name_of(file)}:{line} says {found.group()!r}: say {instead} (docs/glossary.md)")


def test_no_replaced_word_in_file_names() -> None:
    for file in FILES:
        for word, pattern, instead in PATTERNS:
            assert not pattern.search(file.stem), f"{name_of(file)}: {word} is called {instead} now"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("the epoch ends", "epoch"),
        ("EPOCH_KEY", "epoch"),
        ("JudgedBy", "judge"),
        ("a_stranger", "stranger"),
        ("Crews", "crew"),
    ],
)
def test_words_are_found_within_identifiers(text: str, word: str) -> None:
    assert any(each == word and pattern.search(text) for each, pattern, _ in PATTERNS)


@pytest.mark.parametrize("text", ["reseat", "extoll", "crewman", "aggregate"])
def test_words_are_not_found_within_other_words(text: str) -> None:
    assert not any(pattern.search(text) for _, pattern, _ in PATTERNS)


def test_exceptions_are_needed() -> None:
    for name, words in TABLE["exceptions"].items():
        text = (ROOT / name).read_text()
        for word in words:
            assert word == "*" or any(each == word and pattern.search(text) for each, pattern, _ in PATTERNS), (
                f"{name}: {word}"
            )
