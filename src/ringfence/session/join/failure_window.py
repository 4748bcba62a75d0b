"""How long this worker has been unable to collect a proof, so that it gives up before its deadline, but not too early."""

from __future__ import annotations

from typing import Final

_PAUSE_SECONDS: Final = 5.0  # a longer pause between attempts starts a new window


class FailureWindow:
    """The time since the first of a series of consecutive failures."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._last = 0.0

    def record(self, began: float, now: float) -> float:
        """Record a failed attempt that began at `began`; return how many seconds every attempt has been failing."""
        if self._since is None or began - self._last > _PAUSE_SECONDS:
            self._since = now
        self._last = now
        return now - self._since

    def reset(self) -> None:
        """Record that an attempt succeeded, for any peer."""
        self._since = None
