"""Timers of the driving thread."""

from __future__ import annotations

from collections.abc import Callable


class Timers:
    """Functions to call at a later time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.waiting: list[tuple[float, Callable[[], None]]] = []

    def add(self, seconds: float, work: Callable[[], None]) -> None:
        """Make `work` due after so many seconds."""
        self.waiting.append((self._clock() + seconds, work))

    def cancel(self, work: Callable[[], None] | None) -> None:
        """Remove a timer, if it is set."""
        self.waiting = [timer for timer in self.waiting if timer[1] is not work]

    def next_deadline(self) -> float:
        """Return when the next timer is due."""
        return min((moment for moment, _ in self.waiting), default=float("inf"))

    def take_due(self, now: float) -> list[Callable[[], None]]:
        """Remove and return what is due."""
        if not self.waiting:
            return []
        due = [work for moment, work in self.waiting if moment <= now]
        self.waiting = [timer for timer in self.waiting if timer[0] > now]
        return due

    def clear(self) -> None:
        """Remove all timers."""
        self.waiting.clear()
