"""Every promise has a test, and every marker names a promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.promises import Promise, Section, marked_tests, problems, sections, tables

LISTED = [Section("Links", (Promise("Frames are sealed.", "Headers are not."), Promise("Nonces are fresh.")))]


def marked(folder: Path, text: str) -> dict[str, list[str]]:
    """The markers of one test file with this text."""
    (folder / "tests").mkdir()
    (folder / "tests/test_some.py").write_text(text)
    return marked_tests(folder / "tests")


def test_every_promise_has_a_test_and_every_marker_a_promise() -> None:
    assert problems(sections(), marked_tests()) == []


def test_there_are_promises_in_every_section() -> None:
    assert len(sections()) >= 9
    assert all(section.promises for section in sections())


def test_a_promise_without_a_test_is_a_problem(tmp_path: Path) -> None:
    tests = marked(tmp_path, '@pytest.mark.promise("Frames are sealed.")\ndef test_frames() -> None: ...\n')
    assert problems(LISTED, tests) == ["no test has the marker: Nonces are fresh."]


def test_a_marker_without_a_promise_is_a_problem(tmp_path: Path) -> None:
    tests = marked(tmp_path, '@pytest.mark.promise("Frames are seeled.")\ndef test_frames() -> None: ...\n')
    assert "not in promises.toml: 'Frames are seeled.', on tests/test_some.py::test_frames" in problems(LISTED, tests)


def test_a_promise_that_is_listed_twice_is_a_problem() -> None:
    tests = {promise.text: ["tests/test_some.py::test_frames"] for promise in LISTED[0].promises}
    assert problems(LISTED, tests) == []
    assert problems([*LISTED, *LISTED], tests)[0] == "listed twice: Frames are sealed."


def test_markers_of_methods_and_several_on_one_test_are_found(tmp_path: Path) -> None:
    text = (
        "class TestLink:\n"
        '    @pytest.mark.parametrize("size", [1])\n'
        '    @pytest.mark.promise("Frames are sealed.")\n'
        '    @pytest.mark.promise("Nonces are fresh.")\n'
        "    def test_frames(self, size: int) -> None: ...\n"
    )
    where = ["tests/test_some.py::TestLink::test_frames"]
    assert marked(tmp_path, text) == {"Frames are sealed.": where, "Nonces are fresh.": where}


def test_a_marker_that_is_no_plain_text_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="malformed"):
        marked(tmp_path, "@pytest.mark.promise(PROMISE)\ndef test_frames() -> None: ...\n")


def test_the_page_shows_promise_limits_and_tests(tmp_path: Path) -> None:
    tests = marked(tmp_path, '@pytest.mark.promise("Frames are sealed.")\ndef test_frames() -> None: ...\n')
    assert "| **Frames are sealed.**<br>Headers are not. | `test_some.py`: frames |" in tables(LISTED, tests)
