"""Schedules for groups whose members share machines: results, bits, what leaves a machine, and how groups are spread."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.collectives import Action, Buffer, Collective, Schedule, ScheduleId, Thresholds, choose
from ringfence.machines import Machines, are_even, spread, within
from tests.unit.test_collectives import REDUCING, ROOTED, UNEVEN, Case, awkward
from tests.unit.test_collectives_bounds import check_form

KIB, MIB = 1 << 10, 1 << 20
TWO_LEVELS = [identifier for identifier in ScheduleId if identifier.name.endswith("TWO_LEVELS")]
ANY_MACHINES = [ScheduleId.BROADCAST_TWO_LEVELS, ScheduleId.REDUCE_TWO_LEVELS]
EVEN = [identifier for identifier in TWO_LEVELS if identifier not in ANY_MACHINES]
SHAPES = [(1, 2), (1, 4), (2, 2), (2, 4), (3, 2), (2, 3), (4, 3), (5, 2), (3, 5)]


def shuffled(count: int, workers: int, random: Random) -> Machines:
    """Machines with equally many workers whose ranks are in no order."""
    hosts = [machine for machine in range(count) for _ in range(workers)]
    random.shuffle(hosts)
    return spread(hosts)


@pytest.mark.parametrize("identifier", TWO_LEVELS, ids=lambda i: i.name.lower())
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_every_worker_has_the_result(identifier: ScheduleId, shape: tuple[int, int]) -> None:
    random = Random(repr((identifier, shape)))
    size = shape[0] * shape[1]
    for even in (True, False) if identifier in UNEVEN else (True,):
        for root in range(size) if identifier in ROOTED else (0,):
            machines, average = shuffled(*shape, random), identifier in REDUCING and random.random() < 0.5
            case = Case(identifier, size, random, root, average, even, random.choice((1, 3)), machines=machines)
            for schedule in case.schedules:
                check_form(schedule)
            case.run(random)
            case.check()


@settings(max_examples=300, deadline=None)
@given(
    identifier=st.sampled_from([*TWO_LEVELS, ScheduleId.ALL_REDUCE_RING, ScheduleId.ALL_GATHER_RING]),
    hosts=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    root=st.integers(0, 11),
    segments=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_any_spread_and_order_of_events(
    identifier: ScheduleId, hosts: list[int], root: int, segments: int, seed: int
) -> None:
    """A flat ring serves machines with different numbers of workers."""
    random, machines, size = Random(seed), spread(hosts), len(hosts)
    if identifier in EVEN and machines and not are_even(machines):
        hosts = [hosts[0]] * size
        machines = spread(hosts)
    case = Case(identifier, size, random, root % size if identifier in ROOTED else 0, machines=machines)
    case.run(random, segments)
    case.check()


@pytest.mark.parametrize("identifier", [i for i in TWO_LEVELS if i in REDUCING], ids=lambda i: i.name.lower())
def test_same_bits_on_all_ranks_and_in_every_run(identifier: ScheduleId) -> None:
    for shape in SHAPES:
        size, results = shape[0] * shape[1], []
        for order in range(3):
            machines = shuffled(*shape, Random(size))
            case = Case(identifier, size, Random(size), length=4, number=awkward, machines=machines)
            case.run(Random(order))
            results.append([case.output(rank) for rank in range(size)])
        assert results[0] == results[1] == results[2]
        if case.kind == "ALL_REDUCE":
            assert all(output == results[0][0] for output in results[0])


# -- what leaves a machine ---------------------------------------------------------------------------------------------


def leaving(kind: Collective, machines: Machines, size: int) -> dict[int, float]:
    """The bytes that each machine sends to others, as a share of the tensor, and that its workers seal for it."""
    machine_of = {rank: machine for machine, ranks in enumerate(machines) for rank in ranks}
    found: Counter[int] = Counter()
    for rank in machine_of:
        schedule = choose(kind, len(machine_of), rank, 0, size, Thresholds(), machines=machines)
        for step in schedule.steps:
            if step.action is Action.SEND and machine_of[step.peer] != machine_of[rank]:
                found[machine_of[rank]] += share(schedule, step.chunk)
    return dict(found)


def share(schedule: Schedule, chunk: int) -> int:
    """The length of a chunk, in shares of one worker."""
    place = schedule.chunks[chunk]
    whole = place.buffer is Buffer.DATA and schedule.parts(Buffer.DATA) == 1
    return schedule.size if whole else place.parts


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (3, 3), (2, 8)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_machines_send_the_fewest_bytes(shape: tuple[int, int]) -> None:
    """A machine sends what one worker alone on it would send: twice (M - 1) / M of the tensor in an all-reduce."""
    count, workers = shape
    machines, size = shuffled(count, workers, Random(1)), count * workers
    once = (count - 1) * workers  # of `size` shares
    assert leaving(Collective.ALL_REDUCE, machines, 64 * MIB) == dict.fromkeys(range(count), 2 * once)
    assert leaving(Collective.REDUCE_SCATTER, machines, 64 * MIB) == dict.fromkeys(range(count), once)
    assert leaving(Collective.ALL_GATHER, machines, 64 * MIB) == dict.fromkeys(range(count), once)
    assert sum(leaving(Collective.BROADCAST, machines, 64 * MIB).values()) == (count - 1) * size


def test_a_ring_over_uneven_machines_leaves_each_once() -> None:
    machines = spread([0, 1, 0, 1, 2, 0])
    for rank in range(6):
        schedule = choose(Collective.ALL_REDUCE, 6, rank, 0, 64 * MIB, Thresholds(), machines=machines)
        assert schedule.identifier == ScheduleId.ALL_REDUCE_RING
    assert leaving(Collective.ALL_REDUCE, machines, 64 * MIB) == dict.fromkeys(
        range(3), 10
    )  # one worker of each sends on


def test_an_all_to_all_has_links_to_its_machine_and_its_column_only() -> None:
    """One message for each worker here and for each other machine, which has the fewest possible bytes."""
    machines = shuffled(5, 4, Random(2))
    for rank in range(20):
        schedule = choose(Collective.ALL_TO_ALL, 20, rank, 0, 20 * 4096, Thresholds(), machines=machines)
        here = next(workers for workers in machines if rank in workers)
        column = {workers[here.index(rank)] for workers in machines}
        sent = [step.peer for step in schedule.steps if step.action is Action.SEND]
        assert sorted(sent) == sorted({*here, *column} - {rank}) and len(sent) == 3 + 4
    assert leaving(Collective.ALL_TO_ALL, machines, 20 * 4096) == dict.fromkeys(range(5), 4 * 16)


# -- selection ---------------------------------------------------------------------------------------------------------


def test_small_tensors_take_the_schedules_of_the_table() -> None:
    for kind in set(Collective) - {Collective.ALL_TO_ALL}:
        plain = choose(kind, 8, 0, 0, 4096, Thresholds())
        assert (
            choose(kind, 8, 0, 0, 4096, Thresholds(), machines=spread([0] * 4 + [1] * 4)).identifier == plain.identifier
        )


@pytest.mark.parametrize(
    ("count", "part", "even", "chosen"),
    [
        (3, 4 * KIB, True, ScheduleId.ALL_TO_ALL_DIRECT),  # few messages anyway
        (4, 4 * KIB, True, ScheduleId.ALL_TO_ALL_TWO_LEVELS),
        (4, 4 * KIB, False, ScheduleId.ALL_TO_ALL_DIRECT),  # others may have other lengths
        (4, 256 * KIB, True, ScheduleId.ALL_TO_ALL_DIRECT),
        (64, 4 * KIB, True, ScheduleId.ALL_TO_ALL_BRUCK),
        (64, 8 * KIB, True, ScheduleId.ALL_TO_ALL_TWO_LEVELS),
        (256, 128 * KIB, True, ScheduleId.ALL_TO_ALL_DIRECT),  # 128 MiB in all
    ],
)
def test_all_to_all_on_machines(count: int, part: int, even: bool, chosen: ScheduleId) -> None:
    size, machines = 4 * count, spread(rank // 4 for rank in range(4 * count))
    kind, table = Collective.ALL_TO_ALL, Thresholds()
    for rank in (0, size - 1):
        assert choose(kind, size, rank, 0, part * size, table, even=even, machines=machines).identifier == chosen


def test_all_to_all_on_uneven_machines_or_one_has_one_level() -> None:
    for machines in (spread([0] * 7 + [1] * 9), spread([0] * 16)):
        schedule = choose(Collective.ALL_TO_ALL, 16, 0, 0, 16 * 8 * KIB, Thresholds(), machines=machines)
        assert schedule.identifier == ScheduleId.ALL_TO_ALL_DIRECT


def test_nothing_is_sealed_for_several_hops_on_one_machine() -> None:
    for kind in Collective:
        for size in (4096, MIB, 64 * MIB):
            schedule = choose(kind, 8, 3, 0, size, Thresholds(), machines=(tuple(range(8)),))
            assert all(step.origin == -1 for step in schedule.steps)


@given(st.lists(st.integers(0, 5), max_size=20))
def test_workers_are_spread_by_host(hosts: list[int]) -> None:
    machines = spread(hosts)
    if len(set(hosts)) == len(hosts):
        assert machines == ()
        return
    assert sorted(rank for ranks in machines for rank in ranks) == list(range(len(hosts)))
    assert all(len({hosts[rank] for rank in ranks}) == 1 for ranks in machines) and len(machines) == len(set(hosts))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
def test_a_group_is_spread_as_its_workers(hosts: list[int], data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.integers(0, len(hosts) - 1), min_size=1, unique=True))
    assert within(spread(hosts), ranks) == spread([hosts[rank] for rank in ranks])
