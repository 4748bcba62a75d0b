"""Host memory: tensors as bytes, bytes as tensors, and the segments in which frames are built.

Everything above this module passes tensors; everything below it handles bytes of this process.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from ringfence.errors import TensorChangedError, UnsupportedError
from ringfence.link.frames import FRAME_BYTES

Combine = Callable[..., Any]  # combine(left, right, out=...)

_EMPTY = memoryview(bytearray())


@functools.lru_cache(maxsize=1024)
def _array_type(length: int) -> Any:
    """Return the ctypes array type of `length` bytes, cached: creating the type costs far more than using it."""
    return ctypes.c_ubyte * length


class Lease:
    """A reference to the storage of a tensor, with the address and size of its memory at the time of the call.

    The reference keeps the storage alive, but `resize_` and `share_memory_` replace its memory. Code that reads or writes
    the memory therefore calls `is_intact` first, without releasing the interpreter's lock in between.
    """

    __slots__ = ("address", "nbytes", "storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = tensor.untyped_storage()
        self.address: int = self.storage.data_ptr()
        self.nbytes: int = self.storage.nbytes()

    def is_intact(self) -> bool:
        """Return whether the storage still has the same memory."""
        return bool(self.storage.data_ptr() == self.address and self.storage.nbytes() == self.nbytes)

    def check(self, user: str) -> None:
        """Raise TensorChangedError if the memory was replaced. `user` names the worker and the call."""
        if not self.is_intact():
            raise self.changed(user)

    def changed(self, user: str) -> TensorChangedError:
        """Return the error for a storage whose memory was replaced."""
        now = self.storage.nbytes()
        what = "moved" if now == self.nbytes else f"resized from {self.nbytes} to {now} bytes"
        return TensorChangedError(
            f"{user}: the storage of one of its tensors was {what} while the call was under way. "
            "Wait for the call to end (work.wait()) before resizing, moving or freeing its tensors."
        )


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous host tensor, writable. The view and its slices keep the storage alive."""
    length = tensor.numel() * tensor.element_size()
    if not length:
        return _EMPTY
    address = tensor.data_ptr()
    if not address:
        raise UnsupportedError(
            f"a {type(tensor).__name__} without memory of its own; pass the tensor that it stands for"
        )
    exporter = _array_type(length).from_address(address)
    exporter.lease = Lease(tensor)
    return memoryview(exporter).cast("B")


def lease_of(view: memoryview) -> Lease | None:
    """Return the lease of a view that `as_bytes` returned, or None for other memory."""
    return getattr(view.obj, "lease", None)


def address_of(view: memoryview) -> int:
    """Return the address of a view, which must not be empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def as_tensor(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor over bytes. It is neither an autograd nor an inference tensor."""
    if not len(view):
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(view, dtype=dtype)


def combine_bytes(combine: Any, dtype: torch.dtype, left: memoryview, right: memoryview, target: memoryview) -> None:
    """Apply a reduction to bytes."""
    combine(as_tensor(left, dtype), as_tensor(right, dtype), out=as_tensor(target, dtype))


def divide(tensor: torch.Tensor, divisor: int) -> None:
    """Divide in place, the last step of an average. Integers are rounded toward zero, as in NCCL."""
    exact = tensor.is_floating_point() or tensor.is_complex()
    tensor.div_(divisor, rounding_mode=None if exact else "trunc")


def divide_bytes(dtype: torch.dtype, target: memoryview, divisor: int) -> None:
    """Apply `divide` to bytes."""
    divide(as_tensor(target, dtype), divisor)


def scratch(length: int) -> tuple[memoryview, Any]:
    """Return uninitialised bytes and the object that owns them."""
    keeper = torch.empty(length, dtype=torch.uint8, device="cpu")
    return bytes_of_memory(keeper), keeper


def bytes_of_memory(owner: torch.Tensor) -> memoryview:
    """Return the bytes of a flat tensor that no other code can resize. The view keeps it alive."""
    length = owner.numel()
    if not length:
        return _EMPTY
    exporter = _array_type(length).from_address(owner.data_ptr())
    exporter.keeper, exporter.lease = owner, None
    return memoryview(exporter).cast("B")


class Segment:
    """A buffer for one frame, or for the plaintext of one segment."""

    __slots__ = ("_typed", "view")

    def __init__(self) -> None:
        self.view = memoryview(bytearray(FRAME_BYTES))
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the segment as a tensor of this dtype."""
        found = self._typed.get(dtype)
        if found is None:
            usable = FRAME_BYTES // 16 * 16
            found = self._typed[dtype] = torch.frombuffer(self.view[:usable], dtype=dtype)
        return found


class Pool:
    """A pool of segments that keeps at most `most` idle ones."""

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
