"""Shortens the interpreter's switch interval while the progress loop has work.

The progress loop releases the interpreter's lock (GIL) around ciphers, system calls and reductions. If the training script
runs pure Python meanwhile, each time the loop waits one switch interval to get the lock back: 5 ms by default, which would
dominate the time of a collective. So the interval is 50 us from the moment a request is submitted until none is left, and
the timer slack of the loop's thread is reduced, because the kernel's default would double so short an interval.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_SWITCH_SECONDS: Final = 50e-6
_PR_SET_TIMERSLACK: Final = 29
_SLACK_NANOSECONDS: Final = 1000  # the kernel's default is 50 us


_busy: set[GilSwitch] = set()  # between `begin` and `end`: several channels may be, each with a thread


class GilSwitch:
    """The short switch interval: `begin` when work is submitted, `end` when none is left."""

    def __init__(self) -> None:
        self._usual = 0.0
        self._closed = False

    def begin(self) -> None:
        """Shorten the switch interval, unless it is short already. No effect after `close`."""
        if self._closed:
            return
        _busy.add(self)
        if self._closed:  # meanwhile, by another thread
            _busy.discard(self)
            return
        interval = sys.getswitchinterval()
        if interval > _SWITCH_SECONDS:
            self._usual = interval
            sys.setswitchinterval(_SWITCH_SECONDS)

    def close(self) -> None:
        """Restore the switch interval for good: a thread that comes late must not shorten it again."""
        self._closed = True
        self.end()

    def end(self) -> None:
        """Restore the switch interval, unless another loop is busy, or other code has set it since."""
        _busy.discard(self)
        usual, self._usual = self._usual, 0.0
        heir = next(iter(tuple(_busy)), None) if usual else None
        if heir is not None:
            heir._usual = usual
            if heir not in _busy:  # it has ended meanwhile, perhaps before it had this to restore
                heir.end()
        elif usual and sys.getswitchinterval() <= _SWITCH_SECONDS:
            sys.setswitchinterval(usual)


def keep_timers_exact() -> None:
    """Reduce the timer slack of the calling thread. If the kernel refuses, waits are longer."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NANOSECONDS), 0, 0, 0)
