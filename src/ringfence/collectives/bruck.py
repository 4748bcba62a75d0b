"""Bruck's algorithm: an all-to-all of O(log P) large messages instead of P small ones, in groups of any size.

Block i belongs to rank + i. Each round moves blocks by a power of two. In return every block is copied into or out of
scratch, where the blocks of one message are adjacent.
"""

from __future__ import annotations

from ringfence.collectives.builder import INPUT, Builder, rounds, scratch, slice_of
from ringfence.collectives.schedule import Buffer, Place


def all_to_all(builder: Builder) -> None:
    """OUTPUT part r becomes rank r's INPUT part of this rank; all parts are equally long.

    Block i travels i ranks: it moves in the round of each bit that is set in i. With the highest bit first, the blocks
    of a later round are mostly adjacent in what earlier rounds received, so fewer copies are needed.
    """
    rank, size = builder.rank, builder.size
    places = [slice_of(Buffer.INPUT, (rank + i) % size) for i in range(size)]
    for turn in reversed(range(rounds(size))):
        distance = 1 << turn
        moving = [i for i in range(size) if i & distance]
        leaving, arriving = (builder.scratch([INPUT] * len(moving)) for _ in range(2))
        position = leaving
        for place in _merge([places[i] for i in moving]):
            builder.copy(scratch(position, place.parts), place)
            position += place.parts
        builder.send(scratch(leaving, len(moving)), (rank + distance) % size, turn)
        builder.receive(scratch(arriving, len(moving)), (rank - distance) % size, turn)
        for position, i in enumerate(moving, arriving):
            places[i] = scratch(position)
    for i, place in enumerate(places):
        builder.copy(slice_of(Buffer.OUTPUT, (rank - i) % size), place)


def _merge(places: list[Place]) -> list[Place]:
    """The same places in the same order, with adjacent places in scratch merged."""
    merged = [places[0]]
    for place in places[1:]:
        buffer, part, parts = merged[-1]
        if buffer == place.buffer == Buffer.SCRATCH and place.part == part + parts:
            merged[-1] = Place(buffer, part, parts + 1)
        else:
            merged.append(place)
    return merged
