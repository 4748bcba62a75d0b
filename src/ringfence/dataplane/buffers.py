"""Host memory: tensors as bytes and bytes as tensors, and the segments that frames are built in.

This is the staging seam: everything above it hands over tensors, everything below it sees bytes of this process. A device
tensor would be staged here.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from ringfence.errors import TensorChangedError, UnsupportedError
from ringfence.link.frames import FRAME_BYTES

_EMPTY = memoryview(bytearray())


@functools.lru_cache(maxsize=1024)
def _array_type(length: int) -> Any:
    """A ctypes array of bytes exports memory that is not its own. Making its type costs many times what using it costs."""
    return ctypes.c_ubyte * length


class Lease:
    """The storage of a tensor that a call uses, and where its memory was when the call was made.

    It keeps the storage alive. That is not enough: `resize_` and `share_memory_` replace the memory of a storage, whoever
    refers to it. So whoever reads or writes the memory asks `is_intact` first, in the same hold of the interpreter's lock.
    """

    __slots__ = ("address", "nbytes", "storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = tensor.untyped_storage()
        self.address: int = self.storage.data_ptr()
        self.nbytes: int = self.storage.nbytes()

    def is_intact(self) -> bool:
        """Whether the storage still has the memory that it had."""
        return bool(self.storage.data_ptr() == self.address and self.storage.nbytes() == self.nbytes)

    def check(self, user: str) -> None:
        """Raise TensorChangedError if it has not. `user` names the call, and the worker that made it."""
        if not self.is_intact():
            raise self.changed(user)

    def changed(self, user: str) -> TensorChangedError:
        """What to raise for a storage that has other memory than it had."""
        now = self.storage.nbytes()
        what = "moved" if now == self.nbytes else f"resized from {self.nbytes} to {now} bytes"
        return TensorChangedError(
            f"{user}: the storage of one of its tensors was {what} while the call was under way. "
            "Wait for the call to end (work.wait()) before resizing, moving or freeing its tensors."
        )


def require_host(tensor: torch.Tensor) -> None:
    """Refuse what does not live in this process's memory."""
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"ringfence moves CPU tensors; this one is on {tensor.device}. Copy it to the CPU first (tensor.cpu())."
        )


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, writable. The view, and every view of it, keeps the tensor's storage alive."""
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
    """The lease behind a view of a tensor's bytes, or None if they are not a tensor's."""
    return getattr(view.obj, "lease", None)


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


def divide(tensor: torch.Tensor, divisor: int) -> None:
    """An average's last step, in place. An average of integers is rounded toward zero, as NCCL rounds it."""
    exact = tensor.is_floating_point() or tensor.is_complex()
    tensor.div_(divisor, rounding_mode=None if exact else "trunc")


def divide_bytes(dtype: torch.dtype, target: memoryview, divisor: int) -> None:
    """The same, over bytes."""
    divide(as_tensor(target, dtype), divisor)


def scratch(length: int) -> tuple[memoryview, Any]:
    """Uninitialised bytes, and the object that keeps them."""
    keeper = torch.empty(length, dtype=torch.uint8, device="cpu")
    if not length:
        return _EMPTY, keeper
    exporter = _array_type(length).from_address(keeper.data_ptr())
    exporter.keeper, exporter.lease = keeper, None  # nobody else can resize it
    return memoryview(exporter).cast("B"), keeper


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
