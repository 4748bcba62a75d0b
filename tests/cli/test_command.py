"""The command line as a whole: help that teaches, errors in one line, exit codes."""

from __future__ import annotations

from importlib import metadata

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
