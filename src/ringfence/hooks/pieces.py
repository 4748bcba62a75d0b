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
    header: torch.Tensor  # bytes that must be equal on all ranks

    @classmethod
    def of(cls, tensor: torch.Tensor, rank: int, size: int, average: bool) -> Call:
        kind = 2 * DTYPES.index(tensor.dtype) + average
        header = torch.tensor([tensor.numel(), kind], dtype=torch.int64).view(torch.uint8)
        return cls(rank, size, average, header.to(tensor.device))


class Piece:
    """Consecutive elements of a tensor, each rank with a shard of them. `begin`, `combine` and `finish` in this order.

    A rank sends each other rank that rank's shard, quantised. It sums its own shard in float32, its own contribution
    unquantised, and quantises the sum; all ranks, this one too, read the result from these bytes.
    """

    def __init__(self, call: Call, values: torch.Tensor, residual: torch.Tensor | None) -> None:
        self._call = call
        self._values = values
        self._residual = residual
        self._count = -(-values.numel() // (call.size * BLOCK)) * call.size * BLOCK  # with what fills the last blocks
        self._work: Any = None

    def begin(self, group: Any) -> None:
        """Quantise the shards of other ranks and start to exchange them."""
        rank, size = self._call.rank, self._call.size
        source = self._values
        if self._residual is not None:
            source = self._residual.add_(source)
        self._sums = self._padded(source)
        length = blocks.packet_bytes(self._count // size, self._call.header.numel())
        self._sent = torch.empty(size, length, dtype=torch.uint8, device=source.device)
        self._received = torch.empty_like(self._sent)
        self._sent[:, -self._call.header.numel() :] = self._call.header
        for others in (slice(0, rank), slice(rank + 1, size)):
            blocks.quantise(self._sums[others], self._sent[others], keep_errors=self._residual is not None)
        self._work = dist.all_to_all_single(self._received, self._sent, group=group, async_op=True)

    def _padded(self, source: torch.Tensor) -> torch.Tensor:
        """Return the values as float32, a shard in each row: the same memory if it is enough."""
        if source.dtype is not torch.float32 or source.numel() != self._count:
            padded = source.new_zeros(self._count, dtype=torch.float32)
            padded[: source.numel()] = source
            source = padded
        return source.view(self._call.size, -1)

    def combine(self, group: Any) -> None:
        """Sum this rank's shard and start to gather all of them.

        Raises:
            MismatchError: Another rank passed another number of elements, another dtype, or another `average`.
        """
        self._work.wait()
        rank, header = self._call.rank, self._call.header
        if bool((self._received[:, -header.numel() :] != header).any()):
            raise MismatchError(
                f"rank {rank}: another rank called this all-reduce of {self._values.dtype} with another number of "
                "elements, another dtype, or another `average`. Call it alike on all ranks of the group"
            )
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
        """Write the result over the values."""
        self._work.wait()
        target = self._values
        if target.dtype is not torch.float32 or target.numel() != self._count:
            target = target.new_empty(self._count, dtype=torch.float32)
        blocks.read(self._sent, target.view(self._call.size, -1))
        if target is not self._values:
            self._values.copy_(target[: self._values.numel()])
        del self._sent, self._received, self._sums, self._work


def divide(call: Call, flat: torch.Tensor, residual: torch.Tensor | None) -> list[Piece]:
    """Return the pieces of a tensor: at least one, so that all ranks compare its size."""
    step = max(1, PIECE // (call.size * BLOCK)) * call.size * BLOCK
    parts = [slice(start, start + step) for start in range(0, max(1, flat.numel()), step)]
    return [Piece(call, flat[part], None if residual is None else residual[part]) for part in parts]
