"""The command line of a separate process that runs a module of ringfence."""

from __future__ import annotations

import sys


def command(module: str, *arguments: str, unbuffered: bool = False) -> list[str]:
    """Return the command that runs a module with these arguments in an interpreter like this one.

    With `-P` the current folder is not searched for modules. Another user may be able to write there, and would run code in the
    new process, which may handle keys.
    """
    return [sys.executable, *(["-u"] if unbuffered else []), "-P", "-m", module, *arguments]
