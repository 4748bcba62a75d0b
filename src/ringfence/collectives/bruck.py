"""Bruck's algorithms: blocks travel in O(log P) large messages instead of P small ones, in groups of any size.

Scratch part i stands for rank + i. Each round moves a run of blocks by a power of two; the price is that every block
is copied into and out of scratch.
"""

from __future__ import annotations

from ringfence.collectives.draft import INPUT, Draft, rounds, scratch, slice_of
from ringfence.collectives.schedule import Buffer


def all_gather(draft: Draft) -> None:
    """OUTPUT part r becomes rank r's INPUT: each round doubles the run of blocks that one has from here on."""
    rank, size = draft.rank, draft.size
    blocks = [slice_of(Buffer.OUTPUT, (rank + i) % size) for i in range(size)]
    first = draft.scratch(blocks)
    draft.copy(scratch(first), INPUT)
    for turn in range(rounds(size)):
        distance = 1 << turn
        count = min(distance, size - distance)
        draft.send(scratch(first, count), (rank - distance) % size, turn)
        draft.receive(scratch(first + distance, count), (rank + distance) % size, turn)
    for i, block in enumerate(blocks):
        draft.copy(block, scratch(first + i))
