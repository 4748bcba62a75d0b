"""Two levels: inside a machine, whose workers share memory, and between machines, where every byte is sealed.

What one worker sends to the others of its machine, they read from one copy. Between machines, each worker exchanges its share
with the workers in the same position on other machines, its column: a machine sends the fewest possible bytes, and all of its
workers seal. Segments pass through all levels one after the other. On one machine, there is only the inner level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from ringfence.collectives import halving
from ringfence.collectives.builder import DATA, INPUT, OUTPUT, Builder, scratch, slice_of
from ringfence.collectives.halving import Row
from ringfence.collectives.ring import Ring, gather, reduce_away, reduce_own
from ringfence.collectives.schedule import Buffer, Place
from ringfence.collectives.tree import reduce_up
from ringfence.machines import Machines

_T = TypeVar("_T")


class _Grid(NamedTuple):
    """Machines with the same number of workers each."""

    machines: Machines
    near: Ring  # the workers of this machine
    far: Ring  # those of this worker's column; its position is the machine

    def rank(self, position: int, machine: int) -> int:
        return self.machines[machine][position]

    def leaving_order(self) -> list[int]:
        """All machines, in the order in which slices of theirs are sent on in a ring; this one is the last."""
        return [self.far.back(turn) for turn in range(1, len(self.far.ranks) + 1)]

    def arriving_order(self) -> list[int]:
        """All machines, in the order in which what they have arrives in a ring; this one is the first."""
        return [self.far.back(turn) for turn in range(len(self.far.ranks))]


def _grid(builder: Builder) -> _Grid:
    machines = builder.on_machines()
    here = next(workers for workers in machines if builder.rank in workers)
    position = here.index(builder.rank)
    return _Grid(machines, Ring(here, position), Ring.of(builder, [workers[position] for workers in machines]))


def all_reduce(builder: Builder) -> None:
    """DATA, in as many parts as there are workers, becomes the reduction of all."""
    grid = _grid(builder)
    near, far, count = grid.near, grid.far, len(grid.far.ranks)
    slices = [
        [slice_of(Buffer.DATA, owner * count + machine) for machine in range(count)] for owner in range(len(near.ranks))
    ]
    mine = slices[near.position]
    reduce_own(builder, near, [[row[machine] for machine in grid.leaving_order()] for row in slices])
    reduce_own(builder, far, [[place] for place in mine])
    builder.divide(mine[far.position])
    gather(builder, far, mine[far.position], mine, builder.size)
    for machine in grid.arriving_order():
        _exchange(builder, near, mine[machine], [row[machine] for row in slices], builder.size)


def reduce_scatter(builder: Builder) -> None:
    """OUTPUT becomes the reduction of every worker's INPUT part of this rank; INPUT is unchanged."""
    grid = _grid(builder)
    near, far, order = grid.near, grid.far, grid.leaving_order()
    if builder.size == 1:
        builder.copy(OUTPUT, INPUT)
        return
    owners = [[grid.rank(position, machine) for machine in order] for position in range(len(near.ranks))]
    sums = [slice_of(Buffer.INPUT, rank) for rank in owners[near.position]]
    if len(near.ranks) > 1:
        inputs = [[slice_of(Buffer.INPUT, rank) for rank in row] for row in owners]
        first = builder.scratch(sums) if len(order) > 1 else 0
        sums = [scratch(first + index) for index in range(len(order))] if len(order) > 1 else [OUTPUT]
        reduce_away(builder, near, inputs, owners, sums)
    if len(order) > 1:
        by_machine = dict(zip(order, sums, strict=True))
        held = [[by_machine[machine]] for machine in range(len(order))]
        reduce_away(builder, far, held, [[rank] for rank in far.ranks], [OUTPUT])
    builder.divide(OUTPUT)


