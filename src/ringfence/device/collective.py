"""A collective on device tensors, in passes: each is copied to a slot, executed there, and copied back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import torch

from ringfence.collectives import Buffer, Collective
from ringfence.dataplane.request import PASS_BYTES
from ringfence.device.call import Reports, StagedCall
from ringfence.device.device_thread import DeviceThread
from ringfence.device.slots import SLOT_BYTES, Slot
from ringfence.device.tensors import DeviceTensor, Slice
from ringfence.runtime import staging_times

_ALIGNED: Final = 64  # where a copy begins in a slot: a multiple of every element's size
_SLICE_ALIGNED: Final = 4096
_NOT_SLICED: Final = (
    Collective.ALL_TO_ALL,
    Collective.BARRIER,
)  # a rank does not know all lengths of an uneven ALL_TO_ALL
_NOTHING: Final = memoryview(bytearray())

Parts = dict[Buffer, list[Slice]]


def slice_bytes(size: int) -> int:
    """Return how much of each part one pass takes in a group of this size.

    It depends on the group's size only, so that all ranks slice alike. An operation has at most one part more than the group
    has ranks, so a pass fits in a slot, except in a group of thousands.
    """
    fitting = SLOT_BYTES // (size + 1) // _SLICE_ALIGNED * _SLICE_ALIGNED
    return min(PASS_BYTES, max(_SLICE_ALIGNED, fitting))


class CallQueue:
    """The collectives of one group on one device: copied to the host in the order of the calls."""

    def __init__(self) -> None:
        self.waiting: deque[StagedCollective] = deque()  # not yet copied to slots as a whole
        self.unfinished: list[StagedCollective] = []  # whose results are not yet on the device, in order
        self.slots_held = 0


class StagedCollective(StagedCall):
    """The passes of one collective. `views` and `pass_done` are for the progress loop."""

    def __init__(
        self,
        thread: DeviceThread,
        tensors: list[DeviceTensor],
        reports: Reports,
        ready: torch.Event,
        kind: Collective,
        size: int,
        parts: Parts,
    ) -> None:
        super().__init__(thread, tensors, reports, ready)
        self._parts = parts
        self.longest = longest = max((part.nbytes for slices in parts.values() for part in slices), default=0)
        self._each = max(longest, 1) if kind in _NOT_SLICED else slice_bytes(size)
        self.passes = max(1, -(-longest // self._each))
        self._queue = CallQueue()
        self._next = 0
        self._left = self.passes
        self._regions: dict[int, list[tuple[torch.Tensor, Slice]]] = {}
        self._slots: dict[int, Slot] = {}
        self._views: dict[int, dict[Buffer, list[memoryview]]] = {}
        self._times = staging_times.begin()

    # -- for the progress loop ---------------------------------------------------------------------------------------

    def views(self, index: int) -> dict[Buffer, list[memoryview]] | None:
        """Return the host memory of a pass, or None if it has not been copied to the host yet."""
        views = self._views.pop(index, None)
        if views is not None:
            self._stage_ended(index)
        return views

    def pass_done(self, index: int) -> None:
        """Copy the results of a pass to the device."""
        self._stage_ended(index)
        self.thread.submit(self, lambda: self._upload(index))

    def _stage_ended(self, index: int) -> None:
        """A stage of a pass has ended (`staging_times.PASS_STAGES`). For both threads."""
        if self._times is not None:
            self._times.ended(index)

    def submit(self, queue: CallQueue) -> None:
        """Start the call, after those of the same queue. For the caller's thread."""
        self._queue = queue
        self.thread.submit(self, self._enter)

    # -- for the device thread ---------------------------------------------------------------------------------------

    def _enter(self) -> None:
        self._reports.wake()
        if self._abandoned:
            return
        self._queue.waiting.append(self)
        self._queue.unfinished.append(self)
        self.watch_caller()
        self._advance_queue()

    def _advance_queue(self) -> None:
        waiting = self._queue.waiting
        while waiting and waiting[0]._fetch():
            waiting.popleft()

    def _fetch(self) -> bool:
        """Copy passes to slots, as long as there are any. Return whether all have been issued."""
        if self._abandoned:
            return True
        if not self._begun:
            if self.reads and not self.caller_reached(self._advance_queue):
                return False
            if self._follows_earlier():
                return False  # the earlier call continues the queue when it ends
            self.begin()
        while self._next < self.passes:
            if not self._fetch_pass(self._next):
                self.thread.when_slot_returned(self._queue, self, self._advance_queue)
                return False
            self._next += 1
        return True

    def _follows_earlier(self) -> bool:
        """Return whether an earlier call of the queue writes memory of this one, or reads what this one writes."""
        for earlier in self._queue.unfinished:
            if earlier is self:
                return False
            if any(mine.overlaps(its) for mine in self.tensors for its in earlier.tensors):
                return True
        return False

    def _fetch_pass(self, index: int) -> bool:
        """Copy one pass to a slot. Return False if none is free."""
        if self._times is not None:
            self._times.wanted(index)
        start = index * self._each
        cut = {buffer: [part.cut(start, start + self._each) for part in parts] for buffer, parts in self._parts.items()}
        offsets, joined, length = _lay_out(part for parts in cut.values() for part in parts if part.length)
        slot = self._take_slot(length)
        if length and slot is None:
            return False
        if slot is not None:
            self._slots[index] = slot
            self._queue.slots_held += 1
            self._regions[index] = [
                (slot.tensor[offset : offset + part.nbytes].view(part.tensor.dtype), part) for part, offset in joined
            ]
        views = {
            buffer: [_view(slot, offsets[part], part.nbytes) if slot and part.length else _NOTHING for part in parts]
            for buffer, parts in cut.items()
        }

        def arrived() -> None:
            self._stage_ended(index)
            self._views[index] = views
            self._reports.available()

        self._stage_ended(index)
        self.copy_down([each for each in self._regions.get(index, ()) if each[1].tensor.reads], arrived)
        return True

    def _take_slot(self, length: int) -> Slot | None:
        """Take a pinned slot. A queue that has none gets pageable memory, so that queues never wait for each other."""
        if not length:
            return None
        slots = self.thread.slots
        if length > SLOT_BYTES:
            return slots.pageable(length)
        return slots.take() or (None if self._queue.slots_held else slots.pageable(length))

    def _upload(self, index: int) -> None:
        if self._abandoned or not self.caller_reached(lambda: self._upload(index)):
            return
        self._stage_ended(index)
        regions = self._regions.pop(index, [])
        self.copy_up([each for each in regions if each[1].tensor.writes], lambda: self._return_slot(index))
        self._left -= 1
        if not self._left:
            self.end()

    def _return_slot(self, index: int) -> None:
        self._stage_ended(index)
        slot = self._slots.pop(index, None)
        if slot is not None:
            self._queue.slots_held -= 1
            self.thread.slots.give(slot)
            self.thread.slot_returned()

    def release(self) -> None:
        super().release()
        if self._times is not None and not self._left:
            self._times.finish()
            self._times = None
        self._parts = {}
        if self in self._queue.unfinished:
            self._queue.unfinished.remove(self)
        self._advance_queue()

    def _drop(self) -> None:
        for slot in self._slots.values():  # an execution may still refer to them
            self._queue.slots_held -= 1
            self.thread.slots.drop(slot)
        self._slots.clear()
        self._regions.clear()
        self._views.clear()
        super()._drop()


def _lay_out(parts: Iterable[Slice]) -> tuple[dict[Slice, int], list[tuple[Slice, int]], int]:
    """Return the offset of each part in a slot, the same with neighbours joined, each of which is one copy, and the length.

    Parts of several buffers may be the same memory. Parts that follow each other on the device do so in the slot.
    """
    offsets: dict[Slice, int] = {}
    joined: list[tuple[Slice, int]] = []
    end = 0
    for part in parts:
        if part in offsets:
            continue
        last, start = joined[-1] if joined else (None, 0)
        if last is not None and last.tensor is part.tensor and last.start + last.length == part.start:
            joined[-1] = Slice(last.tensor, last.start, last.length + part.length), start
        else:
            end = -(-end // _ALIGNED) * _ALIGNED
            joined.append((part, end))
        offsets[part] = end
        end += part.nbytes
    return offsets, joined, end


def _view(slot: Slot, offset: int, length: int) -> memoryview:
    return slot.view[offset : offset + length]
