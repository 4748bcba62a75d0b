"""Events of the data plane while a profiler runs: one for each seal, open, reduction, system call and wait.

Only the compiled data plane has clocks. They are off until `start`, and stop at the first poll after the profiler has
stopped. Times are nanoseconds since 1970, like the profiler's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.autograd import profiler

from ringfence.dataplane import native

_MOST_WAITS = 1 << 20  # the limit of the compiled data plane for its own events

_lock = threading.RLock()  # the progress loop stops the clocks, and so does the export of a trace
running = False
_network: Any = None
_poll: Any = None  # the network's own method
_kept: list[Event] = []
_waits: list[tuple[int, int]] = []


class Event(NamedTuple):
    """One stage: its name, its start and end, and the worker whose bytes it processed (-1: no particular worker)."""

    stage: str
    start: int
    end: int
    worker: int


def start(network: Any) -> None:
    """Discard earlier events and start recording; no effect if recording already."""
    global running, _network, _poll
    with _lock:
        if running and network is _network:
            return
        stop()
        _kept.clear()
        _waits.clear()
        native.events(True)
        running, _network, _poll = True, network, network.poll
        network.poll = _timed(network.poll)


def _timed(poll: Callable[[float], None]) -> Callable[[float], None]:
    def timed_poll(seconds: float) -> None:
        began = time.monotonic_ns()
        try:
            poll(seconds)
        finally:
            if not profiler._is_profiler_enabled:
                stop()
            elif seconds > 0 and len(_waits) < _MOST_WAITS:
                _waits.append((began, time.monotonic_ns()))

    return timed_poll


def stop() -> None:
    """Stop recording; events are kept until the next `start`."""
    global running, _network, _poll
    with _lock:
        if running:
            running = False
            _collect(on=False)
            _network.poll = _poll
            _network = _poll = None


def recorded() -> list[Event]:
    """Return the events since the last `start`, ordered by time."""
    with _lock:
        if running:
            _collect(on=True)
    return sorted(_kept, key=lambda event: event.start)


def _collect(on: bool) -> None:
    since_1970 = time.time_ns() - time.monotonic_ns()
    _kept.extend(
        Event(stage, begin + since_1970, end + since_1970, worker) for stage, begin, end, worker in native.events(on)
    )
    waits = _waits[:]
    del _waits[: len(waits)]
    _kept.extend(Event("wait", begin + since_1970, end + since_1970, -1) for begin, end in waits)
