"""Direct algorithms: every part goes straight to its destination. Fewest bytes, but up to P - 1 links."""

from __future__ import annotations

from ringfence.collectives.builder import INPUT, OUTPUT, Builder, slice_of
from ringfence.collectives.schedule import Buffer


def gather(builder: Builder) -> None:
    """The root's OUTPUT part r becomes rank r's INPUT."""
    if builder.relative_rank:
        builder.send(INPUT, builder.root, 0)
        return
    builder.copy(slice_of(Buffer.OUTPUT, builder.rank), INPUT)
    for relative_rank in range(1, builder.size):
        builder.receive(slice_of(Buffer.OUTPUT, builder.rank_at(relative_rank)), builder.rank_at(relative_rank), 0)


def scatter(builder: Builder) -> None:
    """OUTPUT becomes this rank's part of the root's INPUT."""
    if builder.relative_rank:
        builder.receive(OUTPUT, builder.root, 0)
        return
    for relative_rank in range(1, builder.size):
        builder.send(slice_of(Buffer.INPUT, builder.rank_at(relative_rank)), builder.rank_at(relative_rank), 0)
    builder.copy(OUTPUT, slice_of(Buffer.INPUT, builder.rank))


def all_to_all(builder: Builder) -> None:
    """OUTPUT part r becomes rank r's INPUT part of this rank. Parts may be of any length, on any rank.

    In each round every worker sends to a different worker, so that no worker receives from all at once.
    """
    rank, size = builder.rank, builder.size
    for turn in range(1, size):
        target, source = (rank + turn) % size, (rank - turn) % size
        builder.send(slice_of(Buffer.INPUT, target), target, 0)
        builder.receive(slice_of(Buffer.OUTPUT, source), source, 0)
    builder.copy(slice_of(Buffer.OUTPUT, rank), slice_of(Buffer.INPUT, rank))
