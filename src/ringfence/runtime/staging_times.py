"""Times of collectives on device tensors, by stage. Off until `start`.

The stages of a call, which add up to its time:

    caller     until the caller's stream has reached it
    fill       until the first pass is on the host and is executed
    network    while at least one pass is executed: sealed, sent, received, opened, reduced
    stall      while none is, between the first and the last: the next one is not on the host yet
    drain      from the end of the last pass until the results are on the device

The stages of a pass, summed over passes, which overlap each other:

    slot       waits for a pinned slot
    down       is copied to the host
    queue      is on the host, and waits until it is executed
    execute    is executed
    back       waits until the device thread copies its results
    up         is copied to the device
"""

from __future__ import annotations

import threading
from time import monotonic_ns
from typing import Final

CALL_STAGES: Final = ("caller", "fill", "network", "stall", "drain")
PASS_STAGES: Final = ("slot", "down", "queue", "execute", "back", "up")
STAGES: Final = (*CALL_STAGES, *PASS_STAGES)

Totals = dict[str, int]

_lock = threading.Lock()
_on = False
_begun = 0
_totals: Totals = {}


class CallTimes:
    """The moments of one call. Each pass has a list: wanted, then the end of each of PASS_STAGES."""

    def __init__(self) -> None:
        self._called = monotonic_ns()
        self._reached = self._called
        self._passes: dict[int, list[int]] = {}

    def reached(self) -> None:
        """The caller's stream has reached the call."""
        self._reached = monotonic_ns()

    def wanted(self, index: int) -> None:
        """A pass could be copied to the host, if there is a slot. Only the first call counts."""
        if index not in self._passes:
            self._passes[index] = [monotonic_ns()]

    def ended(self, index: int) -> None:
        """The current stage of a pass has ended, and the next one begins."""
        self._passes[index].append(monotonic_ns())

    def finish(self) -> None:
        """The results are on the device: add the call to the totals."""
        now, passes = monotonic_ns(), [each for each in self._passes.values() if len(each) > len(PASS_STAGES)]
        found = dict.fromkeys(PASS_STAGES, 0)
        for moments in passes:
            for stage, begin, end in zip(PASS_STAGES, moments, moments[1:], strict=False):
                found[stage] += end - begin
        executed = sorted((moments[3], moments[4]) for moments in passes)
        first, last = (executed[0][0], max(end for _, end in executed)) if executed else (now, now)
        network = _covered(executed)
        caller = max(0, min(self._reached, first) - self._called)
        found |= {"caller": caller, "fill": first - self._called - caller, "network": network}
        found |= {"stall": last - first - network, "drain": now - last, "calls": 1, "passes": len(passes)}
        with _lock:
            for name, value in found.items():
                _totals[name] = _totals.get(name, 0) + value


def _covered(spans: list[tuple[int, int]]) -> int:
    """Return how long at least one of the spans lasts; they are sorted."""
    total, until = 0, 0
    for begin, end in spans:
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


def start() -> None:
    """Start to record, from zero."""
    global _on, _begun
    with _lock:
        _totals.clear()
        _begun = 0
        _on = True


def stop() -> None:
    """Record no further calls."""
    global _on
    _on = False


def begin() -> CallTimes | None:
    """Return the times of a call that begins now; None if they are not recorded."""
    global _begun
    if not _on:
        return None
    with _lock:
        _begun += 1
    return CallTimes()


def totals() -> Totals:
    """Return nanoseconds by stage, and the numbers of `calls` and `passes`, of the calls that have ended."""
    with _lock:
        return dict(_totals)


def is_complete() -> bool:
    """Return whether all calls since `start` have ended."""
    with _lock:
        return _totals.get("calls", 0) == _begun
