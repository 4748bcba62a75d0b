"""A device tensor of a call, and the slices of it that passes are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ringfence.collectives.passes import PASS_BYTES
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
    """A range of elements of a device tensor, or a range of each of `parts` equal parts of it."""

    tensor: DeviceTensor
    start: int
    length: int  # in each part
    parts: int = 1
    stride: int = 0  # elements from one part to the next

    @property
    def nbytes(self) -> int:
        return int(self.parts * self.length * self.tensor.dtype.itemsize)

    def cut(self, start: int, stop: int, parts: int = 1) -> Slice:
        """Return what is between two offsets in bytes, multiples of the element's size, in each of so many equal parts."""
        size, each = self.tensor.dtype.itemsize, self.length // parts
        first, last = min(each, start // size), min(each, stop // size)
        if last - first == each:
            return self
        return Slice(self.tensor, self.start + first, last - first, parts, each)

    def on_device(self) -> torch.Tensor:
        """Return the memory on the device."""
        flat = self.tensor.flat
        assert flat is not None
        if self.parts == 1:
            return flat[self.start : self.start + self.length]
        first = flat.storage_offset() + self.start  # `as_strided` counts from the beginning of the storage
        return flat.as_strided((self.parts, self.length), (self.stride, 1), first)


class Region(NamedTuple):
    """Slices of device tensors that are copied to adjacent host memory, or from it, by one copy."""

    host: torch.Tensor  # of bytes
    slices: list[Slice]

    @property
    def reads(self) -> bool:
        return any(each.tensor.reads for each in self.slices)

    @property
    def writes(self) -> bool:
        return any(each.tensor.writes for each in self.slices)

    def check(self) -> None:
        """Raise MemoryChanged if the memory of a tensor was replaced since the call."""
        for each in self.slices:
            each.tensor.check()

    def to_host(self) -> None:
        """Copy to the host, on the current stream. What is not contiguous is packed on the device first."""
        self.check()
        if self._is_copied_one_by_one:
            for host, each in self._pairs():
                host.copy_(each.reshape(-1), non_blocking=True)
        else:
            packed = [each.on_device().reshape(-1) for each in self.slices]
            self._typed.copy_(packed[0] if len(packed) == 1 else torch.cat(packed), non_blocking=True)

    def to_device(self) -> None:
        """Copy to the device, on the current stream. What is not contiguous is unpacked there."""
        self.check()
        source = self._typed
        if not self._is_copied_one_by_one:
            source = torch.empty(source.shape, dtype=source.dtype, device=self.slices[0].on_device().device)
            source.copy_(self._typed, non_blocking=True)
        for each, target in self._pairs(source):
            target.copy_(each.view(target.shape), non_blocking=True)

    @property
    def _is_copied_one_by_one(self) -> bool:
        """Whether nothing is packed: one slice, or more than a slot holds, which would take as much memory on the device."""
        one = len(self.slices) == 1 and self.slices[0].on_device().is_contiguous()
        return one or len(self.host) > PASS_BYTES

    def _pairs(self, flat: torch.Tensor | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The part of host memory, or of its copy, that belongs to each slice, and the slice on the device."""
        end = 0
        for each in self.slices:
            target = each.on_device()
            begin, end = end, end + target.numel()
            yield (self._typed if flat is None else flat)[begin:end], target

    @property
    def _typed(self) -> torch.Tensor:
        return self.host.view(self.slices[0].tensor.dtype)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses between which the elements of a tensor lie."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def joined(slices: list[Slice]) -> list[Slice]:
    """The same elements in the same order, with neighbours in one slice."""
    found: list[Slice] = []
    for each in slices:
        last = found[-1] if found else None
        if (
            last
            and last.tensor is each.tensor
            and last.parts == each.parts == 1
            and last.start + last.length == each.start
        ):
            found[-1] = Slice(last.tensor, last.start, last.length + each.length)
        else:
            found.append(each)
    return found
