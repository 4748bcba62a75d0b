"""Tensors as ranges of bytes: which can be sealed or opened where they are, and blocks of the others for staging."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch

from ringfence.checkpoint import conversion
from ringfence.checkpoint.index import ITEM_BYTES
from ringfence.dataplane.buffers import bytes_of_memory
from ringfence.errors import CheckpointError

STAGING_BYTES: Final = 32 << 20  # of host memory for tensors that are not on the host, or not contiguous
_ALIGNMENT: Final = 64


def dtype_name(tensor: torch.Tensor, name: str) -> str:
    """Return the name of a tensor's dtype in an index. Raises CheckpointError, naming the tensor, if it has none."""
    found = str(tensor.dtype).removeprefix("torch.")
    if found not in ITEM_BYTES or tensor.layout is not torch.strided:
        raise CheckpointError(
            f"{name} is a tensor of {tensor.dtype} and {tensor.layout}, which a sealed checkpoint cannot hold: "
            "convert it to a dense tensor of a plain dtype first"
        )
    return found


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory is on the host, and is what is stored."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def blocks(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Yield parts of at most `limit` bytes that make up the tensor in row-major order."""
    if tensor.nbytes <= limit:
        if tensor.nbytes:
            yield tensor
        return
    row = tensor.nbytes // tensor.shape[0]
    if row > limit:
        for part in tensor:
            yield from blocks(part, limit)
    else:
        yield from tensor.split(limit // row)


class Piece(NamedTuple):
    """A contiguous range of a stored chunk, in elements, that is loaded into `target`.

    `shape` is that of the range. If it is None, the range is the target's memory; otherwise the target is the part of it
    that `offsets` and the target's shape select.
    """

    start: int
    target: torch.Tensor
    shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        return self.target.numel() if self.shape is None else math.prod(self.shape)

    def copy_from(self, loaded: torch.Tensor) -> bool:
        """Copy what was loaded to the target. Returns whether a number is too large for the target's dtype."""
        for dimension, (at, size) in enumerate(zip(self.offsets, self.target.shape, strict=True)):
            loaded = loaded.narrow(dimension, at, size)
        self.target.copy_(loaded)
        return conversion.overflowed(loaded, self.target)


def pieces(
    sizes: Sequence[int], offsets: Sequence[int], target: torch.Tensor, dtype: torch.dtype, limit: int, start: int = 0
) -> Iterator[Piece]:
    """Yield what to load of a stored chunk of shape `sizes` so that `target` becomes its box at `offsets`.

    Pieces that need staging have at most `limit` elements.
    """
    if not target.numel():
        return
    if not sizes:
        yield Piece(start, target) if is_plain(target) and target.dtype is dtype else Piece(start, target, ())
        return
    row, first = math.prod(sizes[1:]), start + offsets[0] * math.prod(sizes[1:])
    whole = not any(offsets[1:]) and tuple(target.shape[1:]) == tuple(sizes[1:])
    if whole and is_plain(target) and target.dtype is dtype:
        yield Piece(first, target)
    elif row <= limit:
        for at in range(0, target.shape[0], limit // row):
            part = target[at : at + limit // row]
            yield Piece(first + at * row, part, (part.shape[0], *sizes[1:]), (0, *offsets[1:]))
    else:
        for at in range(target.shape[0]):
            yield from pieces(sizes[1:], offsets[1:], target[at], dtype, limit, first + at * row)


class HostBuffer:
    """Host memory of a bounded size that is handed out in parts and taken back as a whole."""

    def __init__(self, size: int = STAGING_BYTES) -> None:
        self.size = size
        self._memory: torch.Tensor | None = None
        self._used = 0

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return a flat tensor for data of a tensor on `device`, or None if all memory is in use: `reset` first."""
        if self._memory is None:
            self._memory = torch.empty(self.size, dtype=torch.uint8, device="cpu", pin_memory=_pins(device))
        nbytes = count * dtype.itemsize
        if self._used + nbytes > self.size:
            return None
        part = self._memory[self._used : self._used + nbytes]
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return part.view(dtype)

    def reset(self) -> None:
        self._used = 0


def _pins(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a plain tensor."""
    return bytes_of_memory(tensor.detach().reshape(-1).view(torch.uint8))
