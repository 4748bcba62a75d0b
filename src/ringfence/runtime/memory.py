"""Host memory: tensors as bytes and bytes as tensors, and the segments that frames are built in.

This is the staging seam: everything above it hands over tensors, everything below it sees bytes of this process. A device
tensor would be staged here.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ringfence.errors import UnsupportedError
from ringfence.link.frames import FRAME_BYTES

# A memoryview over a tensor's memory without numpy; whoever holds the view must hold the tensor.
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.restype = ctypes.py_object
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200

_EMPTY = memoryview(bytearray())


def require_host(tensor: torch.Tensor) -> None:
    """Refuse what does not live in this process's memory."""
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"ringfence moves CPU tensors; this one is on {tensor.device}. Copy it to the CPU first (tensor.cpu())."
        )


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, writable. Keep the tensor alive for as long as the view."""
    length = tensor.numel() * tensor.element_size()
    if not length:
        return _EMPTY
    address = tensor.data_ptr()
    if not address:
        raise UnsupportedError(
            f"a {type(tensor).__name__} without memory of its own; pass the tensor that it stands for"
        )
    view: memoryview = _from_memory(address, length, _WRITABLE)
    return view


def address_of(view: memoryview) -> int:
    """Where the bytes of a view begin; it must not be empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def as_tensor(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over bytes. It is no autograd tensor and no inference tensor, whatever the bytes belong to."""
    if not len(view):
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(view, dtype=dtype)


def combine_bytes(combine: Any, dtype: torch.dtype, left: memoryview, right: memoryview, target: memoryview) -> None:
    """The reduction, over bytes."""
    combine(as_tensor(left, dtype), as_tensor(right, dtype), out=as_tensor(target, dtype))


def divide_bytes(dtype: torch.dtype, target: memoryview, divisor: int) -> None:
    """An average's last step, over bytes."""
    as_tensor(target, dtype).div_(divisor)


def scratch(length: int) -> tuple[memoryview, Any]:
    """Uninitialised bytes, and the object that keeps them."""
    keeper = torch.empty(length, dtype=torch.uint8, device="cpu")
    return as_bytes(keeper), keeper


class Segment:
    """Room for one frame, or for the plaintext of one segment."""

    __slots__ = ("_typed", "view")

    def __init__(self) -> None:
        self.view = memoryview(bytearray(FRAME_BYTES))
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """The start of the segment as a tensor."""
        found = self._typed.get(dtype)
        if found is None:
            usable = FRAME_BYTES // 16 * 16
            found = self._typed[dtype] = torch.frombuffer(self.view[:usable], dtype=dtype)
        return found


class Pool:
    """Segments that are used again; it keeps at most `most` idle ones."""

    __slots__ = ("_idle", "_most", "made")

    def __init__(self, most: int = 32) -> None:
        self._idle: list[Segment] = []
        self._most = most
        self.made = 0

    def take(self) -> Segment:
        if self._idle:
            return self._idle.pop()
        self.made += 1
        return Segment()

    def give(self, segment: Segment) -> None:
        if len(self._idle) < self._most:
            self._idle.append(segment)
