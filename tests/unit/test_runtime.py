"""Collectives of engines in a memory cluster: all schedules, many sizes, several groups, bounded memory."""

from __future__ import annotations

import pytest
import torch

from ringfence.collectives import Buffer, Collective, Thresholds, passes
from ringfence.keys import KEY_PHASE_SHIFT, SEGMENT_BYTES
from ringfence.link.seal import Opener, Sealer
from tests.memory_cluster import World, all_reduce
from tests.unit.runtime_calls import KINDS, TABLES, bind, request, submit_everywhere

TURN = 1 << KEY_PHASE_SHIFT
PASS_BYTES = 2 << 20  # in this file, so that short tensors have several passes
ONE_PASS = PASS_BYTES // 8  # elements of int64


@pytest.fixture(autouse=True)
def _short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PASS_BYTES", PASS_BYTES)


def name_of(kind: Collective) -> str:
    return kind.name.lower()


def check(world: World, kind: Collective, count: int, root: int = 0) -> None:
    bound = submit_everywhere(world, kind, count, root)
    world.run([each.request for each in bound])
    for rank, each in enumerate(bound):
        assert each.request.done and each.request.error is None, each.request.error
        assert each.right(), f"rank {rank}, {count} elements, root {root}"


# -- right results -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_collectives_return_correct_results(kind: Collective, size: int) -> None:
    for table in TABLES.values():
        world = World(size, table=table)
        for count in (0, 1, 100):
            for root in {0, size - 1}:
                check(world, kind, count, root)


@pytest.mark.parametrize(
    "count", [SEGMENT_BYTES // 8, SEGMENT_BYTES // 8 + 1, ONE_PASS, ONE_PASS + 1, 2 * ONE_PASS + 77_777]
)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not Collective.BARRIER], ids=name_of)
def test_collectives_over_several_segments_and_passes(kind: Collective, count: int) -> None:
    check(World(3), kind, count if kind is not Collective.ALL_REDUCE else 3 * count - 1, root=1)