def all_gather(builder: Builder) -> None:
    """OUTPUT part r becomes rank r's INPUT. Parts may differ in length."""
    grid = _grid(builder)
    gather(builder, grid.far, INPUT, [slice_of(Buffer.OUTPUT, rank) for rank in grid.far.ranks], 0)
    for machine in grid.arriving_order():
        places = [slice_of(Buffer.OUTPUT, rank) for rank in grid.machines[machine]]
        mine = INPUT if machine == grid.far.position else places[grid.near.position]
        _exchange(builder, grid.near, mine, places, 0)
    builder.copy(slice_of(Buffer.OUTPUT, builder.rank), INPUT)


def _exchange(builder: Builder, near: Ring, mine: Place, places: list[Place], label: int) -> None:
    """Send `mine` to the others of this machine, and receive theirs, each worker from another one first."""
    for turn in range(1, len(near.ranks)):
        to, source = near.back(-turn), near.back(turn)
        builder.send(mine, near.ranks[to], label + places[near.position].part)
        builder.receive(places[source], near.ranks[source], label + places[source].part)


# -- many machines: halving and doubling between them, and one chunk for each worker inside --------------------------


def _rows(grid: _Grid, buffer: Buffer, first: int = 0) -> list[Place]:
    """The parts of each worker of this machine: one for each machine, adjacent."""
    count = len(grid.far.ranks)
    return [Place(buffer, first + position * count, count) for position in range(len(grid.near.ranks))]


def _in_rows(grid: _Grid) -> list[int]:
    """All ranks: those in one position of their machines are next to each other."""
    count = len(grid.far.ranks)
    return [grid.rank(position, machine) for position in range(len(grid.near.ranks)) for machine in range(count)]


def _reduce_rows(builder: Builder, grid: _Grid, buffer: Buffer, first: int, result: Place | None) -> Row:
    """Reduce inside machines and then between them: `result`, or this worker's part of its row, becomes the reduction."""
    rows = _rows(grid, buffer, first)
    reduce_own(builder, grid.near, [[row] for row in rows])
    mine = Row(buffer, len(grid.far.ranks), rows[grid.near.position].part)
    result = result or Place(buffer, mine.first + grid.far.position)
    if len(grid.far.ranks) == 1 and result.buffer != buffer:
        builder.copy(result, rows[grid.near.position])
    halving.reduce(builder, grid.far, mine, mine, result)
    builder.divide(result)
    return mine


def _gather_rows(builder: Builder, grid: _Grid, mine: Row) -> None:
    halving.gather(builder, grid.far, mine)
    rows = _rows(grid, mine.buffer, mine.first - grid.near.position * mine.size)
    _exchange(builder, grid.near, rows[grid.near.position], rows, builder.size)


def all_reduce_halving(builder: Builder) -> None:
    """DATA, in as many parts as there are workers, becomes the reduction of all."""
    grid = _grid(builder)
    _gather_rows(builder, grid, _reduce_rows(builder, grid, Buffer.DATA, 0, None))


def reduce_scatter_halving(builder: Builder) -> None:
    """OUTPUT becomes the reduction of every worker's INPUT part of this rank; INPUT is unchanged."""
    grid = _grid(builder)
    first = builder.scratch(slice_of(Buffer.INPUT, rank) for rank in _in_rows(grid))
    for index, rank in enumerate(_in_rows(grid)):
        builder.copy(scratch(first + index), slice_of(Buffer.INPUT, rank))
    _reduce_rows(builder, grid, Buffer.SCRATCH, first, OUTPUT)


def all_gather_doubling(builder: Builder) -> None:
    """OUTPUT part r becomes rank r's INPUT."""
    grid = _grid(builder)
    count = len(grid.far.ranks)
    first = builder.scratch(slice_of(Buffer.OUTPUT, rank) for rank in _in_rows(grid))
    mine = Row(Buffer.SCRATCH, count, first + grid.near.position * count)
    builder.copy(scratch(mine.first + grid.far.position), INPUT)
    _gather_rows(builder, grid, mine)
    for index, rank in enumerate(_in_rows(grid)):
        builder.copy(slice_of(Buffer.OUTPUT, rank), scratch(first + index))


