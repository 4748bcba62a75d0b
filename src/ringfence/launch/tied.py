"""Commands that end with the process that started them, whatever they do, from their first moment on.

Run as a program, this becomes such a command: python -IS tied.py PARENT COMMAND ARGUMENTS. It imports as little as possible.
"""

import ctypes
import os
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def tied(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs a command of this process's children tied to this process."""
    return [sys.executable, "-IS", __file__, str(os.getpid()), *arguments]


def end_with(parent: int) -> None:
    """Let the kernel end this process with its parent, also after an exec. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), _SIGKILL)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the command that torchrun would have started
    except OSError as error:
        sys.exit(f"cannot start {sys.argv[2]}: {error.strerror}")
