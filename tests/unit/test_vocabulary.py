"""Words that were replaced by the field's own do not come back. docs/glossary.md has the words to use."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = tomllib.loads((ROOT / "tests" / "vocabulary.toml").read_text())
FOLDERS = ("src", "lab", "tests", "docs", "spec", "scripts", "formal")
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
LITERAL = re.compile(r"[\w '-]+")  # a word that stands in the text as it is, in upper or lower case


def replaced_words(text: str, excused: Collection[str] = ()) -> list[tuple[int, str, str]]:
    """Return the first of every replaced word in a text: its line, as it is written there, and what to say instead."""
    if "*" in excused:
        return []
    lower = text.lower()  # most texts have none of the words: that is found sooner without a pattern
    found = [
        (pattern.search(text), instead)
        for word, pattern, instead in PATTERNS
        if word not in excused and (word.lower() in lower or not LITERAL.fullmatch(word))
    ]
    return [(text.count("\n", 0, each.start()) + 1, each.group(), instead) for each, instead in found if each]


def test_no_replaced_word() -> None:
    assert not [
        f"{name_of(file)}:{line} says {word!r}: say {instead} (docs/glossary.md)"
        for file in FILES
        for line, word, instead in replaced_words(file.read_text(), TABLE["exceptions"].get(name_of(file), []))
    ]


def test_no_replaced_word_in_file_names() -> None:
    assert not [
        f"{name_of(file)}: {word} is called {instead} now"
        for file in FILES
        for _, word, instead in replaced_words(file.stem)
    ]


def test_words_are_found_within_identifiers() -> None:
    for text, word in (
        ("the epoch ends", "epoch"),
        ("EPOCH_KEY", "epoch"),
        ("JudgedBy", "judge"),
        ("a_stranger", "stranger"),
        ("Crews", "crew"),
    ):
        assert any(each == word and pattern.search(text) for each, pattern, _ in PATTERNS), text


def test_every_replaced_word_of_a_text_is_found() -> None:
    found = replaced_words("one\nan epoch\n\na stranger", excused=["crew"])
    assert [(line, word) for line, word, _ in found] == [(2, "epoch"), (4, "stranger")]
    assert [word for _, word, _ in replaced_words("an epoch, a stranger", excused=["epoch"])] == ["stranger"]
    assert replaced_words("an epoch", excused=["*"]) == []
    assert [word for _, word, _ in replaced_words("who Lets in")] == ["Lets in"], "not a literal"


def test_words_are_not_found_within_other_words() -> None:
    for text in ("reseat", "extoll", "crewman", "aggregate"):
        assert not replaced_words(text), text


def test_exceptions_are_needed() -> None:
    needless = []
    for name, words in TABLE["exceptions"].items():
        text = (ROOT / name).read_text()
        for word in words:
            if word != "*" and not any(each == word and pattern.search(text) for each, pattern, _ in PATTERNS):
                needless.append(f"{name}: {word}")
    assert not needless
