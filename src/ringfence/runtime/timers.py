"""Timers of the driving thread."""

from __future__ import annotations

from collections.abc import Callable


class Timers:
    """Functions to call at a later time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def __bool__(self) -> bool:
        return bool(self._timers)

    def add(self, seconds: float, work: Callable[[], None]) -> None:
        """Make `work` due after so many seconds."""
        self._timers.append((self._clock() + seconds, work))

    def cancel(self, work: Callable[[], None] | None) -> None:
        """Remove a timer, if it is set."""
        self._timers = [timer for timer in self._timers if timer[1] is not work]

    def next_deadline(self) -> float:
        """Return when the next timer is due."""
        return min((moment for moment, _ in self._timers), default=float("inf"))

    def take_due(self, now: float) -> list[Callable[[], None]]:
        """Remove and return what is due."""
        if not self._timers:
            return []
        due = [work for moment, work in self._timers if moment <= now]
        self._timers = [timer for timer in self._timers if timer[0] > now]
        return due

    def clear(self) -> None:
        """Remove all timers."""
        self._timers.clear()
