"""A collective on device tensors, in passes: each is copied to a slot, executed there, and copied back."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import accumulate
from typing import Final

import torch

from ringfence.collectives import Buffer, Collective, Passes, Schedule
from ringfence.collectives.passes import OF_ONE_TENSOR, Parts, Views
from ringfence.device.call import Reports, StagedCall
from ringfence.device.device_thread import DeviceThread
from ringfence.device.slots import SLOT_BYTES, Slot
from ringfence.device.tensors import DeviceTensor, Region, Slice, joined
from ringfence.runtime import staging_times

_ALIGNED: Final = 64  # where a region begins in a slot: a multiple of every element's size
_NOTHING: Final = memoryview(bytearray())

Slices = dict[Buffer, list[Slice]]


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
        schedule: Schedule,
        passes: Passes,
        slices: Slices,
    ) -> None:
        super().__init__(thread, tensors, reports, ready)
        self._slices = slices
        self._kind = kind
        self._schedule = schedule
        self._passes = passes
        self._queue = CallQueue()
        self._next = 0
        self._left = passes.number
        self._regions: dict[int, list[Region]] = {}
        self._slots: dict[int, Slot] = {}
        self._views: dict[int, Mapping[Buffer, Views]] = {}
        self._times = staging_times.begin()

    # -- for the progress loop ---------------------------------------------------------------------------------------

    def views(self, index: int) -> Mapping[Buffer, Views] | None:
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
        while self._next < self._passes.number:
            if not self._fetch_pass(self._next):
                self.thread.when_slot_returned(self._queue, self, self._advance_queue)
                return False
            self._next += 1
            if self._next < self._passes.number and self.thread.is_wanted():  # copies may block it: others take turns
                self.thread.submit(self, self._advance_queue)
                return False
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
        cut = {buffer: self._in_pass(buffer, slices, index) for buffer, slices in self._slices.items()}
        offsets, length = _lay_out(cut)
        slot = self._take_slot(length)
        if length and slot is None:
            return False
        views: dict[Buffer, Views] = {}
        regions: dict[int, Region] = {}
        for buffer, slices in cut.items():
            views[buffer] = self._host_views(slot, offsets[buffer], buffer, slices)
            host = slot.tensor[offsets[buffer] : offsets[buffer] + _nbytes(slices)] if slot else None
            if host is not None and len(host):
                regions.setdefault(offsets[buffer], Region(host, joined(slices)))
        if slot is not None:
            self._slots[index] = slot
            self._queue.slots_held += 1
            self._regions[index] = list(regions.values())

        def arrived() -> None:
            self._stage_ended(index)
            self._views[index] = views
            self._reports.available()

        self._stage_ended(index)
        self.copy_down([each for each in self._regions.get(index, ()) if each.reads], arrived)
        return True

    def _in_pass(self, buffer: Buffer, slices: list[Slice], index: int) -> list[Slice]:
        """Return what a pass takes of a buffer's tensors."""
        start, stop = index * self._passes.each, (index + 1) * self._passes.each
        divided = len(slices) == 1 and self._kind not in OF_ONE_TENSOR
        return [each.cut(start, stop, self._schedule.parts(buffer) if divided else 1) for each in slices]

    def _host_views(self, slot: Slot | None, offset: int, buffer: Buffer, slices: list[Slice]) -> Views:
        """Return the parts of a buffer in a slot, where they are adjacent."""
        parts = self._schedule.parts(buffer)
        if slot is None:
            return Parts(_NOTHING, parts, 0)
        whole = slot.view[offset : offset + _nbytes(slices)]
        if len(slices) == 1 and parts > 1:
            return Parts.divided(whole, parts, slices[0].tensor.dtype.itemsize)
        if parts > 1 and len({each.nbytes for each in slices}) == 1:
            return Parts(whole, parts, slices[0].nbytes)
        ends = list(accumulate(each.nbytes for each in slices))
        return [whole[end - each.nbytes : end] for each, end in zip(slices, ends, strict=True)]

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
        self.copy_up([each for each in regions if each.writes], lambda: self._return_slot(index))
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
        self._slices = {}
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


def _lay_out(cut: Slices) -> tuple[dict[Buffer, int], int]:
    """Return the offset of each buffer in a slot, and the length. Buffers that are the same memory have the same offset."""
    offsets: dict[Buffer, int] = {}
    end = 0
    for buffer, slices in cut.items():
        same = next((other for other in offsets if cut[other] == slices), None)
        if same is not None:
            offsets[buffer] = offsets[same]
            continue
        offsets[buffer] = -(-end // _ALIGNED) * _ALIGNED
        end = offsets[buffer] + _nbytes(slices)
    return offsets, end


def _nbytes(slices: list[Slice]) -> int:
    return sum(each.nbytes for each in slices)
