"""Halving and doubling: the fewest possible bytes in ceil(log2 P) rounds, in groups of any size.

Block i of a worker is the part of the worker i places after it in a circle. To reduce, each round sends the farther half of the
blocks that are left to the worker whose first block they begin with, and adds what arrives to the nearer half; block 0 is
left. To gather, each round sends the parts that a worker has, and doubles them. Every worker sends to the same ones in both.

Small parts travel together: one message a round, or two where the circle closes. Large parts are messages of their own: then
segments of one round pass through the next, and in gathering each is sealed once by its owner and forwarded unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from ringfence.collectives.builder import HOP, INPUT, OUTPUT, Builder, rounds, scratch, slice_of
from ringfence.collectives.ring import Ring
from ringfence.collectives.schedule import Buffer, Place


class Row(NamedTuple):
    """A part for each worker of a circle, adjacent from part `first` on, which is that of position `start`."""

    buffer: Buffer
    size: int
    first: int = 0
    start: int = 0
    apart: bool = False  # every part is a message of its own

    def pieces(self, position: int, count: int) -> list[tuple[int, Place]]:
        """The places of so many parts from a position on, each with its number among the messages of a round."""
        first = position % self.size
        if self.apart:
            return [(each % self.size, self._place(each % self.size, 1)) for each in range(first, first + count)]
        head = min(count, self.size - first)
        pieces = [(0, self._place(first, head))]
        return [*pieces, (1, self._place(0, count - head))] if head < count else pieces

    def _place(self, position: int, parts: int) -> Place:
        return Place(self.buffer, self.first + (position - self.start) % self.size, parts)


class Round(NamedTuple):
    """One exchange: with the workers so many positions after and before this one."""

    distance: int
    parts: int  # that move
    to: int
    source: int
    label: int


def _rounds(ring: Ring, row: Row) -> Iterator[Round]:
    """The rounds of gathering; those of reducing are the same, in reverse."""
    size = len(ring.ranks)
    for turn in range(rounds(size)):
        distance = 1 << turn
        count = min(distance, size - distance)
        to, source = ring.ranks[ring.back(-distance)], ring.ranks[ring.back(distance)]
        yield Round(distance, count, to, source, 0 if row.apart else 2 * turn)


def _labels(row: Row) -> int:
    """How many labels the messages of one half have: those of the other follow them."""
    return row.size if row.apart else 2 * rounds(row.size)


def reduce(builder: Builder, ring: Ring, held: Row, sums: Row, result: Place) -> None:
    """`result` becomes the reduction of this worker's part; `held` is not changed if `sums` are elsewhere."""
    for distance, count, to, source, label in reversed(list(_rounds(ring, held))):
        for number, place in held.pieces(ring.position + distance, count):
            builder.send(place, to, label + number)
        targets = [(0, result)] if distance == 1 else sums.pieces(ring.position, count)
        for (number, other), (_, target) in zip(held.pieces(ring.position, count), targets, strict=True):
            builder.reduce(target, source, label + number, other)
        held = sums


def gather(builder: Builder, ring: Ring, row: Row) -> None:
    """Every part becomes what it is at the worker in its position."""
    base = _labels(row)
    for distance, count, to, source, label in _rounds(ring, row):
        for number, place in row.pieces(ring.position - count + 1, count):
            builder.send(place, to, base + label + number, _origin(builder, ring, row, number))
        for number, place in row.pieces(ring.position - distance - count + 1, count):
            builder.receive(place, source, base + label + number, _origin(builder, ring, row, number))


def _origin(builder: Builder, ring: Ring, row: Row, number: int) -> int:
    return builder.forwarded(ring.ranks[number], row.size) if row.apart else HOP


# -- one level: every worker is in one circle, in the order of the ranks ----------------------------------------------


def _circle(builder: Builder) -> Ring:
    return Ring(range(builder.size), builder.rank)


def all_reduce(builder: Builder, apart: bool = False) -> None:
    """DATA, in as many parts as there are workers, becomes the reduction of all."""
    ring, row = _circle(builder), Row(Buffer.DATA, builder.size, apart=apart)
    mine = slice_of(Buffer.DATA, builder.rank)
    reduce(builder, ring, row, row, mine)
    builder.divide(mine)
    gather(builder, ring, row)


def reduce_scatter(builder: Builder, apart: bool = False) -> None:
    """OUTPUT becomes the reduction of every worker's INPUT part of this rank; INPUT is unchanged."""
    size, rank, ring = builder.size, builder.rank, _circle(builder)
    if size == 1:
        builder.copy(OUTPUT, INPUT)
        return
    nearer = 1 << (rounds(size) - 1)  # blocks that are left after the first round
    kept = nearer if apart or builder.adjacent else size
    first = builder.scratch(slice_of(Buffer.INPUT, (rank + i) % size) for i in range(kept))
    held, sums = Row(Buffer.INPUT, size, apart=apart), Row(Buffer.SCRATCH, size, first, rank, apart)
    if kept == size:  # messages are of several parts, which are not adjacent
        for i in range(size):
            builder.copy(scratch(first + i), slice_of(Buffer.INPUT, (rank + i) % size))
        held = sums
    elif (added := size - nearer) < nearer:  # the other blocks are not added to in the first round
        pairs = zip(sums.pieces(rank + added, nearer - added), held.pieces(rank + added, nearer - added), strict=True)
        for (_, target), (_, source) in pairs:
            builder.copy(target, source)
    reduce(builder, ring, held, sums, OUTPUT)
    builder.divide(OUTPUT)


def all_gather(builder: Builder, apart: bool = False) -> None:
    """OUTPUT part r becomes rank r's INPUT. Parts may differ in length."""
    size, ring = builder.size, _circle(builder)
    outputs = [slice_of(Buffer.OUTPUT, rank) for rank in range(size)]
    if apart or builder.adjacent:
        builder.copy(outputs[builder.rank], INPUT)
        gather(builder, ring, Row(Buffer.OUTPUT, size, apart=apart))
        return
    first = builder.scratch(outputs)
    builder.copy(scratch(first + builder.rank), INPUT)
    gather(builder, ring, Row(Buffer.SCRATCH, size, first))
    for rank, output in enumerate(outputs):
        builder.copy(output, scratch(first + rank))


all_reduce_apart = partial(all_reduce, apart=True)
reduce_scatter_apart = partial(reduce_scatter, apart=True)
all_gather_apart = partial(all_gather, apart=True)
