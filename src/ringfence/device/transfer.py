"""A send or recv of a device tensor: pieces of it are staged in slots while others are on the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from ringfence.device.call import Reports, StagedCall
from ringfence.device.device_thread import DeviceThread
from ringfence.device.slots import Slot
from ringfence.device.tensors import DeviceTensor, Region, Slice
from ringfence.link.frames import Call
from ringfence.runtime.events import Events
from ringfence.runtime.point_to_point import Transfer

_SEGMENTS_PER_PIECE: Final = 8  # of at most 256 KiB
_PIECES_AHEAD: Final = 2  # copied to the host before they can be sent
_NOTHING: Final = memoryview(bytearray())


class StagedTransfer(Transfer):
    """A transfer whose memory is on a device. The progress loop calls the methods of `Transfer`."""

    __slots__ = ("_pieces", "_resume", "sends")

    def __init__(self, call: Call, deadline: float, keep: Any, length: int, sends: bool) -> None:
        super().__init__(call, deadline, keep, _NOTHING, length)
        self._pieces: StagedPieces
        self._resume: Callable[[], None] | None = None
        self.sends = sends

    def stage(self, thread: DeviceThread, tensor: DeviceTensor, reports: Reports, ready: torch.Event) -> None:
        """Bind the transfer to its tensor and start to watch the caller's stream."""
        pieces = StagedPieces(thread, tensor, reports, ready, self._each * _SEGMENTS_PER_PIECE)
        self._pieces = self.staging = pieces
        thread.submit(pieces, pieces.enter)

    def requested(self, resume: Callable[[], None]) -> None:
        self._resume = resume
        self._pieces.thread.submit(self._pieces, self._pieces.fetch)

    def resume(self) -> None:
        """Continue after a piece has been copied to the host."""
        if self._resume is not None:
            self._resume()

    def is_ready(self) -> bool:
        return not self.sends or not self.length or self._piece() in self._pieces.fetched

    def next_bytes(self) -> memoryview:
        if not self.length:
            return _NOTHING
        piece = self._pieces.piece(self._piece()) if not self.sends else self._pieces.fetched[self._piece()]
        start = self.position % _SEGMENTS_PER_PIECE * self._each
        return piece.view[start : min(start + self._each, self._pieces.length_of(self._piece()))]

    def advance(self) -> None:
        finished = self._piece()
        super().advance()
        if self.length and (self._piece() != finished or self.position == self.segments):
            pieces = self._pieces
            task: Callable[[int], None] = pieces.sent if self.sends else pieces.received
            pieces.thread.submit(pieces, lambda: task(finished))

    def complete(self, events: Events) -> None:
        """Called after the last segment; the device thread reports completion after the last piece."""
        if not self.length:
            self._pieces.thread.submit(self._pieces, self._pieces.end)

    def _piece(self) -> int:
        return self.position // _SEGMENTS_PER_PIECE


class StagedPieces(StagedCall):
    """The pieces of one transfer, each of which fits in a slot."""

    def __init__(
        self, thread: DeviceThread, tensor: DeviceTensor, reports: Reports, ready: torch.Event, each: int
    ) -> None:
        super().__init__(thread, [tensor], reports, ready)
        self._elements = tensor.outline.numel()
        self._nbytes = int(self._elements * tensor.dtype.itemsize)
        self._each = each
        self._count = max(1, -(-self._nbytes // each))
        self._next = 0
        self._left = self._count
        self._held = 0
        self._fetching: dict[int, Slot] = {}  # by piece: being copied to the host
        self.fetched: dict[int, Slot] = {}  # by piece: on the host, to be sent
        self._receiving: dict[int, Slot] = {}  # by piece: being received, or copied to the device

    def length_of(self, piece: int) -> int:
        """Return the number of bytes of a piece."""
        return min(self._each, self._nbytes - piece * self._each)

    def enter(self) -> None:
        """Start to watch the caller's stream."""
        self.watch_caller()
        if not self.reads:
            self.thread.slots.prepare(_PIECES_AHEAD)

    # -- sending -----------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Copy the next pieces to the host, once the receiver has asked for the payload. An empty tensor has none."""
        if self._abandoned or not self._nbytes or not self.caller_reached(self.fetch):
            return
        self.begin()
        while self._next < self._count and self._held < _PIECES_AHEAD:
            slots = self.thread.slots
            slot = slots.take() or (None if self._held else slots.pageable(self._each))
            if slot is None:
                self.thread.when_slot_returned(self, self, self.fetch)
                return
            self._held += 1
            self._fetch_piece(self._next, slot)
            self._next += 1

    def _fetch_piece(self, piece: int, slot: Slot) -> None:
        def arrived() -> None:
            if self._fetching.pop(piece, None) is not None:
                self.fetched[piece] = slot
                self._reports.available()

        self._fetching[piece] = slot
        self.copy_down([self._region(piece, slot)], arrived)

    def sent(self, piece: int) -> None:
        """Return the slot of a piece that was sealed, and copy further ones."""
        slot = self.fetched.pop(piece, None)
        if slot is None:
            return
        self._held -= 1
        self._give(slot)
        self._left -= 1
        if self._left:
            self.fetch()
        else:
            self.end()

    # -- receiving ---------------------------------------------------------------------------------------------------

    def piece(self, number: int) -> Slot:
        """Return the memory that a piece is received in. For the progress loop, which does not wait for a pinned slot."""
        slot = self._receiving.get(number)
        if slot is None:
            slots = self.thread.slots
            slot = self._receiving[number] = slots.take_idle() or slots.pageable(self._each)
        return slot

    def received(self, piece: int) -> None:
        """Copy a piece to the device."""
        if self._abandoned or not self.caller_reached(lambda: self.received(piece)):
            return
        self.begin()

        def uploaded() -> None:
            slot = self._receiving.pop(piece, None)
            if slot is not None:
                self._give(slot)

        self.copy_up([self._region(piece, self._receiving[piece])], uploaded)
        self._left -= 1
        if not self._left:
            self.end()

    # -- both --------------------------------------------------------------------------------------------------------

    def _region(self, piece: int, slot: Slot) -> Region:
        whole = Slice(self.tensors[0], 0, self._elements)
        part = whole.cut(piece * self._each, (piece + 1) * self._each)
        return Region(slot.tensor[: part.nbytes], [part])

    def _give(self, slot: Slot) -> None:
        self.thread.slots.give(slot)
        self.thread.slot_returned()

    def _drop(self) -> None:
        for held in (self._fetching, self.fetched, self._receiving):
            for slot in held.values():
                self.thread.slots.drop(slot)
            held.clear()
        super()._drop()
