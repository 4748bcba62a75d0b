"""Bounds of schedules (steps, messages, links, sequential messages), and their selection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.collectives import Action, Buffer, Collective, Schedule, ScheduleId, Thresholds, build, choose
from ringfence.errors import ProtocolError
from tests.unit.interpreter import links, messages, received, sent
from tests.unit.test_collectives import ROOTED, Case

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LARGEST = 16384

make = build.__wrapped__  # without the cache, which would keep thousands of schedules alive


@pytest.fixture(autouse=True)
def _empty_cache() -> Iterator[None]:
    """Clear the cache of schedules after the tests of the largest groups."""
    yield
    build.cache_clear()


class Bound(NamedTuple):
    """Upper bounds for one worker in a group of P ranks, with L = ceil(log2 P)."""

    messages: Callable[[int, int], int]  # sent
    links: Callable[[int, int], int]
    steps: Callable[[int, int], int]
    depth: Callable[[int, int], int]  # longest chain of messages in the whole group


BOUNDS = {
    ScheduleId.ALL_REDUCE_RING: Bound(
        lambda p, n: 2 * p - 2, lambda p, n: 2, lambda p, n: 4 * p - 3, lambda p, n: 2 * p - 2
    ),
    ScheduleId.ALL_REDUCE_DOUBLING: Bound(
        lambda p, n: n + 1, lambda p, n: n + 1, lambda p, n: 2 * n + 2, lambda p, n: n + 1
    ),
    ScheduleId.ALL_REDUCE_HALVING: Bound(
        lambda p, n: 4 * n, lambda p, n: 2 * n, lambda p, n: 8 * n + 1, lambda p, n: 2 * n
    ),
    ScheduleId.ALL_REDUCE_HALVING_APART: Bound(
        lambda p, n: 2 * p - 2, lambda p, n: 2 * n, lambda p, n: 4 * p - 3, lambda p, n: 2 * n
    ),
    ScheduleId.REDUCE_SCATTER_RING: Bound(
        lambda p, n: p - 1, lambda p, n: 2, lambda p, n: 2 * p - 1, lambda p, n: p - 1
    ),
    ScheduleId.REDUCE_SCATTER_HALVING: Bound(
        lambda p, n: 2 * n, lambda p, n: 2 * n, lambda p, n: 4 * n + 3, lambda p, n: n
    ),
    ScheduleId.REDUCE_SCATTER_HALVING_APART: Bound(
        lambda p, n: p - 1, lambda p, n: 2 * n, lambda p, n: 3 * p, lambda p, n: n
    ),
    ScheduleId.ALL_GATHER_RING: Bound(lambda p, n: p - 1, lambda p, n: 2, lambda p, n: 2 * p - 1, lambda p, n: p - 1),
    ScheduleId.ALL_GATHER_DOUBLING: Bound(
        lambda p, n: 2 * n, lambda p, n: 2 * n, lambda p, n: 4 * n + 1, lambda p, n: n
    ),
    ScheduleId.ALL_GATHER_DOUBLING_APART: Bound(
        lambda p, n: p - 1, lambda p, n: 2 * n, lambda p, n: 2 * p - 1, lambda p, n: n
    ),
    ScheduleId.BROADCAST_BINOMIAL: Bound(lambda p, n: n, lambda p, n: n, lambda p, n: n, lambda p, n: n),
    ScheduleId.BROADCAST_CHAIN: Bound(lambda p, n: 1, lambda p, n: 2, lambda p, n: 2, lambda p, n: p - 1),
    ScheduleId.BROADCAST_TREE: Bound(lambda p, n: 2, lambda p, n: 3, lambda p, n: 3, lambda p, n: n),
    ScheduleId.REDUCE_BINOMIAL: Bound(lambda p, n: 1, lambda p, n: n, lambda p, n: n + 1, lambda p, n: n),
    ScheduleId.REDUCE_CHAIN: Bound(lambda p, n: 1, lambda p, n: 2, lambda p, n: 2, lambda p, n: p - 1),
    ScheduleId.REDUCE_TREE: Bound(lambda p, n: 1, lambda p, n: 3, lambda p, n: 3, lambda p, n: n),
    ScheduleId.GATHER_BINOMIAL: Bound(lambda p, n: 1, lambda p, n: n, lambda p, n: p + n, lambda p, n: n),
    ScheduleId.GATHER_DIRECT: Bound(lambda p, n: 1, lambda p, n: p - 1, lambda p, n: p, lambda p, n: 1),
    ScheduleId.SCATTER_BINOMIAL: Bound(lambda p, n: n, lambda p, n: n, lambda p, n: p + n, lambda p, n: n),
    ScheduleId.SCATTER_DIRECT: Bound(lambda p, n: p - 1, lambda p, n: p - 1, lambda p, n: p, lambda p, n: 1),
    ScheduleId.ALL_TO_ALL_BRUCK: Bound(
        lambda p, n: n, lambda p, n: 2 * n, lambda p, n: 3 * p + 2 * n, lambda p, n: n
    ),
    ScheduleId.ALL_TO_ALL_DIRECT: Bound(
        lambda p, n: p - 1, lambda p, n: p - 1, lambda p, n: 2 * p - 1, lambda p, n: 1
    ),
    ScheduleId.ALL_TO_ALL_TWO_LEVELS: Bound(
        lambda p, n: p - 1, lambda p, n: p - 1, lambda p, n: 4 * p - 2, lambda p, n: 1
    ),
    ScheduleId.BARRIER: Bound(lambda p, n: n, lambda p, n: 2 * n, lambda p, n: 2 * n, lambda p, n: n),
    ScheduleId.GROUP_OPENING: Bound(lambda p, n: n, lambda p, n: n, lambda p, n: 2 * n, lambda p, n: 2 * n),
}  # fmt: skip
_ALONE = {  # what two levels become where every worker has a machine of its own
    ScheduleId.ALL_REDUCE_TWO_LEVELS: ScheduleId.ALL_REDUCE_RING,
    ScheduleId.REDUCE_SCATTER_TWO_LEVELS: ScheduleId.REDUCE_SCATTER_RING,
    ScheduleId.ALL_GATHER_TWO_LEVELS: ScheduleId.ALL_GATHER_RING,
    ScheduleId.BROADCAST_TWO_LEVELS: ScheduleId.BROADCAST_CHAIN,
    ScheduleId.REDUCE_TWO_LEVELS: ScheduleId.REDUCE_CHAIN,
}
_COPIED = Bound(lambda p, n: 2 * n, lambda p, n: 2 * n, lambda p, n: p + 4 * n + 2, lambda p, n: n)
BOUNDS |= {
    ScheduleId.ALL_REDUCE_TWO_LEVELS_HALVING: BOUNDS[ScheduleId.ALL_REDUCE_HALVING],
    ScheduleId.REDUCE_SCATTER_TWO_LEVELS_HALVING: _COPIED,
    ScheduleId.ALL_GATHER_TWO_LEVELS_DOUBLING: _COPIED,
}
BOUNDS |= {two_levels: BOUNDS[flat] for two_levels, flat in _ALONE.items()}


def check_bounds(schedule: Schedule, identifier: ScheduleId) -> None:
    bound, size = BOUNDS[identifier], schedule.size
    bits = (size - 1).bit_length()
    where = f"{schedule.name}, rank {schedule.rank} of {size}"
    assert messages(schedule) <= bound.messages(size, bits), where
    assert len(links(schedule)) <= bound.links(size, bits), where
    assert len(schedule.steps) <= max(1, bound.steps(size, bits)), where  # a group of one copies at most once
    assert schedule.rank not in links(schedule), where


def check_form(schedule: Schedule) -> None:
    """Check the properties that the runtime relies on."""
    for peer in links(schedule):
        for names in (sent(schedule, peer), received(schedule, peer)):
            labels = [label for label, _ in names]
            assert len(set(labels)) == len(labels), "a label twice between the same two"
    for place in schedule.chunks:
        if place.buffer == Buffer.SCRATCH:
            assert place.part + place.parts <= len(schedule.scratch)
    for place in schedule.scratch:
        assert place.buffer != Buffer.SCRATCH
    check_forwarding(schedule)


def check_forwarding(schedule: Schedule) -> None:
    """Check that a rank forwards only a chunk that it has received and that the SEND depends on the RECV."""
    for index, step in enumerate(schedule.steps):
        if step.action != Action.SEND or step.origin in (-1, schedule.rank):
            continue
        waits = {d.step for d in schedule.dependencies[index] if d.by_segment}
        sources = [schedule.steps[w] for w in waits if schedule.steps[w].action == Action.RECV]
        assert [(s.chunk, s.label, s.origin) for s in sources] == [(step.chunk, step.label, step.origin)]


@pytest.mark.parametrize("identifier", ScheduleId, ids=lambda i: i.name.lower())
def test_bounds_up_to_64_ranks(identifier: ScheduleId) -> None:
    random = Random(identifier)
    for size in range(1, 65):
        ranks = range(size) if size <= 16 else {0, 1, size - 1, size // 2, random.randrange(size)}
        root = random.randrange(size) if identifier in ROOTED else 0
        for rank in ranks:
            schedule = make(identifier, size, rank, root, random.random() < 0.5)
            check_bounds(schedule, identifier)
            check_form(schedule)


@pytest.mark.parametrize("identifier", ScheduleId, ids=lambda i: i.name.lower())
def test_number_of_sequential_messages(identifier: ScheduleId) -> None:
    random = Random(identifier)
    for size in (2, 3, 4, 5, 8, 11, 16, 31, 32, 33):
        world = Case(identifier, size, random, length=1).run(random, segments=1)
        assert world.depth() <= BOUNDS[identifier].depth(size, (size - 1).bit_length()), f"{identifier.name} of {size}"


LOGARITHMIC = [i for i in ScheduleId if not i.name.endswith(("RING", "DIRECT", "BRUCK", "TWO_LEVELS", "APART"))]


@pytest.mark.parametrize("identifier", LOGARITHMIC, ids=lambda i: i.name.lower())
def test_group_of_257(identifier: ScheduleId) -> None:
    random = Random(identifier)
    case = Case(identifier, 257, random, root=100 if identifier in ROOTED else 0, length=2)
    case.run(random)
    case.check()


@pytest.mark.parametrize("kind", Collective, ids=lambda k: k.name.lower())
@pytest.mark.parametrize("size", [100, 1025, LARGEST])
def test_selection_in_large_groups(kind: Collective, size: int) -> None:
    """Check the bounds of one rank, and that messages between it and some of its peers match."""
    random = Random(size)
    root = size // 3 if kind in (Collective.REDUCE, Collective.BROADCAST, Collective.GATHER, Collective.SCATTER) else 0
    rank = random.randrange(size)
    chosen = {choose(kind, size, rank, root, bytes_, Thresholds()).identifier for bytes_ in (0, MIB, 64 * MIB, GIB)}
    for identifier in map(ScheduleId, chosen):
        schedule = build(identifier, size, rank, root, False, True)  # from the cache
        check_bounds(schedule, identifier)
        if len(schedule.steps) > LARGEST:  # seconds for each peer; smaller groups test the same structure
            continue
        for peer in random.sample(sorted(links(schedule)), k=min(3, len(links(schedule)))):
            there = make(identifier, size, peer, root)
            assert sent(schedule, peer) == received(there, rank)
            assert received(schedule, peer) == sent(there, rank)


@pytest.mark.parametrize("kind", Collective, ids=lambda k: k.name.lower())
@pytest.mark.parametrize("bytes_", [0, 4 * KIB, MIB])
def test_small_tensors_take_few_messages_in_the_largest_group(kind: Collective, bytes_: int) -> None:
    schedule = choose(kind, LARGEST, 7, 0, bytes_, Thresholds())
    assert messages(schedule) <= 4 * 14
    assert len(links(schedule)) <= 28


def test_reduce_scatter_needs_two_slices_of_scratch() -> None:
    for size in (3, 4, 16):
        assert len(build(ScheduleId.REDUCE_SCATTER_RING, size, 1).scratch) <= 2


# -- selection ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "size", "bytes_", "chosen"),
    [
        (Collective.ALL_REDUCE, 4, 4 * KIB, ScheduleId.ALL_REDUCE_DOUBLING),
        (Collective.ALL_REDUCE, 4, 25 * MIB, ScheduleId.ALL_REDUCE_RING),
        (Collective.ALL_REDUCE, 7, 25 * MIB, ScheduleId.ALL_REDUCE_RING),
        (Collective.ALL_REDUCE, 8, 512 * KIB, ScheduleId.ALL_REDUCE_DOUBLING),
        (Collective.ALL_REDUCE, 8, MIB, ScheduleId.ALL_REDUCE_HALVING),
        (Collective.ALL_REDUCE, 8, 25 * MIB, ScheduleId.ALL_REDUCE_HALVING_APART),
        (Collective.ALL_REDUCE, 32, GIB, ScheduleId.ALL_REDUCE_HALVING_APART),
        (Collective.ALL_REDUCE, 33, GIB, ScheduleId.ALL_REDUCE_HALVING),
        (Collective.ALL_REDUCE, LARGEST, 128 * KIB, ScheduleId.ALL_REDUCE_DOUBLING),
        (Collective.ALL_REDUCE, LARGEST, 256 * KIB, ScheduleId.ALL_REDUCE_HALVING),
        (Collective.ALL_REDUCE, LARGEST, 25 * MIB, ScheduleId.ALL_REDUCE_HALVING),
        (Collective.ALL_REDUCE, LARGEST, GIB, ScheduleId.ALL_REDUCE_HALVING),
        (Collective.REDUCE_SCATTER, 2, 4 * KIB, ScheduleId.REDUCE_SCATTER_RING),
        (Collective.REDUCE_SCATTER, 8, 4 * KIB, ScheduleId.REDUCE_SCATTER_HALVING),
        (Collective.REDUCE_SCATTER, 7, MIB, ScheduleId.REDUCE_SCATTER_RING),
        (Collective.REDUCE_SCATTER, 8, MIB, ScheduleId.REDUCE_SCATTER_HALVING),
        (Collective.REDUCE_SCATTER, 8, 25 * MIB, ScheduleId.REDUCE_SCATTER_HALVING_APART),
        (Collective.ALL_GATHER, 3, 4 * KIB, ScheduleId.ALL_GATHER_RING),
        (Collective.ALL_GATHER, 4, 4 * KIB, ScheduleId.ALL_GATHER_DOUBLING),
        (Collective.ALL_GATHER, 4, MIB, ScheduleId.ALL_GATHER_RING),
        (Collective.ALL_GATHER, 8, 4 * MIB, ScheduleId.ALL_GATHER_DOUBLING_APART),
        (Collective.ALL_GATHER, 8, 3 * MIB, ScheduleId.ALL_GATHER_DOUBLING),
        (Collective.BROADCAST, 8, 4 * KIB, ScheduleId.BROADCAST_BINOMIAL),
        (Collective.BROADCAST, 8, 25 * MIB, ScheduleId.BROADCAST_CHAIN),
        (Collective.BROADCAST, 2, 25 * MIB, ScheduleId.BROADCAST_BINOMIAL),
        (Collective.BROADCAST, 65, GIB, ScheduleId.BROADCAST_TREE),
        (Collective.REDUCE, 8, 4 * KIB, ScheduleId.REDUCE_BINOMIAL),
        (Collective.REDUCE, 8, 25 * MIB, ScheduleId.REDUCE_CHAIN),
        (Collective.REDUCE, 65, GIB, ScheduleId.REDUCE_TREE),
        (Collective.GATHER, 8, 4 * KIB, ScheduleId.GATHER_BINOMIAL),
        (Collective.GATHER, 8, MIB, ScheduleId.GATHER_DIRECT),
        (Collective.GATHER, 17, MIB, ScheduleId.GATHER_BINOMIAL),
        (Collective.SCATTER, 17, 17 * MIB, ScheduleId.SCATTER_DIRECT),
        (Collective.SCATTER, 17, MIB, ScheduleId.SCATTER_BINOMIAL),
        (Collective.ALL_TO_ALL, 8, 4 * KIB, ScheduleId.ALL_TO_ALL_DIRECT),
        (Collective.ALL_TO_ALL, 32, 32 * KIB, ScheduleId.ALL_TO_ALL_BRUCK),
        (Collective.ALL_TO_ALL, 32, MIB, ScheduleId.ALL_TO_ALL_DIRECT),
        (Collective.BARRIER, 5, 0, ScheduleId.BARRIER),
        (Collective.GROUP_OPENING, 5, 32, ScheduleId.GROUP_OPENING),
    ],
)
def test_default_table(kind: Collective, size: int, bytes_: int, chosen: ScheduleId) -> None:
    for rank in {0, size // 2, size - 1} if size < LARGEST else {7}:
        assert choose(kind, size, rank, 0, bytes_, Thresholds()).identifier == chosen


def test_uneven_all_to_all_is_direct() -> None:
    assert choose(Collective.ALL_TO_ALL, 32, 3, 0, 64, Thresholds(), even=False).name == "all_to_all_direct"


def test_table_selects_the_schedule() -> None:
    for table, chosen in (
        (Thresholds(small=0), "all_reduce_ring"),
        (Thresholds(small=0, ring_group=3), "all_reduce_halving"),
        (Thresholds(small=0, ring_group=3, apart_bytes=16), "all_reduce_halving_apart"),
    ):
        assert choose(Collective.ALL_REDUCE, 4, 1, 0, 64, table).name == chosen


def test_schedules_are_cached() -> None:
    first = choose(Collective.ALL_REDUCE, 4, 1, 0, 64, Thresholds())
    assert choose(Collective.ALL_REDUCE, 4, 1, 0, 4096, Thresholds()) is first
    assert choose(Collective.ALL_REDUCE, 4, 1, 0, 64, Thresholds(), average=True) is not first


@pytest.mark.parametrize(("rank", "root"), [(4, 0), (-1, 0), (0, 4), (0, -1)])
def test_ranks_outside_the_group_are_refused(rank: int, root: int) -> None:
    with pytest.raises(ValueError, match="not in a group of 4"):
        choose(Collective.BROADCAST, 4, rank, root, 64, Thresholds())


def test_schedule_identifiers_are_stable() -> None:
    assert [(i.name.lower(), i.value) for i in ScheduleId] == [
        *(("all_reduce_ring", 1), ("all_reduce_doubling", 2), ("reduce_scatter_ring", 4), ("all_gather_ring", 6)),
        *(("broadcast_binomial", 8), ("broadcast_chain", 9), ("broadcast_tree", 10)),
        *(("reduce_binomial", 11), ("reduce_chain", 12), ("reduce_tree", 13)),
        *(("gather_binomial", 14), ("gather_direct", 15), ("scatter_binomial", 16), ("scatter_direct", 17)),
        *(("all_to_all_bruck", 18), ("all_to_all_direct", 19), ("barrier", 20), ("group_opening", 21)),
        *(("all_reduce_two_levels", 22), ("reduce_scatter_two_levels", 23), ("all_gather_two_levels", 24)),
        *(("broadcast_two_levels", 25), ("reduce_two_levels", 26)),
        *(("all_reduce_halving", 27), ("all_reduce_halving_apart", 28)),
        *(("reduce_scatter_halving", 29), ("reduce_scatter_halving_apart", 30)),
        *(("all_gather_doubling", 31), ("all_gather_doubling_apart", 32)),
        *(("all_reduce_two_levels_halving", 33), ("reduce_scatter_two_levels_halving", 34)),
        *(("all_gather_two_levels_doubling", 35), ("all_to_all_two_levels", 36)),
    ]


thresholds = st.lists(st.integers(0, 2**64 - 1), min_size=10, max_size=10)


@given(thresholds)
def test_table_round_trip(values: list[int]) -> None:
    table = Thresholds(*values)
    assert Thresholds.from_bytes(table.to_bytes()) == table


@given(st.binary(max_size=99) | st.binary(min_size=97, max_size=97))
def test_parsed_table_encodes_to_the_same_bytes(encoded: bytes) -> None:
    try:
        table = Thresholds.from_bytes(encoded)
    except ProtocolError:
        return
    assert table.to_bytes() == encoded


@pytest.mark.parametrize("encoded", [b"", b"\1", Thresholds().to_bytes() + b"\0", Thresholds().to_bytes()[:-1]])
def test_table_of_the_wrong_length_is_refused(encoded: bytes) -> None:
    with pytest.raises(ProtocolError, match="bytes"):
        Thresholds.from_bytes(encoded)


def test_table_of_another_version_is_refused() -> None:
    with pytest.raises(ProtocolError, match="version 1"):
        Thresholds.from_bytes(b"\1" + Thresholds().to_bytes()[1:])
