"""The README's commands work as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests import ports
from tests.limits import HANG

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MARKED = re.compile(r"<!-- run as a test -->\n```sh\n(.*?)```\n", re.DOTALL)


def environment(folder: Path) -> dict[str, str]:
    """What a new user has: nothing of ours, and an empty home."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RINGFENCE_")}
    binaries = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**inherited, "PATH": binaries, "HOME": str(folder), "OMP_NUM_THREADS": "1"}


def completed(
    command: Sequence[str | Path], folder: Path, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A command that a new user runs in this folder; `variables` in place of the environment that it has there."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(folder) if variables is None else variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG,  # 15 s on two quiet cores; six times that beside other tests
    )


def shell(commands: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Shell commands of a document, beside the examples."""
    (folder / "examples").symlink_to(ROOT / "examples")
    script = commands.replace("29500", str(ports.port()))  # the well-known port may be taken by another run
    return completed(["bash", "-euo", "pipefail", "-c", script], folder)


def run(commands: str, folder: Path) -> str:
    """Run shell commands as a new user would."""
    done = shell(commands, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def marked(word: str) -> str:
    """The README's commands to run that contain this word."""
    (commands,) = [each for each in MARKED.findall(README) if word in each]
    return str(commands)


def test_there_are_commands_to_run() -> None:
    assert len(MARKED.findall(README)) == 2


@pytest.mark.parametrize("example", ["ddp.py", pytest.param("fsdp2.py", marks=pytest.mark.nightly)])
def test_the_first_commands_train_a_model(example: str, tmp_path: Path) -> None:
    output = run(marked("examples/ddp.py").replace("ddp.py", example), tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 3
    assert losses[2] < losses[0] / 2
