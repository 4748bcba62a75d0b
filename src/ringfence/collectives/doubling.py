"""Recursive doubling: small collectives over all ranks in O(log P) rounds."""

from __future__ import annotations

from ringfence.collectives.builder import DATA, Builder, rounds, scratch
from ringfence.collectives.schedule import Buffer, Place


def all_reduce(builder: Builder) -> None:
    """DATA becomes the reduction of all. In each round two blocks of neighbouring ranks exchange their sums.

    The block of lower ranks is the left operand on both sides, so both get the same bits. If the group's
    size is not a power of two, the odd ones among the first ranks send their data to the rank before and receive the
    result from it.
    """
    rank, size = builder.rank, builder.size
    blocks = 1 << (size.bit_length() - 1)
    folded = size - blocks
    if rank < 2 * folded and rank % 2 == 1:
        builder.send(DATA, rank - 1, 0)
        builder.receive(DATA, rank - 1, 1)
        return
    if rank < 2 * folded:
        builder.reduce(DATA, rank + 1, 0, DATA, received_first=False)
    block = rank // 2 if rank < 2 * folded else rank - folded
    for turn in range(rounds(blocks)):
        other = block ^ (1 << turn)
        peer = 2 * other if other < folded else other + folded
        builder.send(DATA, peer, 0)
        builder.reduce(DATA, peer, 0, DATA, received_first=other < block)
    builder.divide(DATA)
    if rank < 2 * folded:
        builder.send(DATA, rank + 1, 1)


def barrier(builder: Builder) -> None:
    """No rank ends before all have begun. The distance of the empty messages doubles in each round (dissemination barrier)."""
    empty = Place(Buffer.DATA, 0, 0)  # no parts: a scratch part of this length has no elements
    token = scratch(builder.scratch([empty]))
    for turn in range(rounds(builder.size)):
        distance = 1 << turn
        builder.send(token, (builder.rank + distance) % builder.size, turn)
        builder.receive(token, (builder.rank - distance) % builder.size, turn)
