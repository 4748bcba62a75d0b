"""One machine of a run under `ringfence run`, as a process whose lines a test waits for."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable

from tests.limits import HANG


class Node:
    """The agent of a machine and its workers: what they print, line by line."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self.looked_at = 0  # lines that `matches` passes over
        self._printed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._printed:
                self.lines.append(line.rstrip())
                self._printed.notify_all()

    def matches(self, pattern: re.Pattern[str] | str) -> list[re.Match[str]]:
        return [found for line in self.lines[self.looked_at :] if (found := re.search(pattern, line))]

    def wait_for(self, pattern: re.Pattern[str] | str, *kinds: str) -> None:
        """Wait for a line that matches; with kinds, for one of each in its first group."""

        def is_there() -> bool:
            found = self.matches(pattern)
            return bool(found) and {*kinds} <= {each[1] for each in found if kinds}

        self.wait_until(is_there)

    def wait_until(self, is_there: Callable[[], bool]) -> None:
        """Wait until this is true of the lines."""
        with self._printed:
            assert self._printed.wait_for(is_there, HANG), "\n".join(self.lines)

    def end(self) -> int:
        self._thread.join(HANG)
        return self._process.wait(HANG)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
