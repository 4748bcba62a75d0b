"""Parts to and from one root along a binomial tree: O(log P) links, and a subtree's parts travel as one message.

The seats of a subtree are consecutive, so its parts lie side by side in scratch in the order of their seats. All parts
are equally long: a worker on the way knows the length of its own part only.
"""

from __future__ import annotations

from ringfence.collectives.builder import INPUT, OUTPUT, Builder, scratch, slice_of
from ringfence.collectives.schedule import Buffer, Place
from ringfence.collectives.tree import binomial_children, binomial_parent, subtree


def gather(builder: Builder) -> None:
    """The root's OUTPUT part r becomes rank r's INPUT."""
    seat, children = builder.seat, binomial_children(builder.seat, builder.size)
    if seat == 0:
        builder.copy(slice_of(Buffer.OUTPUT, builder.rank), INPUT)
        for child in children:
            room = _room(builder, child, slice_of(Buffer.OUTPUT, builder.seated(child)), INPUT)
            builder.receive(room, builder.seated(child), 0)
            for offset, place in _apart(room):
                builder.copy(slice_of(Buffer.OUTPUT, builder.seated(child + offset)), place)
        return
    room = _room(builder, seat, INPUT, INPUT)
    if children:
        builder.copy(scratch(room.part), INPUT)
    for child in children:
        builder.receive(scratch(room.part + child - seat, subtree(child, builder.size)), builder.seated(child), 0)
    builder.send(room, builder.seated(binomial_parent(seat)), 0)


def scatter(builder: Builder) -> None:
    """OUTPUT becomes this rank's part of the root's INPUT; the largest subtree is served first."""
    seat, children = builder.seat, binomial_children(builder.seat, builder.size)
    if seat == 0:
        for child in reversed(children):
            alone = slice_of(Buffer.INPUT, builder.seated(child))
            room = _room(builder, child, alone, alone)
            for offset, place in _apart(room):
                builder.copy(place, slice_of(Buffer.INPUT, builder.seated(child + offset)))
            builder.send(room, builder.seated(child), 0)
        builder.copy(OUTPUT, slice_of(Buffer.INPUT, builder.rank))
        return
    room = _room(builder, seat, OUTPUT, OUTPUT)
    builder.receive(room, builder.seated(binomial_parent(seat)), 0)
    for child in reversed(children):
        builder.send(scratch(room.part + child - seat, subtree(child, builder.size)), builder.seated(child), 0)
    if children:
        builder.copy(OUTPUT, scratch(room.part))


def _room(builder: Builder, seat: int, alone: Place, like: Place) -> Place:
    """Where the parts of the subtree at `seat` lie: in scratch, unless there is only one."""
    count = subtree(seat, builder.size)
    return alone if count == 1 else scratch(builder.scratch([like] * count), count)


def _apart(room: Place) -> list[tuple[int, Place]]:
    """The single parts of a room in scratch, with their offsets."""
    return [(i, scratch(room.part + i)) for i in range(room.parts)] if room.buffer == Buffer.SCRATCH else []
