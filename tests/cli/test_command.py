"""The command line as a whole: help that teaches, errors in one line, exit codes."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from tests.cli.command import ringfence

COMMANDS = [
    (),
    ("demo",),
    ("doctor",),
    ("secret",),
    ("secret", "new"),
    ("bench",),
    ("bench", "collectives"),
    ("bench", "train"),
]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_help_is_there_for_every_command(arguments: tuple[str, ...]) -> None:
    done = ringfence(*arguments, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: {' '.join(['ringfence', *arguments])}")


def test_help_teaches_by_examples_and_names_the_exit_codes() -> None:
    text = ringfence("--help").stdout
    assert "examples:" in text
    assert "exit codes:" in text


def test_version_is_the_packages() -> None:
    assert ringfence("--version").stdout.strip() == f"ringfence {metadata.version('ringfence')}"


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("secret",), ("secret", "new"), ("doctor", "--nonsense")])
def test_wrong_arguments_are_exit_code_2(arguments: tuple[str, ...]) -> None:
    done = ringfence(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("usage:")


TWO = ("bench", "collectives", "--workers", "2", "--results", ".")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "--hardware", "binary.toml", "--model", "gpt2"), "cannot read the hardware profile binary.toml"),
        (("plan", "hardware", "binary.toml"), "cannot read the hardware profile binary.toml"),
        (("plan", "hardware", "/proc/self/mem"), "cannot read the hardware profile /proc/self/mem"),
        (("study", "--grid", "binary.toml"), "cannot read the grid binary.toml"),
        (("study", "--grid", "grid.toml", "--list"), "rates: '.gbit': write a rate such as \"1gbit\""),
        ((*TWO, "--hosts", "2", "--rate", ".gbit"), "--rate .gbit: write a rate such as 1gbit"),
        ((*TWO, "--hosts", "2", "--rate", "0gbit"), "--rate 0gbit: write a rate such as 1gbit"),
        ((*TWO, "--hosts", "-1"), "argument --hosts: '-1' is no positive number"),
        (TWO, "samples.jsonl, line 1: not a line of samples; move the file away"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_arguments_and_files_are_one_line_and_exit_code_2(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "grid.toml").write_text(
        '[[cells]]\nkind = "collective"\nsizes = ["4KiB"]\nworkers = [2]\nhosts = 2\nrates = [".gbit"]\n'
    )
    (tmp_path / "samples.jsonl").write_text('{"case":{}}\n')
    done = ringfence(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert said in done.stderr.splitlines()[-1]
