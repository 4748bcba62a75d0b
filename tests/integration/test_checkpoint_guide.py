"""The commands and programs of the guide work as written, in its order and in one folder."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.integration.test_readme import ROOT, completed

GUIDE = (ROOT / "docs" / "guides" / "checkpoints.md").read_text()
BLOCKS = re.findall(r"```(sh|python)\n(.*?)```", GUIDE, re.DOTALL)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [text for language, text in BLOCKS if language == "sh"]


def run(folder: Path, *command: str) -> str:
    done = completed(command, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_the_guide_runs(tmp_path: Path) -> None:
    run(tmp_path, "bash", "-ec", COMMANDS[0])
    program = "".join(PROGRAMS)  # later ones use the names of earlier ones
    program += "torch.save({'weight': torch.ones(3)}, 'model.pt')\n"
    assert run(tmp_path, sys.executable, "-c", program) == "100 v3\n"
    said = run(tmp_path, "bash", "-ec", "".join(COMMANDS[1:]))
    assert "run/step-100: every byte is authentic" in said
    assert (tmp_path / "model-again.pt").exists()
