"""Check that ringfence can form a group with this torch, by forming one."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Final

from ringfence import own_process
from ringfence.backend import torch_versions
from ringfence.cli.checks.check import Check, bad

MODULE: Final = "ringfence.cli.one_worker"
SECONDS: Final = 240.0  # importing torch from a new installation has taken over 60 on a busy machine
NAME: Final = "group"


def group(environ: Mapping[str, str], before: Sequence[Check], seconds: float = SECONDS) -> Check:
    """Form a group of one worker in a separate process, unless `before`, the checks of the software, found a fault."""
    if missing := bad(before):
        return Check(NAME, f"skipped: first repair {', '.join(check.name for check in missing)}", None)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ringfence-doctor-") as folder:
        try:
            done = subprocess.run(  # noqa: S603 (our own interpreter and module)
                own_process.command(MODULE),
                env={**environ, "TMPDIR": folder},  # its files go with the folder, even if it is killed
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return _failed(f"one worker did not form a group within {seconds:g} s")
    if done.returncode:
        return _failed(f"one worker cannot form a group: {_reason(done)}")
    text = f"one worker formed a group and ran collectives in {time.monotonic() - began:.1f} s"
    return Check(NAME, text, True, True)


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return the error that the worker printed, without the C++ stack that torch may append, or how the process ended."""
    if done.stdout.strip():
        return done.stdout.strip().partition("\n")[0]
    said = done.stderr.strip().rpartition("\n")[2]
    how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
    return f"the process ended with {how}" + (f" ({said})" if said else "")


def _failed(text: str) -> Check:
    fix = f"see the whole error with: python -P -m {MODULE}"
    if torch_versions.untested(metadata.version("torch")):
        fix = f"{fix}, or install a torch that ringfence is tested with: {torch_versions.INSTALL}"
    return Check(NAME, text, False, False, fix)
