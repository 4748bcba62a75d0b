"""`ringfence run` for tests of what starts it: batch scripts and manifests."""

from __future__ import annotations

import subprocess
from pathlib import Path


def use_torchrun_without_run(folder: Path, env: dict[str, str]) -> None:
    """Put torchrun in the place of `ringfence run`, where this build has no such command: their options are the same."""
    if subprocess.run(["ringfence", "run", "--help"], env=env, capture_output=True).returncode == 0:
        return
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/ringfence").write_text('#!/bin/sh\nshift\nexec torchrun "$@"\n')
    (folder / "bin/ringfence").chmod(0o755)
    env["PATH"] = f"{folder / 'bin'}:{env['PATH']}"
