"""A piece of a tensor on its way: quantised, exchanged, summed, quantised again, gathered."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from ringfence.errors import MismatchError
from ringfence.hooks import blocks
from ringfence.hooks.blocks import BLOCK

DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PIECE: Final = 1 << 20  # values. Smaller ones overlap better, larger ones take fewer calls


class Call(NamedTuple):
    """An all-reduce: what is the same for all of its pieces."""

    rank: int
    size: int
    average: bool
    number: int = 0  # of calls before, in this group
    bucket: int = 0


class Piece:
    """Consecutive elements of a tensor, each rank with a shard of them. `begin`, `combine` and `finish` in this order.

    A rank sends each other rank that rank's shard, quantised. It sums its own shard in float32, its own contribution
    unquantised, and quantises the sum; all ranks, this one too, read the result from these bytes.
    """

    def __init__(self, call: Call, flat: torch.Tensor, residual: torch.Tensor | None, part: slice) -> None:
        kind = 2 * DTYPES.index(flat.dtype) + call.average
        header = torch.tensor([flat.numel(), kind, call.number, call.bucket, part.start])
        self._header = header.view(torch.uint8).to(flat.device)  # bytes that must be equal on all ranks
        self._call = call
        self._values = values = flat[part]
        self._residual = None if residual is None else residual[part]
        self._count = -(-values.numel() // (call.size * BLOCK)) * call.size * BLOCK  # with what fills the last blocks
        self._work: Any = None

    def begin(self, group: Any) -> None:
        """Quantise the shards of other ranks and start to exchange them."""
        rank, size = self._call.rank, self._call.size
        source = self._values if self._residual is None else self._residual.add_(self._values)
        if source.dtype is not torch.float32 or source.numel() != self._count:
            padded = source.new_zeros(self._count, dtype=torch.float32)
            padded[: source.numel()] = source
            source = padded
        self._sums = source.view(size, -1)  # a shard in each row: the same memory if it is enough
        length = blocks.packet_bytes(self._count // size, self._header.numel())
        self._sent = torch.empty(size, length, dtype=torch.uint8, device=source.device)
        self._received = torch.empty_like(self._sent)
        self._sent[:, -self._header.numel() :] = self._header
        for others in (slice(0, rank), slice(rank + 1, size)):
            blocks.quantise(self._sums[others], self._sent[others], keep_errors=self._residual is not None)
        self._work = dist.all_to_all_single(
            self._received,
            self._sent,
            output_split_sizes=[1] * size,  # equal ones, but explicit: then no shard passes through a third rank,
            input_split_sizes=[1] * size,  # which would see it as it is
            group=group,
            async_op=True,
        )

    def combine(self, group: Any) -> None:
        """Sum this rank's shard and start to gather all of them. Raises MismatchError, on all ranks, if headers differ."""
        self._work.wait()
        self._compare(self._received)
        rank = self._call.rank
        own = self._received[rank : rank + 1]
        blocks.quantise(
            self._sums[rank : rank + 1],
            own,
            added=[self._received[peer : peer + 1] for peer in range(self._call.size) if peer != rank],
            divisor=self._call.size if self._call.average else 1,
            keep_errors=self._residual is not None,
        )
        if self._residual is not None and self._residual.data_ptr() != self._sums.data_ptr():
            self._residual.copy_(self._sums.view(-1)[: self._residual.numel()])
        self._work = dist.all_gather_into_tensor(self._sent.view(-1), own.view(-1), group=group, async_op=True)

    def finish(self) -> None:
        """Write the result over the values. Raises MismatchError, on all ranks, if headers differ."""
        self._work.wait()
        self._compare(self._sent)
        target = self._values
        if target.dtype is not torch.float32 or target.numel() != self._count:
            target = target.new_empty(self._count, dtype=torch.float32)
        blocks.read(self._sent, target.view(self._call.size, -1))
        if target is not self._values:
            self._values.copy_(target[: self._values.numel()])
        del self._sent, self._received, self._sums, self._work

    def _compare(self, packets: torch.Tensor) -> None:
        if bool((packets[:, -self._header.numel() :] != self._header).any()):
            raise MismatchError(
                f"rank {self._call.rank}: another rank is at another all-reduce, or called this one of {self._values.dtype} "
                "with another size, dtype or `average`. Call it alike on all ranks of the group"
            )


def divide(call: Call, flat: torch.Tensor, residual: torch.Tensor | None) -> list[Piece]:
    """Return the pieces of a tensor: at least one, so that all ranks compare its size."""
    step = max(1, PIECE // (call.size * BLOCK)) * call.size * BLOCK
    return [Piece(call, flat, residual, slice(start, start + step)) for start in range(0, max(1, flat.numel()), step)]
