"""Shared memory of one point-to-point link: a ring of slots, which its sender writes and its receiver reads in turn.

The n-th segment that passes through the memory is in slot n modulo the number of slots, so a slot has one user at a time: its
sender until the segment is announced, then its receiver until it is returned.
"""

from __future__ import annotations

from ringfence import keys
from ringfence.dataplane.shared import SharedMemory
from ringfence.errors import ProtocolError
from ringfence.keys import SEGMENT_BYTES


class SendSlots(SharedMemory):
    """The sender's side."""

    def __init__(self, slots: int = keys.SHARED_LINK_SLOTS) -> None:
        """Raises OSError if this kernel, or a sandbox, has no such memory."""
        super().__init__(slots * SEGMENT_BYTES)
        self._count = slots
        self._written = 0
        self._returned = 0

    @property
    def has_room(self) -> bool:
        """Whether a slot may be written."""
        return self._written - self._returned < self._count

    def write(self, payload: memoryview) -> int:
        """Copy a segment to the next slot and return the slot's number. There must be room."""
        if not self.has_room:
            raise RuntimeError("the receiver has all slots")
        slot = self._written % self._count
        self._written += 1
        self.view[slot * SEGMENT_BYTES : slot * SEGMENT_BYTES + len(payload)] = payload
        return slot

    def take_back(self, total: int) -> None:
        """Take slots back: the receiver has read `total` segments so far. Raises ProtocolError if it was lent fewer."""
        if not self._returned <= total <= self._written:
            raise ProtocolError("a peer returned shared memory that it was not lent")
        self._returned = total

    def _wipe(self) -> None:
        lent = {number % self._count for number in range(self._returned, self._written)}
        for slot in set(range(min(self._written, self._count))) - lent:
            self.view[slot * SEGMENT_BYTES : (slot + 1) * SEGMENT_BYTES] = bytes(SEGMENT_BYTES)


class ReceiveSlots:
    """The receiver's side. `memory` is what the sender shares, mapped for reading."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._count = len(memory) // SEGMENT_BYTES
        self._read = 0
        self._reported = 0

    def read(self, slot: int, target: memoryview) -> None:
        """Copy the next segment to `target`. Raises ProtocolError if the sender named another slot than the next one."""
        if slot != self._read % self._count:
            raise ProtocolError("a peer named a part of its shared memory that is not the next one")
        target[:] = self._memory[slot * SEGMENT_BYTES : slot * SEGMENT_BYTES + len(target)]
        self._read += 1

    @property
    def due(self) -> int:
        """The number of segments read so far, if the sender is to be told of it; otherwise 0.

        It is told of half of the slots at once: it waits only if it has lent all.
        """
        return self._read if self._read - self._reported >= max(1, self._count // 2) else 0

    def reported(self, total: int) -> None:
        """Record that the sender was told of `total` segments."""
        self._reported = total
