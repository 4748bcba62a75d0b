"""A device that notices when it is asked two things at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def watched(plain: Callable[_P, _T]) -> tuple[Callable[_P, _T], threading.Event]:
    """The same function, and an event that is set if it is called while a call of it is under way."""
    busy, overlapped = threading.Lock(), threading.Event()

    def asked(*args: _P.args, **named: _P.kwargs) -> _T:
        if not busy.acquire(blocking=False):
            overlapped.set()
            return plain(*args, **named)
        try:
            overlapped.wait(0.05)  # time for another to come in between
            return plain(*args, **named)
        finally:
            busy.release()

    return asked, overlapped
