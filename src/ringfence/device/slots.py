"""The pinned slots of a device: a bounded number of buffers that passes are staged in."""

from __future__ import annotations

import logging
from typing import Final

import torch

from ringfence.collectives.passes import PASS_BYTES
from ringfence.dataplane.buffers import bytes_of_memory

SLOT_BYTES: Final = PASS_BYTES
SLOTS: Final = 8  # so at most 128 MiB of pinned memory for each device

_log = logging.getLogger("ringfence")


class Slot:
    """Host memory for one pass: a flat tensor of bytes, and the same memory as a view."""

    __slots__ = ("pinned", "tensor", "view")

    def __init__(self, tensor: torch.Tensor, pinned: bool) -> None:
        self.tensor = tensor
        self.pinned = pinned
        self.view = bytes_of_memory(tensor)


class SlotRing:
    """Allocates slots on first use and recycles them. Only the device thread uses it, except for `take_idle`."""

    def __init__(self) -> None:
        self._idle: list[Slot] = []
        self._made = 0
        self._can_pin = True

    @property
    def allocated_bytes(self) -> int:
        """The memory of all slots, in use or idle."""
        return self._made * SLOT_BYTES

    def take(self) -> Slot | None:
        """Return an idle slot, or a new one, or None if all are in use."""
        idle = self.take_idle()
        if idle is not None or self._made == SLOTS:
            return idle
        self._made += 1
        return Slot(self._allocate(), pinned=True)

    def take_idle(self) -> Slot | None:
        """Return an idle slot, or None. Any thread may call it."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def prepare(self, count: int) -> None:
        """Allocate slots until so many are idle."""
        while len(self._idle) < count and self._made < SLOTS:
            self._made += 1
            self._idle.append(Slot(self._allocate(), pinned=True))

    def give(self, slot: Slot) -> None:
        """Return a slot that no copy and no execution uses any more. Pageable ones are freed."""
        if slot.pinned:
            self._idle.append(slot)

    def drop(self, slot: Slot) -> None:
        """Forget a slot that an execution may still refer to: its memory is freed with the last reference."""
        if slot.pinned:
            self._made -= 1

    def pageable(self, length: int) -> Slot:
        """Return memory that is not pinned, for a pass that must not wait for a slot or does not fit in one."""
        return Slot(torch.empty(length, dtype=torch.uint8, device="cpu"), pinned=False)

    def _allocate(self) -> torch.Tensor:
        if self._can_pin:
            try:
                return torch.empty(SLOT_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._can_pin = False
                _log.warning("host memory cannot be pinned, so copies to and from the device are slower: %s", error)
        return torch.empty(SLOT_BYTES, dtype=torch.uint8, device="cpu")
