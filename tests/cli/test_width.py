"""What every command prints at 80 columns; `longest_lines.py` holds the commands and the exceptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringfence.cli import terminal
from tests.cli.longest_lines import COLUMNS, commands, longest, printed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


SLOW = {"--sweep", "calibrate", "validate"}  # they predict for ten seconds and more


def of_tier(arguments: tuple[str, ...]) -> Any:
    marks = [pytest.mark.nightly] if SLOW & {*arguments} and "--help" not in arguments else []
    return pytest.param(arguments, id=" ".join(arguments), marks=marks)


@pytest.mark.parametrize("arguments", map(of_tier, commands()))
def test_output_fits_80_columns(arguments: tuple[str, ...], folder: Path) -> None:
    text = printed(arguments, folder)
    assert text.strip()
    assert "Traceback" not in text
    line = longest(text)
    assert len(line) <= COLUMNS, line


# -- the helper -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "width"), [("100", 100), ("7", terminal.NARROWEST)])
def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: str, width: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal.columns() == width


def test_paths_and_options_are_not_broken() -> None:
    path = "/a-folder/with-hyphens/" + "x" * 60
    assert path in terminal.wrap(f"cannot read {path} for now", width=40).split("\n")
    assert "--trust-domain" in terminal.wrap("give this with --trust-domain", width=20).split("\n")


def test_a_long_command_continues_after_a_backslash() -> None:
    text = "export " + " ".join(f"NAME_{number}=/some/path/{number}" for number in range(4))
    lines = terminal.command(text, width=40).split("\n")
    assert all(len(line) <= 40 for line in lines)
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert " ".join("".join(lines).replace("\\", " ").split()) == text


def test_paragraphs_are_filled_and_examples_become_two_columns() -> None:
    text = "one two three four\nfive six\n\nexamples:\n  ringfence doctor        check this machine\n  ringfence demo  see it\n"
    assert terminal.layout(text, 30) == (
        "one two three four five six\n\nexamples:\n  ringfence doctor\n      check this machine\n  ringfence demo\n      see it"
    )
    assert terminal.layout("  a  b", 30) == "  a  b"


def test_a_table_wraps_headers_first_and_keeps_numbers_with_their_units() -> None:
    rows = [["name", "seconds of a step", "because"], ["one", "1.5 s", "a reason in words"]]
    assert terminal.table(rows, 60).split("\n")[1] == "one               1.5 s  a reason in words"
    narrow = terminal.table(rows, 34).split("\n")
    assert all(len(line) <= 34 for line in narrow)
    assert "1.5 s" in "\n".join(narrow)
    assert narrow[0].startswith("name  ")


def test_errors_keep_their_line_breaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal.complain("the first line is longer than that\nand a second")
    assert capsys.readouterr().err == "ringfence: the first line is longer than\n  that\nand a second\n"
