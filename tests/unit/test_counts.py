"""What a worker pays must not grow with the run: counted in the schedules, for groups of up to 16,384 workers."""

from __future__ import annotations

import math
from random import Random

import pytest

from ringfence.collectives import Collective, ScheduleId, build
from ringfence.collectives.counts import count, rounds_of
from ringfence.machines import Machines, are_even, spread
from tests.unit.test_collectives import ROOTED, Case

MIB = 1 << 20
SIZES = (8, 12, 16, 31, 32, 33, 64, 100, 256, 1000, 1024, 4096, 16384)
HALVES = {Collective.ALL_REDUCE: 2, Collective.REDUCE_SCATTER: 1, Collective.ALL_GATHER: 1}


def machines_of(size: int, workers: int) -> Machines:
    return spread(rank // workers for rank in range(size)) if workers > 1 else ()


@pytest.mark.parametrize("workers", [1, 8], ids=["alone", "eight a machine"])
@pytest.mark.parametrize("whole", [25 * MIB, 1024 * MIB], ids=["25 MiB", "1 GiB"])
@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name.lower())
def test_bounds_hold_from_8_to_16384_workers(kind: Collective, whole: int, workers: int) -> None:
    """Bytes near the least possible, O(log P) rounds, seals by the bytes, two device copies a pass, bounded scratch."""
    for size in SIZES:
        if size % workers or size == workers:
            continue
        bytes_ = whole // (4 * size) * 4 * size
        found, staged = (
            count(kind, size, bytes_, machines=machines_of(size, workers), device=device) for device in (False, True)
        )
        machines, where = size // workers, f"{size} workers"
        least = HALVES[kind] * bytes_ / workers * (machines - 1) / machines
        rounding = HALVES[kind] * found.passes * 4 * size  # parts are of whole elements
        assert least - rounding <= found.wire <= 1.02 * least + rounding, where
        assert found.rounds <= 4 * math.log2(size), where
        limit = 2 * HALVES[kind] * bytes_ / (256 << 10) + 4 * math.log2(size)
        assert found.seals <= limit and found.opens <= limit, where
        assert found.scratch <= 64 * MIB, where
        assert staged.device_copies == 2 * staged.passes <= 2 * (bytes_ / (16 * MIB) * 1.15 + 1), where


def test_a_worker_of_16384_pays_less_than_three_times_what_one_of_8_pays() -> None:
    few, many = (count(Collective.ALL_REDUCE, size, 25 * MIB, device=True) for size in (8, 16384))
    assert many.seals + many.opens + many.device_copies <= 3 * (few.seals + few.opens + few.device_copies)


@pytest.mark.parametrize("identifier", ScheduleId, ids=lambda i: i.name.lower())
def test_rounds_are_a_tight_bound_of_the_longest_chain_of_messages(identifier: ScheduleId) -> None:
    random = Random(identifier)
    two_levels = "TWO_LEVELS" in identifier.name
    spreads = [machines_of(size, 2) for size in (4, 6, 10, 18)] + [machines_of(9, 3), machines_of(4, 4)]
    for size, machines in (
        [(sum(map(len, each)), each) for each in spreads]
        if two_levels
        else [(size, ()) for size in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 16, 17, 31, 33)]
    ):
        root = random.randrange(size) if identifier in ROOTED and not two_levels else 0
        world = Case(identifier, size, random, root, length=1, machines=machines).run(random, segments=1)
        assert world.depth() <= rounds_of(identifier, size, machines) <= world.depth() + 2, f"{size} {machines}"


def test_counts_of_one_schedule_step_by_step() -> None:
    """An all-reduce of 16 MiB among eight: parts of 2 MiB in eight segments, forwarded in the second half."""
    found = count(Collective.ALL_REDUCE, 8, 16 * MIB)
    assert found.rounds == 6 and found.messages == 14 and found.passes == 1
    assert found.seals == 7 * 8 + 8 and found.opens == 14 * 8
    assert found.sealed == found.opened == 14 * 2 * MIB and found.encrypted == 8 * 2 * MIB
    assert found.wire == found.sealed + 7 * 8 * (88 + 16) + 7 * 8 * (88 + 16 + 16)
    assert found.reduced == 14 * MIB and found.copied == found.local == found.scratch == found.device_copies == 0
    assert (found.links, found.peers) == (6, 5)  # to 1, 2 and 4 places on, from as many before: 4 is both


def test_an_all_to_all_of_small_parts_has_few_peers_on_machines() -> None:
    """64 machines of 8: the other 7 of its own, and one of each other machine, to which all 8 parts go as one segment."""
    size, part = 512, 16 << 10
    flat, found = (count(Collective.ALL_TO_ALL, size, part * size, machines=machines_of(size, n)) for n in (1, 8))
    assert (flat.peers, flat.messages, flat.seals, flat.rounds) == (511, 511, 511, 1)
    assert (found.peers, found.messages, found.seals, found.rounds) == (7 + 63, 7 + 63, 63, 2)
    assert found.sealed == (size - 8) * part and found.scratch <= 4 * part * size


def test_inside_a_machine_nothing_is_sealed() -> None:
    found = count(Collective.ALL_REDUCE, 8, 16 * MIB, machines=machines_of(8, 8))
    assert found.seals == found.opens == found.sealed == found.wire == 0 < found.local
    assert are_even(machines_of(16, 8))


def test_device_copies_of_every_collective() -> None:
    """In one pass: down for what is read, up for what is written. Rank 0 is the root; a barrier has no tensors."""
    found = {kind: count(kind, 8, MIB, device=True).device_copies for kind in Collective}
    once = (Collective.BROADCAST, Collective.GROUP_OPENING)
    assert found == {kind: 0 if kind is Collective.BARRIER else 1 if kind in once else 2 for kind in Collective}


def test_large_groups_need_few_steps() -> None:
    for identifier in (ScheduleId.ALL_REDUCE_HALVING, ScheduleId.REDUCE_SCATTER_HALVING):
        assert len(build.__wrapped__(identifier, 16384, 7).steps) <= 8 * 14 + 3
