"""Parts to and from one root along a binomial tree: O(log P) links, and a subtree's parts travel as one message.

The seats of a subtree are consecutive, so its parts lie side by side in scratch in the order of their seats. All parts
are equally long: a worker on the way knows the length of its own part only.
"""

from __future__ import annotations

from ringfence.collectives.builder import INPUT, OUTPUT, Draft, scratch, slice_of
from ringfence.collectives.schedule import Buffer, Place
from ringfence.collectives.tree import binomial_children, binomial_parent, subtree


def gather(draft: Draft) -> None:
    """The root's OUTPUT part r becomes rank r's INPUT."""
    seat, children = draft.seat, binomial_children(draft.seat, draft.size)
    if seat == 0:
        draft.copy(slice_of(Buffer.OUTPUT, draft.rank), INPUT)
        for child in children:
            room = _room(draft, child, slice_of(Buffer.OUTPUT, draft.seated(child)), INPUT)
            draft.receive(room, draft.seated(child), 0)
            for offset, place in _apart(room):
                draft.copy(slice_of(Buffer.OUTPUT, draft.seated(child + offset)), place)
        return
    room = _room(draft, seat, INPUT, INPUT)
    if children:
        draft.copy(scratch(room.part), INPUT)
    for child in children:
        draft.receive(scratch(room.part + child - seat, subtree(child, draft.size)), draft.seated(child), 0)
    draft.send(room, draft.seated(binomial_parent(seat)), 0)


def scatter(draft: Draft) -> None:
    """OUTPUT becomes this rank's part of the root's INPUT; the largest subtree is served first."""
    seat, children = draft.seat, binomial_children(draft.seat, draft.size)
    if seat == 0:
        for child in reversed(children):
            alone = slice_of(Buffer.INPUT, draft.seated(child))
            room = _room(draft, child, alone, alone)
            for offset, place in _apart(room):
                draft.copy(place, slice_of(Buffer.INPUT, draft.seated(child + offset)))
            draft.send(room, draft.seated(child), 0)
        draft.copy(OUTPUT, slice_of(Buffer.INPUT, draft.rank))
        return
    room = _room(draft, seat, OUTPUT, OUTPUT)
    draft.receive(room, draft.seated(binomial_parent(seat)), 0)
    for child in reversed(children):
        draft.send(scratch(room.part + child - seat, subtree(child, draft.size)), draft.seated(child), 0)
    if children:
        draft.copy(OUTPUT, scratch(room.part))


def _room(draft: Draft, seat: int, alone: Place, like: Place) -> Place:
    """Where the parts of the subtree at `seat` lie: in scratch, unless there is only one."""
    count = subtree(seat, draft.size)
    return alone if count == 1 else scratch(draft.scratch([like] * count), count)


def _apart(room: Place) -> list[tuple[int, Place]]:
    """The single parts of a room in scratch, with their offsets."""
    return [(i, scratch(room.part + i)) for i in range(room.parts)] if room.buffer == Buffer.SCRATCH else []
