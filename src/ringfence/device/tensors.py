"""A device tensor of a call, and the slices of it that passes are made of."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ringfence.dataplane.buffers import Lease


class MemoryChanged(Exception):
    """The memory of a tensor was replaced. The progress loop, which knows the call's number, makes the error of it."""

    def __init__(self, lease: Lease) -> None:
        super().__init__()
        self.lease = lease


class DeviceTensor:
    """A tensor of the caller, whether the call reads or writes it, and its flat memory on the device.

    The flat memory is the tensor's own, or a temporary copy if the tensor is not contiguous, is reduced in another dtype
    (`dtype`) or is divided before it is sent (`share`). A temporary copy is made when the call begins, on the stream `down`,
    because an earlier call in progress may still write to the tensor.
    """

    __slots__ = ("_lease", "_plain", "_share", "dtype", "flat", "outline", "reads", "writes")

    def __init__(self, plain: torch.Tensor, reads: bool, writes: bool, dtype: torch.dtype, share: int) -> None:
        self._plain = plain
        self._lease = Lease(plain)
        self._share = share
        self.reads = reads
        self.writes = writes
        self.dtype = dtype
        self.flat: torch.Tensor | None = None
        self.outline = torch.empty(plain.numel(), dtype=dtype, device="meta")  # is sliced instead of the memory

    @property
    def is_copied(self) -> bool:
        """Whether the flat memory is a temporary copy."""
        plain = self._plain
        changed = self.dtype is not plain.dtype or (self.reads and self._share > 1)
        return changed or not plain.is_contiguous() or plain.is_conj() or plain.is_neg()

    def begin(self) -> None:
        """Make the flat memory, in the device thread, with `down` as the current stream."""
        plain = self._plain
        if not self.is_copied:
            self.flat = plain.view(-1)
            return
        self.check()
        shaped = torch.empty(plain.shape, dtype=self.dtype, device=plain.device)
        if self.reads and self._share > 1:
            torch.div(plain, self._share, out=shaped)
        elif self.reads:
            shaped.copy_(plain)
        self.flat = shaped.view(-1)

    def copy_back(self) -> None:
        """Copy the result of a temporary copy to the tensor, in the device thread, with `up` as the current stream."""
        assert self.flat is not None
        self.check()
        self._plain.copy_(self.flat.view(self._plain.shape))

    def check(self) -> None:
        """Raise MemoryChanged if the tensor's memory was replaced since the call."""
        if not self._lease.is_intact():
            raise MemoryChanged(self._lease)

    def overlaps(self, other: DeviceTensor) -> bool:
        """Return whether both use the same memory and one of them writes it."""
        if not (self.writes or other.writes):
            return False
        start, end = _extent(self._plain)
        its_start, its_end = _extent(other._plain)
        return start < its_end and its_start < end


class Slice(NamedTuple):
    """A range of elements of a device tensor."""

    tensor: DeviceTensor
    start: int
    length: int

    @property
    def nbytes(self) -> int:
        return int(self.length * self.tensor.dtype.itemsize)

    def cut(self, start: int, stop: int) -> Slice:
        """Return the part between two offsets in bytes, which are multiples of the element's size."""
        size = self.tensor.dtype.itemsize
        first, last = min(self.length, start // size), min(self.length, stop // size)
        return Slice(self.tensor, self.start + first, last - first)

    def on_device(self) -> torch.Tensor:
        """Return the memory on the device."""
        assert self.tensor.flat is not None
        return self.tensor.flat[self.start : self.start + self.length]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses between which the elements of a tensor lie."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
