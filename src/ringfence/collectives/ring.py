"""Ring algorithms: every worker uses two neighbours, moves the fewest possible bytes, and takes O(P) steps.

Slice s starts at rank s + 1 and is reduced at every rank until it reaches its owner, rank s. From there it goes round
once more: sealed once by its owner and forwarded unchanged. Every sum is computed once, along one path, so all ranks
get the same bits.
"""

from __future__ import annotations

from ringfence.collectives.builder import INPUT, OUTPUT, Builder, scratch, slice_of
from ringfence.collectives.schedule import Buffer


def all_reduce(builder: Builder) -> None:
    """DATA, in as many parts as there are workers, becomes the reduction of all."""
    rank, size = builder.rank, builder.size
    following, preceding = (rank + 1) % size, (rank - 1) % size
    for turn in range(size - 1):
        leaving, arriving = (rank - 1 - turn) % size, (rank - 2 - turn) % size
        builder.send(slice_of(Buffer.DATA, leaving), following, leaving)
        arrived = slice_of(Buffer.DATA, arriving)
        builder.reduce(arrived, preceding, arriving, arrived)
    builder.divide(slice_of(Buffer.DATA, rank))
    for turn in range(size - 1):
        leaving, arriving = (rank - turn) % size, (rank - 1 - turn) % size
        builder.send(slice_of(Buffer.DATA, leaving), following, size + leaving, builder.forwarded(leaving))
        builder.receive(slice_of(Buffer.DATA, arriving), preceding, size + arriving, builder.forwarded(arriving))


def reduce_scatter(builder: Builder) -> None:
    """OUTPUT becomes the reduction of every worker's INPUT part of this rank; INPUT is unchanged."""
    rank, size = builder.rank, builder.size
    if size == 1:
        builder.copy(OUTPUT, INPUT)
        return
    following, preceding = (rank + 1) % size, (rank - 1) % size
    leaving = (rank - 1) % size
    builder.send(slice_of(Buffer.INPUT, leaving), following, leaving)
    held: list[int] = []
    for turn in range(size - 2):
        passing = (rank - 2 - turn) % size
        mine = slice_of(Buffer.INPUT, passing)
        # Two scratch slices are enough for all rounds, unless slices differ in length: then each has its own.
        if not builder.even or turn < 2:
            held.append(builder.scratch([mine]))
        sums = scratch(held[-1] if not builder.even else held[turn % 2])
        builder.reduce(sums, preceding, passing, mine)
        builder.send(sums, following, passing)
    builder.reduce(OUTPUT, preceding, rank, slice_of(Buffer.INPUT, rank))
    builder.divide(OUTPUT)


def all_gather(builder: Builder) -> None:
    """OUTPUT part r becomes rank r's INPUT. Parts may differ in length."""
    rank, size = builder.rank, builder.size
    following, preceding = (rank + 1) % size, (rank - 1) % size
    for turn in range(size - 1):
        leaving, arriving = (rank - turn) % size, (rank - 1 - turn) % size
        source = INPUT if leaving == rank else slice_of(Buffer.OUTPUT, leaving)
        builder.send(source, following, leaving, builder.forwarded(leaving))
        builder.receive(slice_of(Buffer.OUTPUT, arriving), preceding, arriving, builder.forwarded(arriving))
    builder.copy(slice_of(Buffer.OUTPUT, rank), INPUT)
