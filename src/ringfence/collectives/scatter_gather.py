"""Scatter and gather along a binomial tree: O(log P) links, and the parts of a subtree travel as one message.

The relative ranks of a subtree are consecutive, so its parts are adjacent in scratch, in that order. All parts have the
same length: an inner worker knows only the length of its own part.
"""

from __future__ import annotations

from ringfence.collectives.builder import INPUT, OUTPUT, Builder, scratch, slice_of
from ringfence.collectives.schedule import Buffer, Place
from ringfence.collectives.tree import binomial_children, binomial_parent, subtree_size


def gather(builder: Builder) -> None:
    """The root's OUTPUT part r becomes rank r's INPUT."""
    relative_rank, children = builder.relative_rank, binomial_children(builder.relative_rank, builder.size)
    if relative_rank == 0:
        builder.copy(slice_of(Buffer.OUTPUT, builder.rank), INPUT)
        for child in children:
            block = _subtree_place(builder, child, slice_of(Buffer.OUTPUT, builder.rank_at(child)), INPUT)
            builder.receive(block, builder.rank_at(child), 0)
            for offset, place in _single_parts(block):
                builder.copy(slice_of(Buffer.OUTPUT, builder.rank_at(child + offset)), place)
        return
    block = _subtree_place(builder, relative_rank, INPUT, INPUT)
    if children:
        builder.copy(scratch(block.part), INPUT)
    for child in children:
        builder.receive(
            scratch(block.part + child - relative_rank, subtree_size(child, builder.size)), builder.rank_at(child), 0
        )
    builder.send(block, builder.rank_at(binomial_parent(relative_rank)), 0)


def scatter(builder: Builder) -> None:
    """OUTPUT becomes this rank's part of the root's INPUT; the largest subtree is sent to first."""
    relative_rank, children = builder.relative_rank, binomial_children(builder.relative_rank, builder.size)
    if relative_rank == 0:
        for child in reversed(children):
            single = slice_of(Buffer.INPUT, builder.rank_at(child))
            block = _subtree_place(builder, child, single, single)
            for offset, place in _single_parts(block):
                builder.copy(place, slice_of(Buffer.INPUT, builder.rank_at(child + offset)))
            builder.send(block, builder.rank_at(child), 0)
        builder.copy(OUTPUT, slice_of(Buffer.INPUT, builder.rank))
        return
    block = _subtree_place(builder, relative_rank, OUTPUT, OUTPUT)
    builder.receive(block, builder.rank_at(binomial_parent(relative_rank)), 0)
    for child in reversed(children):
        builder.send(
            scratch(block.part + child - relative_rank, subtree_size(child, builder.size)), builder.rank_at(child), 0
        )
    if children:
        builder.copy(OUTPUT, scratch(block.part))


def _subtree_place(builder: Builder, relative_rank: int, single: Place, like: Place) -> Place:
    """The place of a subtree's parts: `single` if there is only one, otherwise new parts in scratch."""
    count = subtree_size(relative_rank, builder.size)
    return single if count == 1 else scratch(builder.scratch([like] * count), count)


def _single_parts(block: Place) -> list[tuple[int, Place]]:
    """The parts of a block in scratch, with their offsets."""
    return [(i, scratch(block.part + i)) for i in range(block.parts)] if block.buffer == Buffer.SCRATCH else []
