"""Slots of shared memory. This is the implementation in Python; the compiled data plane has the same."""

from __future__ import annotations

from ringfence.keys import SEGMENT_BYTES


class Region:
    """Memory that is shared with other workers of this machine, in slots of one segment each."""

    waiting = 0  # only the compiled data plane lets one slot wait for several links

    def __init__(self, memory: memoryview, peers: int, own: bool) -> None:
        self.view = memory
        self.count = len(self.view) // SEGMENT_BYTES
        if not 0 < peers <= self.count // 2:
            raise ValueError("shared memory has up to 256 slots of one segment each, two for each peer")
        self.quota = self.count // 2 // peers  # slots for each link, so that none waits for the peer of another one
        self._most_used = 0
        self._free = list(range(self.count - 1, -1, -1)) if own else []

    @property
    def free(self) -> int:
        """Number of slots that may be written."""
        return len(self._free)

    def take(self) -> int:
        """Return a slot to write; -1: none is free."""
        if not self._free:
            return -1
        slot = self._free.pop()
        self._most_used = max(self._most_used, slot + 1)
        return slot

    def give(self, slot: int) -> None:
        self._free.append(slot)

    def wipe(self) -> None:
        """Zero the slots that no peer has."""
        for slot in self._free:
            if slot < self._most_used:
                self.slot(slot, SEGMENT_BYTES)[:] = bytes(SEGMENT_BYTES)

    def slot(self, number: int, length: int) -> memoryview:
        """Return the memory of a slot."""
        return self.view[number * SEGMENT_BYTES : number * SEGMENT_BYTES + length]
