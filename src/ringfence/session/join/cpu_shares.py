"""CPU time of unauthenticated peers, shared fairly between their addresses.

This is start-time fair queueing. Each address has a start tag; serving an address advances its tag by the CPU time used, and
the address with the lowest tag is served next. An address that was idle starts at the current virtual time, without credit or
debt. Addresses that demand more than their share therefore receive equal shares, and past work does not delay an address: an
attacker behind the same address as a worker uses up that address's share only for as long as the attack lasts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from ringfence import keys

_TAGS_LIMIT = 256  # more than there are pending connections; beyond it, tags in the past are dropped


class CpuShares:
    """The CPU time used for each address, as start tags in seconds."""

    def __init__(self) -> None:
        self._virtual_time = 0.0
        self._tags: dict[str, float] = {}  # of addresses that are ahead of the virtual time

    def start_tag(self, address: str) -> float:
        """Return the tag that addresses are ordered by; the lowest is served first."""
        return max(self._virtual_time, self._tags.get(address, 0.0))

    def charge(self, address: str, seconds: float) -> None:
        """Record that serving `address` took `seconds` of CPU time."""
        tag = self.start_tag(address)
        self._tags[address] = tag + seconds
        # New addresses start at the virtual time. If it did not advance, an endless series of them would starve an old one.
        self._virtual_time = tag + seconds / keys.ADMISSION_PENDING
        if len(self._tags) > _TAGS_LIMIT:
            self._tags = {each: tag for each, tag in self._tags.items() if tag > self._virtual_time}

    @contextlib.contextmanager
    def charged(self, address: str) -> Iterator[None]:
        """Charge the CPU time that this thread uses inside the `with` block to `address`."""
        before = time.thread_time()
        try:
            yield
        finally:
            self.charge(address, time.thread_time() - before)
