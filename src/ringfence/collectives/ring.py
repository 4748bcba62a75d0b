"""Ring algorithms: every worker uses two neighbours, moves the fewest possible bytes, and takes O(P) steps.

Slice s starts at the owner's successor and is reduced at every worker until it reaches its owner. From there it goes round
once more: sealed once by its owner and forwarded unchanged. Every sum is computed once, along one path, so all ranks
get the same bits. Workers of one machine are next to each other in the ring, so that few hops leave a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringfence.collectives.builder import INPUT, OUTPUT, Builder, scratch, slice_of
from ringfence.collectives.schedule import Buffer, Place


class Ring(NamedTuple):
    """Workers in a circle, and the position of this one."""

    ranks: Sequence[int]
    position: int

    @classmethod
    def of(cls, builder: Builder, ranks: Sequence[int]) -> Ring:
        return cls(ranks, ranks.index(builder.rank))

    def back(self, steps: int) -> int:
        """The position so many steps before this one."""
        return (self.position - steps) % len(self.ranks)

    @property
    def following(self) -> int:
        return self.ranks[self.back(-1)]

    @property
    def preceding(self) -> int:
        return self.ranks[self.back(1)]


def all_reduce(builder: Builder) -> None:
    """DATA, in as many parts as there are workers, becomes the reduction of all."""
    ring = Ring.of(builder, builder.by_machine())
    slices = [slice_of(Buffer.DATA, rank) for rank in ring.ranks]
    reduce_own(builder, ring, [[each] for each in slices])
    builder.divide(slices[ring.position])
    gather(builder, ring, slices[ring.position], slices, builder.size)


def reduce_scatter(builder: Builder) -> None:
    """OUTPUT becomes the reduction of every worker's INPUT part of this rank; INPUT is unchanged."""
    ring = Ring.of(builder, builder.by_machine())
    if builder.size == 1:
        builder.copy(OUTPUT, INPUT)
        return
    reduce_away(
        builder,
        ring,
        [[slice_of(Buffer.INPUT, rank)] for rank in ring.ranks],
        [[rank] for rank in ring.ranks],
        [OUTPUT],
    )
    builder.divide(OUTPUT)


def all_gather(builder: Builder) -> None:
    """OUTPUT part r becomes rank r's INPUT. Parts may differ in length."""
    ring = Ring.of(builder, builder.by_machine())
    gather(builder, ring, INPUT, [slice_of(Buffer.OUTPUT, rank) for rank in ring.ranks], 0)
    builder.copy(slice_of(Buffer.OUTPUT, builder.rank), INPUT)


def reduce_own(builder: Builder, ring: Ring, owned: Sequence[Sequence[Place]]) -> None:
    """The places at this worker's position become the reduction of all; the others hold sums that are not needed any more."""
    for turn in range(1, len(ring.ranks)):
        for leaving, arriving in zip(owned[ring.back(turn)], owned[ring.back(turn + 1)], strict=True):
            builder.send(leaving, ring.following, leaving.part)
            builder.reduce(arriving, ring.preceding, arriving.part, arriving)


def reduce_away(
    builder: Builder,
    ring: Ring,
    owned: Sequence[Sequence[Place]],
    labels: Sequence[Sequence[int]],
    results: Sequence[Place],
) -> None:
    """`results` become the reductions of the places at this worker's position; no place is changed."""
    leaving, held = owned[ring.back(1)], list[list[Place]]()
    for turn in range(1, len(ring.ranks)):
        for place, label in zip(leaving, labels[ring.back(turn)], strict=True):
            builder.send(place, ring.following, label)
        mine = owned[ring.back(turn + 1)]
        if turn + 1 == len(ring.ranks):
            sums = results
        elif builder.even and turn > 2:  # two sets are enough for all turns, unless parts differ in length
            sums = held[(turn - 1) % 2]
        else:
            first = builder.scratch(builder.length_of(place) for place in mine)
            sums = [scratch(first + index) for index in range(len(mine))]
            held.append(list(sums))
        for place, other, label in zip(sums, mine, labels[ring.back(turn + 1)], strict=True):
            builder.reduce(place, ring.preceding, label, other)
        leaving = sums


def gather(builder: Builder, ring: Ring, mine: Place, places: Sequence[Place], label: int) -> None:
    """The place at each position but this worker's becomes what `mine` is there. Labels are the ranks, from `label` on."""
    for turn in range(len(ring.ranks) - 1):
        leaving, arriving = ring.back(turn), ring.back(turn + 1)
        sent, received = ring.ranks[leaving], ring.ranks[arriving]
        place = places[leaving] if turn else mine
        builder.send(place, ring.following, label + sent, builder.forwarded(sent, len(ring.ranks)))
        builder.receive(
            places[arriving], ring.preceding, label + received, builder.forwarded(received, len(ring.ranks))
        )
