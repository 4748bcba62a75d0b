"""How long a worker has had no proof to show, so that it can give up before its deadline, and not too early."""

from __future__ import annotations

from typing import Final

_PAUSE_SECONDS: Final = 5.0  # a few retries: when nobody asked for longer than that, nothing was tried


class FailureWindow:
    """Counts from the first of some failures that follow each other."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._last = 0.0

    def failed(self, began: float, now: float) -> float:
        """An attempt that began then has failed now. For how many seconds all have."""
        if self._since is None or began - self._last > _PAUSE_SECONDS:
            self._since = now
        self._last = now
        return now - self._since

    def end(self) -> None:
        """There is a proof, for whomever."""
        self._since = None
