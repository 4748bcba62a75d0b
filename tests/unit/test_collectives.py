"""Every schedule computes its collective, in every order of events that the rules allow."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.collectives import Action, Buffer, Schedule, ScheduleId, build
from ringfence.machines import Machines
from tests.unit.interpreter import Deadlock, Memory, World, WrongMessage, cut

Number = Callable[[Random], int | float]
ROOTED = {i for i in ScheduleId if i.name.startswith(("BROADCAST", "REDUCE_", "GATHER", "SCATTER"))} - {
    *(i for i in ScheduleId if i.name.startswith("REDUCE_SCATTER")),
}
REDUCING = [i for i in ScheduleId if "REDUCE" in i.name]
UNEVEN = (
    ScheduleId.ALL_GATHER_RING,
    ScheduleId.ALL_GATHER_DOUBLING,
    ScheduleId.ALL_GATHER_DOUBLING_APART,
    ScheduleId.REDUCE_SCATTER_RING,
    ScheduleId.REDUCE_SCATTER_HALVING,
    ScheduleId.REDUCE_SCATTER_HALVING_APART,
    ScheduleId.ALL_TO_ALL_DIRECT,
    ScheduleId.ALL_GATHER_TWO_LEVELS,
    ScheduleId.REDUCE_SCATTER_TWO_LEVELS,
)


class Case:
    """One collective over one group: its schedules, inputs and memory."""

    def __init__(
        self,
        identifier: ScheduleId,
        size: int,
        random: Random,
        root: int = 0,
        average: bool = False,
        even: bool = True,
        length: int = 5,
        number: Number | None = None,
        machines: Machines = (),
        adjacent: bool = True,
    ) -> None:
        self.identifier, self.size, self.root, self.average = identifier, size, root, average
        make = build.__wrapped__  # without the cache, which would keep thousands of schedules alive
        self.schedules = [make(identifier, size, rank, root, average, even, machines, adjacent) for rank in range(size)]
        self.number = number or (lambda r: r.randrange(-(10**6), 10**6) * size)
        self.random = random
        self.kind = next(name for name in reversed(_KINDS) if identifier.name.startswith(name))
        lengths = [[length if even else random.randrange(2 * length + 1) for _ in range(size)] for _ in range(size)]
        self.inputs: list[list[list]]  # by rank and part
        self.memories: list[Memory] = []
        self.sums: dict[int, list] = {}
        getattr(self, "_bind_" + self.kind.lower())(lengths, length)

    def run(self, random: Random, segments: int = 3, **functions: Callable) -> World:
        world = World(self.schedules, self.memories, random, segments, **functions)
        world.run()
        return world

    def output(self, rank: int) -> list[list]:
        buffer = Buffer.DATA if self.kind in ("ALL_REDUCE", "BROADCAST", "GROUP_OPENING") else Buffer.OUTPUT
        memory = self.memories[rank]
        return [memory[key] for key in sorted(memory) if key[0] == buffer]

    def check(self) -> None:
        """Check the results, and that the inputs are unchanged."""
        for rank in range(self.size):
            assert self.output(rank) == self._expected(rank), f"{self.identifier.name} of {self.size}, rank {rank}"
        for rank, memory in enumerate(self.memories):
            if self.kind != "REDUCE" or rank != self.root:
                parts = [memory[key] for key in sorted(memory) if key[0] == Buffer.INPUT]
                assert not parts or parts == self.inputs[rank], f"{self.identifier.name}: rank {rank} lost its input"

    def _draw(self, length: int) -> list:
        return [self.number(self.random) for _ in range(length)]

    def _bind_all_reduce(self, lengths: list[list[int]], length: int) -> None:
        cuts = [max(1, schedule.parts(Buffer.DATA)) for schedule in self.schedules]
        assert len(set(cuts)) == 1
        wholes = [self._draw(length * cuts[0] + self.size // 3) for _ in range(self.size)]
        self.inputs = [cut(whole, cuts[0]) for whole in wholes]
        self.memories = [{(Buffer.DATA, p): list(v) for p, v in enumerate(parts)} for parts in self.inputs]

    def _bind_broadcast(self, lengths: list[list[int]], length: int) -> None:
        self.inputs = [[self._draw(length)] for _ in range(self.size)]
        self.memories = [{(Buffer.DATA, 0): list(parts[0])} for parts in self.inputs]

    _bind_group_opening = _bind_broadcast

    def _bind_reduce(self, lengths: list[list[int]], length: int) -> None:
        self.inputs = [[self._draw(length)] for _ in range(self.size)]
        self.memories = [{(Buffer.INPUT, 0): list(parts[0])} for parts in self.inputs]
        root = self.memories[self.root]
        root[Buffer.OUTPUT, 0] = root[Buffer.INPUT, 0]  # the same memory, as in torch.distributed

    def _bind_one_to_many(self, lengths: list[int], outputs: Callable[[int], dict[int, int]]) -> None:
        """Every rank has one INPUT part; `outputs` returns the lengths of a rank's OUTPUT parts."""
        self.inputs = [[self._draw(length)] for length in lengths]
        for rank in range(self.size):
            memory: Memory = {(Buffer.INPUT, 0): list(self.inputs[rank][0])}
            memory.update({(Buffer.OUTPUT, p): [None] * n for p, n in outputs(rank).items()})
            self.memories.append(memory)

    def _bind_all_gather(self, lengths: list[list[int]], length: int) -> None:
        self._bind_one_to_many(lengths[0], lambda rank: dict(enumerate(lengths[0])))

    def _bind_gather(self, lengths: list[list[int]], length: int) -> None:
        self._bind_one_to_many(lengths[0], lambda rank: dict(enumerate(lengths[0])) if rank == self.root else {})

    def _bind_many(self, inputs: list[list[int]], outputs: list[list[int]]) -> None:
        self.inputs = [[self._draw(n) for n in row] for row in inputs]
        for parts, row in zip(self.inputs, outputs, strict=True):
            memory: Memory = {(Buffer.INPUT, p): list(values) for p, values in enumerate(parts)}
            memory.update({(Buffer.OUTPUT, p): [None] * n for p, n in enumerate(row)})
            self.memories.append(memory)

    def _bind_reduce_scatter(self, lengths: list[list[int]], length: int) -> None:
        self._bind_many([lengths[0]] * self.size, [[n] for n in lengths[0]])

    def _bind_scatter(self, lengths: list[list[int]], length: int) -> None:
        self._bind_many([lengths[0] if r == self.root else [] for r in range(self.size)], [[n] for n in lengths[0]])

    def _bind_all_to_all(self, lengths: list[list[int]], length: int) -> None:
        self._bind_many(lengths, [[row[rank] for row in lengths] for rank in range(self.size)])

    def _bind_barrier(self, lengths: list[list[int]], length: int) -> None:
        self.inputs = [[] for _ in range(self.size)]
        self.memories = [{} for _ in range(self.size)]

    def _reduced(self, part: int) -> list:
        if part not in self.sums:
            columns = zip(*(parts[part] for parts in self.inputs), strict=True)
            self.sums[part] = [sum(column) // (self.size if self.average else 1) for column in columns]
        return self.sums[part]

    def _expected(self, rank: int) -> list[list]:
        match self.kind:
            case "ALL_REDUCE" | "GROUP_OPENING":
                return [self._reduced(part) for part in range(len(self.inputs[0]))]
            case "REDUCE":
                return [self._reduced(0)] if rank == self.root else []
            case "REDUCE_SCATTER":
                return [self._reduced(rank)]
            case "ALL_GATHER":
                return [parts[0] for parts in self.inputs]
            case "GATHER":
                return [parts[0] for parts in self.inputs] if rank == self.root else []
            case "BROADCAST":
                return self.inputs[self.root]
            case "SCATTER":
                return [self.inputs[self.root][rank]]
            case "ALL_TO_ALL":
                return [parts[rank] for parts in self.inputs]
        return []


_KINDS = (  # longest last, so that REDUCE does not match REDUCE_SCATTER
    *("REDUCE", "GATHER", "SCATTER", "BROADCAST", "BARRIER", "GROUP_OPENING"),
    *("ALL_GATHER", "ALL_REDUCE", "ALL_TO_ALL", "REDUCE_SCATTER"),
)


def roots(identifier: ScheduleId, size: int, random: Random) -> list[int]:
    if identifier not in ROOTED:
        return [0]
    return list(range(size)) if size <= 8 else sorted({0, random.randrange(1, size)})


@pytest.mark.parametrize("identifier", ScheduleId, ids=lambda i: i.name.lower())
def test_groups_of_1_to_64(identifier: ScheduleId, exhaustive: bool) -> None:
    random = Random(identifier)
    for size in range(1, 65) if exhaustive else (*range(1, 10), 13, 16, 17, 31, 33, 64):
        for root in roots(identifier, size, random):
            average = identifier in REDUCING and random.random() < 0.5
            case = Case(
                *(identifier, size, random, root, average),
                length=random.choice((0, 1, 3, 5) if size < 24 else (0, 1, 2)),
                adjacent=random.random() < 0.5,
            )
            case.run(random, segments=3 if size < 17 or size % 16 == 0 else 1)
            case.check()


@pytest.mark.parametrize("identifier", UNEVEN, ids=lambda i: i.name.lower())
def test_parts_of_different_lengths(identifier: ScheduleId) -> None:
    random = Random(identifier)
    for size in (*range(1, 18), 33):
        for adjacent in (True, False):
            case = Case(identifier, size, random, even=False, length=3, adjacent=adjacent)
            case.run(random)
            case.check()


@settings(max_examples=300, deadline=None)
@given(
    identifier=st.sampled_from(ScheduleId),
    size=st.integers(1, 13),
    root=st.integers(0, 12),
    length=st.integers(0, 9),
    segments=st.integers(1, 5),
    average=st.booleans(),
    adjacent=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_order_of_events(
    identifier: ScheduleId, size: int, root: int, length: int, segments: int, average: bool, adjacent: bool, seed: int
) -> None:
    root = root % size if identifier in ROOTED else 0
    average = average and identifier in REDUCING
    random = Random(seed)
    case = Case(identifier, size, random, root, average, length=length, adjacent=adjacent)
    case.run(random, segments)
    case.check()


def awkward(random: Random) -> float:
    """A number whose sum with others depends on the order."""
    return random.uniform(-1, 1) * 10.0 ** random.randrange(-2, 3)


@pytest.mark.parametrize("identifier", REDUCING, ids=lambda i: i.name.lower())
@pytest.mark.parametrize("average", [False, True], ids=["sum", "average"])
def test_same_bits_on_all_ranks_and_in_every_run(identifier: ScheduleId, average: bool) -> None:
    for size in (2, 3, 4, 5, 7, 8, 13, 24):
        root = size // 2 if identifier in ROOTED else 0
        results = []
        for order in range(3):
            case = Case(identifier, size, Random(size), root, average, length=4, number=awkward)
            case.run(Random(order), divide=lambda value, size: value / size)
            results.append([case.output(rank) for rank in range(size)])
        assert results[0] == results[1] == results[2]
        if case.kind == "ALL_REDUCE":
            assert all(output == results[0][0] for output in results[0])


def test_test_data_reveals_the_order_of_addition() -> None:
    random = Random(0)
    columns = [[awkward(random) for _ in range(16)] for _ in range(8)]
    assert any(sum(column) != sum(reversed(column)) for column in columns)


# -- the interpreter detects errors ------------------------------------------------------------------------------------


def altered(schedule: Schedule, **changes: Any) -> Schedule:
    fields = ("name", "identifier", "rank", "size", "chunks", "steps", "scratch")
    copy = Schedule(**{name: changes.get(name, getattr(schedule, name)) for name in fields})
    if "dependencies" in changes:
        object.__setattr__(copy, "dependencies", changes["dependencies"])
    return copy


@pytest.mark.parametrize(
    "identifier",
    [i for i in ScheduleId if not i.name.endswith("DIRECT") and i not in (ScheduleId.BARRIER,)],
    ids=lambda i: i.name.lower(),
)
def test_interpreter_detects_missing_dependencies(identifier: ScheduleId) -> None:
    noticed = 0
    for seed in range(20):
        case = Case(identifier, 8, Random(seed))
        case.schedules = [altered(s, dependencies=((),) * len(s.steps)) for s in case.schedules]
        try:
            case.run(Random(seed))
            case.check()
        except (AssertionError, KeyError, TypeError):
            noticed += 1
    assert noticed


def test_interpreter_detects_a_wrong_label() -> None:
    case = Case(ScheduleId.ALL_REDUCE_RING, 4, Random(0))
    steps = [s._replace(label=s.label + 1) if s.action == Action.SEND else s for s in case.schedules[2].steps]
    case.schedules[2] = altered(case.schedules[2], steps=tuple(steps))
    with pytest.raises(WrongMessage, match="was due"):
        case.run(Random(0))


def test_interpreter_detects_a_deadlock() -> None:
    case = Case(ScheduleId.ALL_REDUCE_DOUBLING, 2, Random(0))
    case.schedules = [altered(s, steps=s.steps[::-1]) for s in case.schedules]  # both receive first, then send
    with pytest.raises(Deadlock):
        case.run(Random(0))


def test_interpreter_detects_an_unreceived_message() -> None:
    case = Case(ScheduleId.ALL_TO_ALL_DIRECT, 3, Random(0))
    receiving = [s for s in case.schedules[1].steps if s.action != Action.RECV]
    case.schedules[1] = altered(case.schedules[1], steps=tuple(receiving))
    with pytest.raises(WrongMessage):
        case.run(Random(0))
