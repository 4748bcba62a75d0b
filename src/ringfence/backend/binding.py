"""Binding of tensors to the memory of a schedule: contiguity, dtypes, reductions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ringfence.dataplane.buffers import Lease
from ringfence.dataplane.request import DTYPES, REDUCTIONS
from ringfence.device.tensors import DeviceTensor, Slice
from ringfence.errors import UnsupportedError

_CODES = {getattr(torch, name): code for code, name in enumerate(DTYPES) if hasattr(torch, name)}

_COMBINE: dict[str, Callable[..., Any]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
    "avg": torch.add,
}
_BITWISE = ("band", "bor", "bxor")
_NOT_REDUCED = ("uint16", "uint32", "uint64", "complex32")
_SHORT_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32})


Copy = tuple[torch.Tensor, torch.Tensor, Lease | None]  # target, source, and the lease of the caller's tensor


class CallMemory:
    """The flat memory of a call's tensors: their own if they are contiguous host tensors, otherwise copies.

    A strided host tensor is copied in when its collective begins, not when it is called, because an earlier call in progress
    may still write to it. It is copied back before the call completes. A contribution is also copied if it is divided
    before it is sent (`share_of`) or reduced in another dtype (`wide_dtype`). For device tensors (`device`), the methods
    return outlines on the meta device, which are sliced instead of the memory; `slices_of` translates them.
    """

    __slots__ = ("_back", "_dtype", "_in", "_on_host", "_outlines", "_share", "device", "given")

    def __init__(self, share: int = 1, dtype: torch.dtype | None = None, device: torch.device | None = None) -> None:
        self._share = share
        self._dtype = dtype
        self._in: list[Copy] = []
        self._back: list[Copy] = []
        self._on_host = False  # whether one of the tensors is
        self._outlines: dict[int, DeviceTensor] = {}  # by the identity of the outline's storage
        self.device = device  # None: unknown or host
        self.given: list[torch.Tensor] = []  # the caller's contributions, as given

    def input(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory that holds the tensor's values when the collective begins."""
        self.given.append(tensor)
        return self._bind(tensor, reads=True, writes=False)

    def output(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for a result."""
        return self._bind(tensor, reads=False, writes=True)

    def in_place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory that holds the tensor's values and receives the result."""
        self.given.append(tensor)
        return self._bind(tensor, reads=True, writes=True)

    def _bind(self, tensor: torch.Tensor, reads: bool, writes: bool) -> torch.Tensor:
        _check(tensor)
        if isinstance(tensor, AsyncCollectiveTensor):  # of a functional collective: wait for its result
            tensor = tensor.trigger_wait()
        plain = tensor.detach()
        dtype = self._dtype or plain.dtype
        if not plain.is_cpu:
            return self._bind_device(plain, reads, writes, dtype)
        if self.device is not None:
            raise _several_devices(self.device, plain.device)
        self._on_host = True
        own = plain.is_contiguous() and dtype is plain.dtype and not (plain.is_conj() or plain.is_neg())
        if own and not (reads and self._share > 1):
            return plain if plain.dim() == 1 else plain.view(-1)
        memory = torch.empty(plain.shape, dtype=dtype, device="cpu")
        lease = _lease(plain)
        if reads:
            self._in.append((memory, plain, lease))
        if writes:
            self._back.append((plain, memory, lease))
        return memory.view(-1)

    def _bind_device(self, plain: torch.Tensor, reads: bool, writes: bool, dtype: torch.dtype) -> torch.Tensor:
        if self._on_host or self.device not in (None, plain.device):
            raise _several_devices(self.device, plain.device)
        self.device = plain.device
        # `data` has a version counter of its own: as with host tensors, a result is no in-place change to autograd.
        bound = DeviceTensor(plain.data, reads, writes, dtype, self._share)
        self._outlines[bound.outline.untyped_storage()._cdata] = bound
        return bound.outline

    @property
    def device_tensors(self) -> list[DeviceTensor]:
        """The call's tensors, if they are on a device."""
        return list(self._outlines.values())

    def slices_of(self, outlines: list[torch.Tensor]) -> list[Slice]:
        """Return the slices of the device tensors that these slices of outlines stand for."""
        return [
            Slice(self._outlines[each.untyped_storage()._cdata], int(each.storage_offset()), each.numel())
            for each in outlines
        ]

    @property
    def before(self) -> Callable[[], None] | None:
        """A function that copies in, or None if nothing is copied."""
        return functools.partial(_copy, self._in, self._share) if self._in else None

    @property
    def after(self) -> Callable[[], None] | None:
        """A function that copies back, or None if nothing is copied."""
        return functools.partial(_copy, self._back) if self._back else None


def _several_devices(first: Any, second: torch.device) -> UnsupportedError:
    return UnsupportedError(
        f"the tensors of one call are on several devices ({first or 'cpu'} and {second}): pass tensors of one device"
    )


def _lease(plain: torch.Tensor) -> Lease | None:
    """The lease of a tensor, or None if it has no memory of its own: then its class knows how to copy it."""
    return Lease(plain) if plain.data_ptr() else None


def _copy(copies: list[Copy], share: int = 1) -> None:
    with torch.inference_mode():  # inference tensors may be written only in this mode
        for target, source, lease in copies:
            if lease is not None:
                lease.check("a call that copies its tensors")
            if share == 1:
                target.copy_(source)
            else:
                torch.div(source, share, out=target)


def _check(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"only all_reduce supports sparse tensors; this one has layout {tensor.layout}")
    if not tensor.is_cpu and tensor.device.type != _accelerator():
        raise UnsupportedError(
            f"ringfence moves tensors of the CPU and of the current accelerator; this one is on {tensor.device}. "
            "Copy it to the CPU first (tensor.cpu())."
        )
    if tensor.dtype not in _CODES:
        raise UnsupportedError(f"tensors of dtype {tensor.dtype} are not supported")


@functools.cache
def _accelerator() -> str | None:
    """The type of the accelerator of this process, such as "cuda", or None."""
    found = torch.accelerator.current_accelerator()
    return None if found is None else str(found.type)


def dtype_code(dtype: torch.dtype) -> int:
    return _CODES[dtype]


def bytes_of(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def even_parts(memory: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Equal consecutive parts."""
    each = memory.numel() // count
    flat = memory.view(-1)
    return [flat[part * each : (part + 1) * each] for part in range(count)]


def same_layout(tensors: Sequence[torch.Tensor], equal: bool = False) -> None:
    """Check that all tensors have one dtype, and one size if `equal`. Raises ValueError."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype != first.dtype:
            raise ValueError(
                f"tensors of one collective must share a dtype: {first.dtype} and {tensor.dtype} were given"
            )
        if equal and tensor.numel() != first.numel():
            raise ValueError(f"tensors must be of one size: {first.numel()} and {tensor.numel()} elements were given")


def reduction_of(operation: Any, dtype: torch.dtype) -> tuple[int, Callable[..., Any], bool]:
    """The code on the wire, the function, and whether the sum is divided by the group's size afterwards."""
    return _reduction(_reduction_name(operation), dtype)


@functools.cache
def _reduction(name: str, dtype: torch.dtype) -> tuple[int, Callable[..., Any], bool]:
    if (dtype in _CODES and DTYPES[_CODES[dtype]] in _NOT_REDUCED) or str(dtype).startswith("torch.float8"):
        raise UnsupportedError(f"{dtype} cannot be reduced; convert the tensor first")
    if name in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise UnsupportedError(f"a bitwise reduction of {dtype} is not defined")
    if name in ("min", "max") and dtype.is_complex:
        raise UnsupportedError("complex numbers have no order: min and max are not defined")
    if name == "avg" and dtype is torch.bool:
        raise UnsupportedError("booleans have no average; convert the tensor first")
    return REDUCTIONS.index(name), _COMBINE[name], name == "avg" and dtype is not torch.float16


def share_of(operation: Any, dtype: torch.dtype, size: int) -> int:
    """The divisor of each contribution: an average in float16 may fit, where the sum exceeds 65504."""
    return size if dtype is torch.float16 and _reduction_name(operation) == "avg" else 1


def wide_dtype(operation: Any, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype to reduce in, if it differs: the average of short integers always fits their dtype, their sum may not."""
    return torch.int64 if dtype in _SHORT_INTEGERS and _reduction_name(operation) == "avg" else None


_NAMES = {getattr(dist.ReduceOp, name.upper()): name for name in REDUCTIONS}


def _reduction_name(operation: Any) -> str:
    kind = getattr(operation, "op", operation)
    name = _NAMES.get(kind)
    if name is None:
        raise UnsupportedError(
            f"{kind} is not supported; use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR. "
            "FSDP2 with set_gradient_divide_factor() needs set_force_sum_reduction_for_comms(True)"
        )
    return name