# -- all to all: a worker has links to its machine and to its column only --------------------------------------------


def all_to_all(builder: Builder) -> None:
    """OUTPUT part r becomes rank r's INPUT part of this rank; all parts are equally long.

    What is for another machine goes first to the worker here that is in the position of its destination, in one message with
    what is for that worker itself. It sends to each machine of its column, in one message, what all here have for it.
    """
    grid = _grid(builder)
    near, far, workers, machines = grid.near, grid.far, len(grid.near.ranks), len(grid.far.ranks)
    bundles = [builder.scratch([INPUT] * workers) for _ in range(machines)]  # for each machine: from all workers here
    columns = [[scratch(bundle + position) for bundle in bundles] for position in range(workers)]
    for turn in range(workers):
        to, source = near.back(-turn), near.back(turn)
        leaving = [slice_of(Buffer.INPUT, grid.rank(to, machine)) for machine in range(machines)]
        if turn:
            sent, came = (builder.scratch([INPUT] * machines) for _ in range(2))
            _copy(builder, [scratch(sent + machine) for machine in range(machines)], leaving)
            builder.send(scratch(sent, machines), near.ranks[to], 0)
            builder.receive(scratch(came, machines), near.ranks[source], 0)
            leaving = [scratch(came + machine) for machine in range(machines)]
        _copy(builder, columns[source], leaving)
    for turn in range(machines):
        to, source = far.back(-turn), far.back(turn)
        came = bundles[source]
        if turn:
            came = builder.scratch([INPUT] * workers)
            builder.send(scratch(bundles[to], workers), far.ranks[to], 1)
            builder.receive(scratch(came, workers), far.ranks[source], 1)
        outputs = [slice_of(Buffer.OUTPUT, rank) for rank in grid.machines[source]]
        _copy(builder, outputs, [scratch(came + position) for position in range(workers)])


def _copy(builder: Builder, targets: list[Place], sources: list[Place]) -> None:
    for target, source in zip(targets, sources, strict=True):
        builder.copy(target, source)


# -- with a root: one worker of each machine, its leader, passes everything on from machine to machine -----------------


class _Chain(NamedTuple):
    """Leaders in a chain that begins at the root, and the workers of this machine in another that begins at its leader."""

    near: list[int]
    leaders: list[int]

    @classmethod
    def of(cls, builder: Builder) -> _Chain:
        machines = builder.on_machines()
        home = next(index for index, workers in enumerate(machines) if builder.root in workers)
        place = machines[home].index(builder.root)
        chain = [_from(workers, place % len(workers)) for workers in _from(machines, home)]
        return cls(next(workers for workers in chain if builder.rank in workers), [workers[0] for workers in chain])


def _from(items: Sequence[_T], first: int) -> list[_T]:
    return [*items[first:], *items[:first]]


def broadcast(builder: Builder) -> None:
    """DATA becomes the root's."""
    near, leaders = _Chain.of(builder)
    if builder.rank != near[0]:
        builder.receive(DATA, near[0], 0)
        return
    machine, origin = leaders.index(builder.rank), builder.forwarded(builder.root, len(leaders))
    if machine:
        builder.receive(DATA, leaders[machine - 1], 0, origin)
    if machine + 1 < len(leaders):
        builder.send(DATA, leaders[machine + 1], 0, origin)
    for rank in near[1:]:
        builder.send(DATA, rank, 0)


def reduce(builder: Builder) -> None:
    """The root's OUTPUT becomes the reduction of every INPUT; INPUT is unchanged."""
    near, leaders = _Chain.of(builder)
    position = near.index(builder.rank)
    parent, children = near[position - 1], near[position + 1 : position + 2]
    if not position:
        machine = leaders.index(builder.rank)
        parent, children = leaders[machine - 1], children + leaders[machine + 1 : machine + 2]
    reduce_up(builder, parent, children)
