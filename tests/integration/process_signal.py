"""A counting signal between processes of one machine: a waiting process blocks until it was notified often enough."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path


class ProcessSignal:
    """A named pipe. Processes that open the same path share the signal; the test holds it open while it is needed."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        if not os.path.exists(self.path):
            os.mkfifo(self.path)
        self._pipe = os.open(self.path, os.O_RDWR)  # what is written while no process has it open is lost

    def __enter__(self) -> ProcessSignal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._pipe)

    def notify(self) -> None:
        """Add one notification."""
        os.write(self._pipe, b"!")

    def wait(self, times: int = 1, seconds: float = 60.0) -> None:
        """Wait for this many notifications. Raises AssertionError after `seconds`."""
        limit = time.monotonic() + seconds
        while times:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, limit - time.monotonic()))
            assert ready, f"{times} notifications are missing after {seconds:g} s"
            times -= len(os.read(self._pipe, times))

    def clear(self) -> None:
        """Drop all notifications so far."""
        while select.select([self._pipe], [], [], 0)[0]:
            os.read(self._pipe, 1 << 16)
