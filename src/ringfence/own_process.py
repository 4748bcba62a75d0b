"""A separate process that runs a module of ringfence: its command line, and its answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import NoReturn


def command(module: str, *arguments: str, unbuffered: bool = False) -> list[str]:
    """Return the command that runs a module with these arguments in an interpreter like this one.

    With `-P` the current folder is not searched for modules. Another user may be able to write there, and would run code in the
    new process, which may handle keys.
    """
    return [sys.executable, *(["-u"] if unbuffered else []), "-P", "-m", module, *arguments]


def ask(module: str, *arguments: str, given: bytes = b"", seconds: float, name: str) -> str:
    """Run a module that calls `answer`, and return its text. `given` is its stdin, `name` the process in messages.

    Raises ValueError, which says why there is no answer, or subprocess.TimeoutExpired.
    """
    done = subprocess.run(  # noqa: S603 (our own interpreter and module)
        command(module, *arguments),
        input=given,
        capture_output=True,
        timeout=seconds,
        start_new_session=True,  # Ctrl-C reaches this process only, which then ends the other one
    )
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        raise ValueError(f"{name} ended with code {done.returncode}: {words[-1]}")
    found: dict[str, str] = json.loads(done.stdout)
    if "error" in found:
        raise ValueError(found["error"])
    return found["answer"]


def answer(text: str = "", error: str | None = None) -> NoReturn:
    """Answer `ask` in the other process, and exit without waiting for threads of libraries."""
    print(json.dumps({"answer": text} if error is None else {"error": error}), flush=True)
    os._exit(0)
