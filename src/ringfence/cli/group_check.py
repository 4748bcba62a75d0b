"""What only a try can tell: whether this torch lets ringfence form a group."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Final

from ringfence import torch_versions
from ringfence.cli.checks import Check, bad

COMMAND: Final = ("-m", "ringfence.cli.one_worker")
SECONDS: Final = 60.0  # importing torch alone may take ten on a busy machine
NAME: Final = "group"


def group(environ: Mapping[str, str], before: Sequence[Check], seconds: float = SECONDS) -> Check:
    """Form a group of one worker in a process of its own; not if `before`, the checks of what it needs, found a fault."""
    if missing := bad(before):
        return Check(NAME, f"not tried: first repair {', '.join(check.name for check in missing)}", None)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ringfence-doctor-") as folder:
        try:
            done = subprocess.run(  # noqa: S603 (our own interpreter and module)
                [sys.executable, *COMMAND],
                env={**environ, "TMPDIR": folder},  # what it writes goes with the folder, also if it is killed
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return _failed(f"no group of one worker after {seconds:g} s")
    if done.returncode:
        return _failed(f"no group of one worker can be formed: {_reason(done)}")
    text = f"one worker formed a group and ran collectives in {time.monotonic() - began:.1f} s"
    return Check(NAME, text, True, True)


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """The error as the worker printed it, without the C++ stack that torch may append; or how the process ended."""
    if done.stdout.strip():
        return done.stdout.strip().partition("\n")[0]
    said = done.stderr.strip().rpartition("\n")[2]
    how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
    return f"the process ended with {how}" + (f" ({said})" if said else "")


def _failed(text: str) -> Check:
    fix = f"python {' '.join(COMMAND)} shows the whole error"
    if torch_versions.untested(metadata.version("torch")):
        fix = f"{torch_versions.INSTALL} (tested with ringfence); {fix}"
    return Check(NAME, text, False, False, fix)
