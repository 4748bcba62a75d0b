"""CPU time of unauthenticated peers, shared by address: whoever costs much waits for those who cost little.

Start-time fair queueing. Every address has a mark; work for it moves the mark by the CPU time that the work took, and the
address with the lowest mark is served first. An address that was away begins where the others are: it has no credit and no
debt. So addresses that ask for more than their share get equal shares, and no address can be made to wait for what was spent
in its name before: an attacker who shares a worker's address takes from that address's share while it attacks, and nothing
afterwards.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from ringfence import keys


class Shares:
    """What each address has had, in seconds of CPU time."""

    def __init__(self) -> None:
        self._served = 0.0  # the mark that all have reached: of the address that was served last, and a little more
        self._marks: dict[str, float] = {}  # of addresses that are ahead of it

    def mark(self, address: str) -> float:
        """The lower, the sooner."""
        return max(self._served, self._marks.get(address, 0.0))

    def charge(self, address: str, seconds: float) -> None:
        """This address was served, and it took so much."""
        mark = self.mark(address)
        self._marks[address] = mark + seconds
        # New addresses begin here. If it stood still while they are served, new ones without end would starve an old one.
        self._served = mark + seconds / keys.ADMISSION_PENDING
        if len(self._marks) > 256:  # more than there are peers at once: most of them are gone
            self._marks = {each: mark for each, mark in self._marks.items() if mark > self._served}

    @contextlib.contextmanager
    def charged(self, address: str) -> Iterator[None]:
        """Charge what this thread does inside."""
        before = time.thread_time()
        try:
            yield
        finally:
            self.charge(address, time.thread_time() - before)
