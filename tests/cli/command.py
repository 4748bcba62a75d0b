"""Run the `ringfence` command as a user does: a process of its own, an environment that holds nothing of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def ringfence(
    *arguments: str, folder: Path | None = None, timeout: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The finished command, with its output as text."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RINGFENCE_")}
    return subprocess.run(
        [sys.executable, "-m", "ringfence.cli", *arguments],
        cwd=folder,
        env={**inherited, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
