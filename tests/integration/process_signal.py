"""A bell between processes of one machine: whoever waits for it sleeps in the kernel until it has rung often enough."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path


class Bell:
    """A named pipe: whoever opens the same path has the same bell. The test itself holds it as long as it is needed."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        if not os.path.exists(self.path):
            os.mkfifo(self.path)
        self._pipe = os.open(self.path, os.O_RDWR)  # what is written while nobody holds it open would be lost

    def __enter__(self) -> Bell:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._pipe)

    def ring(self) -> None:
        os.write(self._pipe, b"!")

    def hear(self, times: int = 1, seconds: float = 60.0) -> None:
        """Wait until it has rung so many times."""
        limit = time.monotonic() + seconds
        while times:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, limit - time.monotonic()))
            assert ready, f"the bell did not ring within {seconds:g} s"
            times -= len(os.read(self._pipe, times))

    def silence(self) -> None:
        """Forget how often it has rung so far."""
        while select.select([self._pipe], [], [], 0)[0]:
            os.read(self._pipe, 1 << 16)
