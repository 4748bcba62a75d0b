"""How soon the loop gets the interpreter back from a caller that computes in pure Python.

The caller's bytecode and the loop's share the interpreter's lock, and every cipher gives it up while it works. Whoever
wants it back waits a switch interval first: 5 ms by Python's default, and as much again for the kernel's timer slack if
the interval is short. So while work is in flight the interval is short, from the moment the work is handed over (the
loop's first wait is for the lock), and the loop's thread has its timers kept to the microsecond.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_SWITCH_SECONDS: Final = 50e-6
_PR_SET_TIMERSLACK: Final = 29
_SLACK_NANOSECONDS: Final = 1000  # the kernel's default, 50 us, would double the interval


class GilSwitch:
    """Asked for by whoever hands work over, ended by the loop when none is left."""

    def __init__(self) -> None:
        self._usual = 0.0

    def begin(self) -> None:
        interval = sys.getswitchinterval()
        if interval > _SWITCH_SECONDS:
            self._usual = interval
            sys.setswitchinterval(_SWITCH_SECONDS)

    def end(self) -> None:
        """As it was, unless somebody has set it since."""
        usual, self._usual = self._usual, 0.0
        if usual and sys.getswitchinterval() <= _SWITCH_SECONDS:
            sys.setswitchinterval(usual)


def keep_timers_exact() -> None:
    """Of the calling thread. Where the kernel refuses, waits are longer and nothing else."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NANOSECONDS), 0, 0, 0)
