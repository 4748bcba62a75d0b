"""Timers on CLOCK_BOOTTIME, the clock that includes the time a machine is suspended."""

from __future__ import annotations

import ctypes
import os
import selectors
import threading
import time
from collections.abc import Callable
from typing import Final

from ringfence.transport.fork import register_fork_cleanup

_ABSOLUTE: Final = 1  # TFD_TIMER_ABSTIME
_libc = ctypes.CDLL(None, use_errno=True)  # Python has os.timerfd_create from 3.13 on


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


def boot_seconds() -> float:
    """Seconds since boot, including suspended time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Alarm(threading.Thread):
    """Calls `work` in its own thread when `boot_seconds()` reaches `moment`, unless cancelled before."""

    def __init__(self, name: str, moment: float, work: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._timer = _timer_at(moment)
        self._cancelled = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        register_fork_cleanup(self)
        self.start()

    def run(self) -> None:
        with selectors.PollSelector() as selector:  # unlike epoll, it has no descriptor that a fork would inherit
            selector.register(self._timer, selectors.EVENT_READ, True)
            selector.register(self._cancelled, selectors.EVENT_READ, False)
            due = all(key.data for key, _ in selector.select())
        with self._lock:
            self.forget()
        if due:
            self._work()

    def cancel(self) -> None:
        """Cancel the call if it has not begun."""
        with self._lock:
            if self._cancelled >= 0:
                os.eventfd_write(self._cancelled, 1)

    def forget(self) -> None:
        """Close the descriptors. Takes no lock, so that it can run in a forked child, which has no such thread."""
        timer, self._timer = self._timer, -1
        cancelled, self._cancelled = self._cancelled, -1
        for descriptor in (timer, cancelled):
            if descriptor >= 0:
                os.close(descriptor)


def _timer_at(moment: float) -> int:
    """Return a timerfd that becomes readable at this moment."""
    descriptor: int = _libc.timerfd_create(time.CLOCK_BOOTTIME, os.O_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "cannot create a timer on CLOCK_BOOTTIME")
    whole, fraction = divmod(max(moment, 0.001), 1.0)  # a timer set to 0 is disarmed
    setting = _Itimerspec(_Timespec(0, 0), _Timespec(min(int(whole), 1 << 62), int(fraction * 1e9)))
    if _libc.timerfd_settime(descriptor, _ABSOLUTE, ctypes.byref(setting), None):
        code = ctypes.get_errno()
        os.close(descriptor)
        raise OSError(code, "cannot set a timer on CLOCK_BOOTTIME")
    return descriptor