@pytest.mark.parametrize("size", [9, 17])
@pytest.mark.parametrize("kind", [Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER], ids=name_of)
def test_many_workers_halve_and_double(kind: Collective, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts together and apart, in several passes, with sealed links between real engines."""
    monkeypatch.setattr(passes, "PASS_BYTES", 32 << 10)
    whole = 10_000  # elements of 8 bytes
    for apart in (1 << 30, 0):
        world = World(size, table=Thresholds(small=0, ring_group=0, apart_bytes=apart), capacity=1 << 20)
        check(world, kind, whole if kind is Collective.ALL_REDUCE else whole // size)


@pytest.mark.parametrize("capacity", [50, 1000, 70_000])
def test_frames_may_be_split_anywhere_in_the_stream(capacity: int) -> None:
    world = World(3, capacity=capacity)
    for kind in KINDS:
        check(world, kind, 600 if capacity < 1000 else 90_000 if capacity > 1000 else 5000)


def test_many_requests_may_be_outstanding() -> None:
    world = World(3)
    bound = [each for _ in range(60) for kind in KINDS for each in submit_everywhere(world, kind, 5)]
    world.run([each.request for each in bound])
    assert all(each.request.done and each.request.error is None and each.right() for each in bound)


def test_a_late_rank_completes_the_waiting_collectives() -> None:
    world = World(3)
    early = [[bind(kind, world.communicators[rank], 100) for kind in KINDS] for rank in range(3)]
    for rank in (0, 2):
        for each in early[rank]:
            world.submit(world.communicators[rank], each.request)
    world.run([each.request for each in early[0]])
    for each in early[1]:
        world.submit(world.communicators[1], each.request)
    everything = [each for rank in early for each in rank]
    world.run([each.request for each in everything])
    assert all(each.request.done and each.request.error is None and each.right() for each in everything)


def test_sums_are_bitwise_equal_on_every_rank() -> None:
    for table in TABLES.values():
        world = World(5, table=table)
        torch.manual_seed(1)
        tensors = [torch.randn(10_007) * 10**rank for rank in range(5)]
        world.run(
            [
                world.submit(world.communicators[rank], all_reduce(world.communicators[rank], t))
                for rank, t in enumerate(tensors)
            ]
        )
        assert all(torch.equal(tensors[0].view(torch.int32), other.view(torch.int32)) for other in tensors)


# -- calls that share memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 1000, 300_000])
@pytest.mark.parametrize("table", TABLES)
def test_calls_on_one_tensor_are_executed_in_order(table: str, count: int) -> None:
    world = World(3, table=TABLES[table])
    tensors = [torch.full((count,), rank + 1) for rank in range(3)]
    calls = [
        world.submit(world.communicators[rank], all_reduce(world.communicators[rank], tensors[rank]))
        for _ in range(6)
        for rank in range(3)
    ]
    world.run(calls)
    assert all(call.done and call.error is None for call in calls)
    assert all(torch.equal(tensor, torch.full((count,), 6 * 3**5)) for tensor in tensors)


def test_a_call_reads_the_result_of_the_previous_one() -> None:
    """All-reduce in place, then all-gather of the result, then all-reduce of what was gathered."""
    world, results, calls = World(3), [], []
    for rank, communicator in world.communicators.items():
        tensor, gathered = torch.tensor([rank]), torch.full((3,), -1)
        buffers = {Buffer.INPUT: [tensor], Buffer.OUTPUT: list(gathered.split(1))}
        calls.append(world.submit(communicator, all_reduce(communicator, tensor)))
        calls.append(world.submit(communicator, request(Collective.ALL_GATHER, communicator, buffers)))
        calls.append(world.submit(communicator, all_reduce(communicator, gathered)))
        results.append(gathered)
    world.run(calls)
    assert all(torch.equal(result, torch.tensor([9, 9, 9])) for result in results)


def test_calls_without_shared_memory_run_concurrently() -> None:
    world = World(2)
    check(world, Collective.ALL_REDUCE, 1)
    apart = [bind(Collective.ALL_REDUCE, world.communicators[0], 10) for _ in range(3)]
    shared = torch.arange(10)
    reading = [
        request(Collective.ALL_GATHER, world.communicators[0], {Buffer.INPUT: [shared], Buffer.OUTPUT: outputs})
        for outputs in (list(torch.zeros(20, dtype=torch.int64).split(10)) for _ in range(2))
    ]
    assert not any(one.request.follows(other.request) for one in apart for other in apart if one is not other)
    assert not reading[1].follows(reading[0])
    assert reading[0].follows(all_reduce(world.communicators[0], shared[5:]))
    assert all_reduce(world.communicators[0], shared[5:]).follows(reading[0])
    for each in apart:
        world.submit(world.communicators[0], each.request)
    assert [each.request.running for each in apart] == [1, 1, 1]


# -- groups ------------------------------------------------------------------------------------------------------------


def test_the_opening_gives_all_ranks_one_new_instance() -> None:
    world = World(4)
    check(world, Collective.ALL_REDUCE, 10)
    instances = {communicator.instance for communicator in world.communicators.values()}
    assert len(instances) == 1 and world.communicators[0].digest[:16] not in instances
    again = World(4, seed=1)
    check(again, Collective.ALL_REDUCE, 10)
    assert again.communicators[0].digest == world.communicators[0].digest
    assert again.communicators[0].instance not in instances


def test_a_group_of_one_sends_nothing() -> None:
    world = World(1)
    for kind in KINDS:
        check(world, kind, 100)
    assert not world.wires.streams


def test_groups_do_not_wait_for_each_other() -> None:
    """Two groups whose members call in opposite order, and a third whose other member never calls."""
    world = World(3)
    left, right = world.add_communicator("left", (0, 1)), world.add_communicator("right", (0, 1))
    stuck = world.add_communicator("stuck", (0, 2))
    waiting = bind(Collective.ALL_REDUCE, stuck[0], 10)
    world.submit(stuck[0], waiting.request)
    bound = []
    for communicator in (left[0], right[0], right[1], left[1]):
        bound.append(bind(Collective.ALL_REDUCE, communicator, 100_000))
        world.submit(communicator, bound[-1].request)
    world.run([each.request for each in bound])
    assert all(each.request.done and each.right() for each in bound)
    assert not waiting.request.done


def test_a_group_waits_until_its_peer_has_created_it() -> None:
    world = World(2)
    early = world.engines[0].add_communicator("new", (0, 1))
    first = bind(Collective.BROADCAST, early, 50)
    world.submit(early, first.request)
    world.run([first.request])
    late = world.engines[1].add_communicator("new", (0, 1))
    second = bind(Collective.BROADCAST, late, 50)
    world.submit(late, second.request)
    world.run([first.request, second.request])
    assert second.request.done and second.right() and first.request.error is None


def test_a_removed_group_does_not_affect_the_others() -> None:
    world = World(3)
    communicators = world.add_communicator("short", (0, 1, 2))
    bound = [bind(Collective.ALL_GATHER, communicators[rank], 10) for rank in range(3)]
    for rank, each in enumerate(bound):
        world.submit(communicators[rank], each.request)
    world.run([each.request for each in bound])
    for rank, engine in enumerate(world.engines):
        engine.remove_communicator(communicators[rank])
    check(world, Collective.ALL_REDUCE, 10)
    assert all(engine.failure is None for engine in world.engines)


# -- keys at work ------------------------------------------------------------------------------------------------------


def test_every_link_changes_its_key_phase_during_a_collective() -> None:
    """The counters start as if a million frames had been sent on each link."""
    world = World(3, table=TABLES["rings and chains"])
    check(world, Collective.ALL_REDUCE, 10)
    communicators = world.communicators.values()
    sealers = [communicator.outboxes[(communicator.rank + 1) % 3].sealer for communicator in communicators]
    openers = [communicator.inboxes[(communicator.rank - 1) % 3].opener for communicator in communicators]
    for end in (*sealers, *openers):
        end.counter = TURN - 3
    for communicator in communicators:
        communicator.origin.counter = TURN - 2
    for _ in range(5):
        check(world, Collective.ALL_REDUCE, 10)
    assert [end.key_phase for end in (*sealers, *openers) if isinstance(end, (Sealer, Opener))] == [1] * 6
    assert world.communicators[0].origin.counter > TURN


# -- memory ------------------------------------------------------------------------------------------------------------


def segments_made(kind: Collective, passes: int) -> int:
    """Return the largest number of segments that one of three workers needed for parts of so many passes."""
    world = World(3, table=TABLES["rings and chains"], capacity=1 << 20)
    check(world, kind, passes * ONE_PASS * (3 if kind is Collective.ALL_REDUCE else 1))
    return max(engine.pool.made for engine in world.engines)


@pytest.mark.parametrize("kind", [Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.BROADCAST], ids=name_of)
def test_segments_in_flight_do_not_grow_with_the_tensor(kind: Collective) -> None:
    assert segments_made(kind, 4) <= segments_made(kind, 2) <= 16


def test_a_late_rank_costs_a_bounded_number_of_segments() -> None:
    """In a chain, a worker keeps what it cannot forward yet: a few passes, not the whole tensor."""
    world = World(3, table=TABLES["rings and chains"], capacity=1 << 20)
    bound = [bind(Collective.BROADCAST, world.communicators[rank], 12 * ONE_PASS) for rank in range(3)]
    for rank in (0, 1):
        world.submit(world.communicators[rank], bound[rank].request)
    world.run([each.request for each in bound])
    assert not bound[0].request.done
    world.submit(world.communicators[2], bound[2].request)
    world.run([each.request for each in bound])
    assert all(each.request.done and each.right() for each in bound)
    assert max(engine.pool.made for engine in world.engines) <= 40 < 12 * PASS_BYTES // SEGMENT_BYTES


def test_segments_are_returned_to_the_pool() -> None:
    world = World(3)
    check(world, Collective.ALL_REDUCE, 10_000)
    made = [engine.pool.made for engine in world.engines]
    for _ in range(20):
        for kind in KINDS:
            check(world, kind, 10_000)
    assert max(engine.pool.made for engine in world.engines) <= max(made) + 8
