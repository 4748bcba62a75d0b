"""The command line as a whole: help that teaches, errors in one line, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.cli.command import ringfence
from tests.limits import HANG

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


def test_characters_that_a_terminal_cannot_show_are_replaced() -> None:
    done = ringfence("bench", "collectives", "--help", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--sizes SIZE,?" in done.stdout


def test_help_has_examples_and_exit_codes() -> None:
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
        ((*TWO, "--hosts", "-1"), "argument --hosts: '-1' is not a number from 0 to 1024"),
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


# -- output that nobody takes, and Ctrl-C -------------------------------------------------------------------------------


def printing_to(stdout: int, *arguments: str, unbuffered: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ringfence.cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        text=True,
        timeout=HANG,
    )


# at once, and at the end; argparse itself keeps quiet of what it could not print at once
PRINTING = [("1", ("plan", "models")), ("", ("plan", "models")), ("", ("plan", "models", "--json")), ("", ("--help",))]


@pytest.mark.parametrize(("unbuffered", "arguments"), PRINTING)
def test_a_closed_pipe_ends_the_command_silently(unbuffered: str, arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb"):
        done = printing_to(writer, *arguments, unbuffered=unbuffered)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(("unbuffered", "arguments"), PRINTING)
def test_output_to_a_full_disk_is_one_line_and_exit_code_2(unbuffered: str, arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = printing_to(full.fileno(), *arguments, unbuffered=unbuffered)
    assert done.returncode == 2
    assert done.stderr.startswith("ringfence: ")
    assert done.stderr.endswith("No space left on device\n")
    assert done.stderr.count("\n") == 1


INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "ringfence.cli.evidence":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from ringfence.cli import main
sys.exit(main(["--version"]))
"""


def test_an_interrupt_during_imports_prints_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
