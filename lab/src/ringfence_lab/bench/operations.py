"""The collectives that are timed: their tensors, how each is called, and what its result must be."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ringfence.errors import RingfenceError


class WrongResult(RingfenceError):
    """A variant computed a wrong result; its time would mean nothing."""


def type_of(wire: str) -> torch.dtype:
    """Return the torch dtype of a name."""
    kind = getattr(torch, wire)
    assert isinstance(kind, torch.dtype)
    return kind


class Tensors(NamedTuple):
    """The tensors of a collective: `whole` has the given size, `part` is one rank's share, `other` receives all-to-all."""

    whole: torch.Tensor
    part: torch.Tensor
    other: torch.Tensor

    @classmethod
    def of(
        cls, operation: str, size: int, ranks: int, wire: str = "float32", device: torch.device | None = None
    ) -> Tensors:
        """Allocate tensors of one dtype; the number of elements is rounded so that all parts are equal."""
        kind = type_of(wire)
        each = max(1, size // kind.itemsize // ranks)
        return cls(
            torch.empty(each * ranks, dtype=kind, device=device).fill_(0),
            torch.empty(each, dtype=kind, device=device).fill_(0),
            torch.empty(each * ranks if operation == "all_to_all" else 0, dtype=kind, device=device).fill_(0),
        )

    def copied(self, operation: str, rank: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return what a rank reads and what it writes: on a device, what is copied to the host and back."""
        whole, part, other = self
        match operation:
            case "all_reduce":
                return whole, whole
            case "all_gather":
                return part, whole
            case "reduce_scatter":
                return whole, part
            case "broadcast":
                return (None, whole) if rank else (whole, None)
            case _:
                return whole, other


def call(operation: str, tensors: Tensors, group: Any, asynchronous: bool = False) -> Any:
    """Call the collective of torch.distributed, as a training script does."""
    whole, part, other = tensors
    match operation:
        case "all_reduce":
            return dist.all_reduce(whole, group=group, async_op=asynchronous)
        case "all_gather":
            return dist.all_gather_into_tensor(whole, part, group=group, async_op=asynchronous)
        case "reduce_scatter":
            return dist.reduce_scatter_tensor(part, whole, group=group, async_op=asynchronous)
        case "broadcast":
            return dist.broadcast(whole, 0, group=group, async_op=asynchronous)
        case _:
            return dist.all_to_all_single(other, whole, group=group, async_op=asynchronous)


def fill(operation: str, tensors: Tensors, rank: int, ranks: int) -> None:
    """Fill tensors with small integers: their sum is exact in any order."""
    tensors.part.fill_(rank + 1)
    if operation == "all_to_all":
        for peer, chunk in enumerate(tensors.whole.tensor_split(ranks)):
            chunk.fill_(rank * ranks + peer)
    else:
        tensors.whole.fill_(rank + 1)


def check(operation: str, tensors: Tensors, rank: int, ranks: int, variant: str, tolerance: float = 0.0) -> None:
    """Raise unless the result of what `fill` prepared is right. `tolerance` is that of an all-reduce, relative."""
    total = ranks * (ranks + 1) // 2
    match operation:
        case "all_reduce":
            wrong = not bool(((tensors.whole - total).abs() <= tolerance * total).all())
        case "reduce_scatter":
            wrong = (tensors.part != total).any()
        case "broadcast":
            wrong = (tensors.whole != 1).any()
        case "all_gather":
            wrong = any((chunk != peer + 1).any() for peer, chunk in enumerate(tensors.whole.tensor_split(ranks)))
        case _:
            chunks = tensors.other.tensor_split(ranks)
            wrong = any((chunk != peer * ranks + rank).any() for peer, chunk in enumerate(chunks))
    if wrong:
        raise WrongResult(f"{variant} computed a wrong {operation} on rank {rank}")
