"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 30
_COLUMNS = 80


class Progress:
    """Counts steps and says what is under way."""

    def __init__(self, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._shown = self._stream.isatty()
        self._clock = clock
        self._start = clock()
        self._total = max(1, total)
        self._done = 0

    def say(self, what: str) -> None:
        """Show what is under way."""
        if self._shown:
            full = _WIDTH * self._done // self._total
            bar = "█" * full + "░" * (_WIDTH - full)
            line = f"{bar} {self._done}/{self._total}{self._left()}  {what}"
            self._stream.write(f"\r\x1b[2K{line[: self._columns() - 1]}")  # what wraps, the next step would not clear
            self._stream.flush()

    def step(self, what: str) -> None:
        """One step is done."""
        self._done += 1
        self.say(what)

    def _columns(self) -> int:
        """Asked each time: a terminal changes its size. 0 is one that does not know its own."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _COLUMNS
        except OSError:
            return _COLUMNS

    def _left(self) -> str:
        if not self._done:
            return ""
        seconds = (self._clock() - self._start) / self._done * (self._total - self._done)
        return f", {seconds / 60:.0f} min left" if seconds >= 90 else f", {seconds:.0f} s left"

    def end(self) -> None:
        """Leave the line empty for what comes next."""
        if self._shown:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
