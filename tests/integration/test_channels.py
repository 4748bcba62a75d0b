"""Several channels between machines, with real workers, each of which stands for a machine."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringfence
from ringfence.errors import RingfenceError
from tests import device
from tests.integration import device_scenarios
from tests.integration.device_scenarios import SCENARIOS
from tests.integration.test_faults_fork import in_a_child, sockets
from tests.key_audit import keys_held
from tests.limits import FAR, FAR_OUTAGE, HANG, no_early_blame
from tests.pool import Failure, Pool, values

pytestmark = pytest.mark.processes

COUNT = 700_003  # elements of float32 in a part: more than 2 MiB, and not a multiple of anything


def channels(number: int) -> dict[str, str]:
    return {"RINGFENCE_CHANNELS": str(number)}


def whole(seed: int, count: int = COUNT) -> torch.Tensor:
    """Whole numbers, whose sums are exact in any order."""
    return torch.randint(-1000, 1000, (count,), generator=torch.Generator().manual_seed(seed)).float()


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("ringfence channel"))


def sent_by_channel() -> list[int]:
    """The payload that this worker has sent on each channel."""
    engine = dist.group.WORLD._session.engine
    each = [engine.communicators, *(channel.communicators for channel in engine.channels)]
    return [sum(link.payload_sent for link in one.links()) for one in each]


# -- results -------------------------------------------------------------------------------------------------------------


def every_collective() -> dict[str, list[list[float]]]:
    """The results of all collectives on large tensors, and of small ones between them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, list[torch.Tensor]] = {}
    total = whole(rank, COUNT * size)
    dist.all_reduce(total)
    small = whole(rank, 100)
    dist.all_reduce(small)
    longest = whole(rank)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    found["all_reduce"] = [total, small, longest]
    reduced = whole(rank, COUNT * size)
    dist.reduce(reduced, size - 1)
    found["reduce"] = [reduced if rank == size - 1 else torch.zeros(1)]
    sent = whole(rank)
    dist.broadcast(sent, 1)
    found["broadcast"] = [sent]
    gathered = [torch.empty(COUNT) for _ in range(size)]
    dist.all_gather(gathered, whole(rank))
    found["all_gather"] = gathered
    scattered = torch.empty(COUNT)
    dist.reduce_scatter(scattered, [whole(size * rank + each) for each in range(size)])
    found["reduce_scatter"] = [scattered]
    parts = [torch.empty(COUNT) for _ in range(size)] if rank == 0 else None
    dist.gather(whole(rank), parts, 0)
    found["gather"] = parts or []
    mine = torch.empty(COUNT)
    dist.scatter(mine, [whole(each) for each in range(size)] if rank == 1 else None, 1)
    found["scatter"] = [mine]
    arrived = torch.empty(COUNT * size)
    dist.all_to_all_single(arrived, whole(rank, COUNT * size))
    found["all_to_all"] = [arrived]
    dist.barrier()
    return {
        name: [[*tensor[::10_007].tolist(), tensor.sum().item()] for tensor in each] for name, each in found.items()
    }


@pytest.mark.parametrize(("world", "number"), [(2, 2), (2, 3), (4, 2)])
def test_every_collective_gives_gloos_result(pool: Pool, world: int, number: int) -> None:
    expected = pool.check(every_collective, world, "gloo")
    assert pool.check(every_collective, world, env=channels(number)) == expected
    for sent in pool.check(sent_by_channel, world, env=channels(number)):
        assert len(sent) == number and min(sent[1:]) > 0.15 * sent[0]


def test_the_python_data_plane_has_channels(pool: Pool) -> None:
    expected = pool.check(every_collective, 2, "gloo")
    with pool.fresh([["env", f"RINGFENCE_DATAPLANE={plane}"] for plane in ("python", "compiled")]) as mixed:
        assert mixed.check(every_collective, 2, env=channels(2)) == expected


def sums() -> list[bytes]:
    """Bytes of sums whose value depends on the order of their terms."""
    torch.manual_seed(dist.get_rank())
    tensor, part = torch.randn(COUNT * dist.get_world_size()), torch.empty(COUNT)
    dist.reduce_scatter_tensor(part, tensor)
    dist.all_reduce(tensor)
    return [tensor.numpy().tobytes(), part.numpy().tobytes()]


def test_sums_are_the_same_bits_on_every_rank_and_in_every_run(pool: Pool) -> None:
    """With one number of channels. A reduce-scatter adds in the same order with any number; an all-reduce does not."""
    one = pool.check(sums, 3)
    for number in (1, 2, 2, 4):
        found = pool.check(sums, 3, env=channels(number))
        assert len({each for each, _ in found}) == 1
        assert [part for _, part in found] == [part for _, part in one]
        assert number > 1 or found == one
    assert pool.check(sums, 3, env=channels(4)) == found


def overlapping() -> bool:
    """A large call, and small ones on memory that its last channel still writes, all at once."""
    right = True
    for _ in range(5):
        tensor = torch.ones(4 * COUNT)
        tail, strided = tensor[-100:], torch.ones(2, 3 * COUNT).t()
        works = [dist.all_reduce(tensor, async_op=True), dist.all_reduce(tail, async_op=True)]
        works += [dist.all_reduce(strided, async_op=True), dist.all_reduce(tensor, async_op=True)]
        for work in works:
            work.wait()
        right &= bool((tensor[:-100] == 4).all() and (tensor[-100:] == 8).all() and (strided == 2).all())
    return right


def test_calls_on_the_same_memory_keep_their_order(pool: Pool) -> None:
    assert pool.check(overlapping, 2, env=channels(2)) == [True, True]


def small_then_groups() -> tuple[list[int], list[int], float]:
    dist.all_reduce(torch.ones(500_000))
    before = sent_by_channel()
    total = 0.0
    for _ in range(3):
        group = dist.new_group([0, 1, 2])
        tensor = torch.ones(COUNT * 3)
        if dist.get_rank() < 3:
            dist.all_reduce(tensor, group=group)
            total += tensor.sum().item() / len(tensor)
            dist.destroy_process_group(group)
    return before, sent_by_channel(), total


def test_small_calls_use_one_channel_and_groups_have_their_own(pool: Pool) -> None:
    results = pool.check(small_then_groups, 4, env=channels(2), renew=True)
    for rank, (before, after, total) in enumerate(results):
        assert before[0] and not before[1]
        assert total == (9 if rank < 3 else 0) and bool(after[1]) == (rank < 3)


def named_threads() -> tuple[list[str], int]:
    dist.all_reduce(torch.ones(COUNT * 4))
    return threads(), len(dist.group.WORLD._session.engine.channels)


def test_a_group_on_shared_machines_has_one_channel(pool: Pool) -> None:
    pool.check(named_threads, 4, "machines", env=channels(2))
    assert [sent[1] for sent in pool.check(sent_by_channel, 4, "machines", env=channels(2))] == [0] * 4


def test_threads_end_with_the_session(pool: Pool) -> None:
    assert pool.check(named_threads, 2, env=channels(3)) == [(["ringfence channel 1", "ringfence channel 2"], 2)] * 2
    assert pool.check(named_threads, 2) == [([], 0)] * 2


def send_and_leave() -> float:
    """The root leaves as soon as its part is written; the other worker still gets all of it."""
    tensor = torch.full((COUNT,), float(dist.get_rank() == 0))
    dist.broadcast(tensor, 0)
    dist.destroy_process_group()
    return tensor.mean().item()


def test_a_worker_that_left_is_not_missed(pool: Pool) -> None:
    with pool.fresh() as fresh:
        assert fresh.check(send_and_leave, 2, env=channels(2)) == [1.0, 1.0]


# -- agreement -------------------------------------------------------------------------------------------------------------


def test_rank_0_decides_for_the_run(pool: Pool) -> None:
    assert pool.check(named_threads, 2, env=[channels(2), {}]) == [(["ringfence channel 1"], 1)] * 2
    found = pool.join("ringfence", 2, env=[{}, channels(1)], renew=True)
    assert values(found) == [None, None]


def test_another_number_than_the_runs_fails_every_worker(pool: Pool) -> None:
    """The others have joined already; their first call raises."""
    with pool.fresh() as fresh:
        found = fresh.join("ringfence", 2, env=[channels(2), channels(4)], seconds=FAR, timeout=HANG)
        assert "RINGFENCE_CHANNELS is 4 here, and rank 0 gave the run 2" in str(found[1])
        first = found[0] or fresh.start(dist.barrier, 2).wait(HANG)[0]
    assert isinstance(first, Failure) and "worker 1" in str(first)


# -- failures --------------------------------------------------------------------------------------------------------------


def caught(work: Any) -> tuple[str, str]:
    try:
        while True:
            work()
    except RingfenceError as error:
        return type(error).__name__, str(error)


def failing(pool: Pool, function: Any, world: int, *args: Any) -> list[Any]:
    """Run a function on workers with two channels; no timeout is near that could end its calls."""
    env = channels(2) | FAR_OUTAGE
    return pool.run(function, world, args=args, env=env, seconds=FAR, timeout=HANG, renew=True)


def meet() -> None:
    """Wait, without a collective, until every worker has completed what came before."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"here {dist.get_rank()}", "")
    store.wait([f"here {rank}" for rank in range(dist.get_world_size())], timedelta(seconds=HANG))


def cut_a_channel(rank: int) -> tuple[str, str, int]:
    """Run all-reduces; one worker loses a connection of its last channel in the middle. Return the error and its peer."""
    tensor, peer = torch.ones(4 * COUNT), rank
    dist.all_reduce(tensor)
    meet()
    if dist.get_rank() == rank:
        channel = dist.group.WORLD._session.engine.channels[-1]
        link = next(link for link in channel.communicators.links() if link.stream is not None)
        peer = link.worker
        link.stream.shutdown(socket.SHUT_RDWR)
    return *caught(lambda: dist.all_reduce(tensor.fill_(1))), peer


@pytest.mark.promise("A failure of one channel makes every worker raise.")
@pytest.mark.parametrize("world", [2, 4])
def test_a_connection_that_ends_on_one_channel_fails_every_worker(pool: Pool, world: int) -> None:
    found = values(failing(pool, cut_a_channel, world, world - 1))
    ends = world - 1, found[-1][2]  # of the connection
    for kind, message, _ in found:
        assert kind in ("PeerLostError", "AbortedError")
        assert any(f"worker {end}" in message for end in ends), message
    assert any(kind == "PeerLostError" for kind, _, _ in found)


@no_early_blame
def exit_in_the_middle() -> tuple[str, str]:
    tensor = torch.ones(4 * COUNT)
    dist.all_reduce(tensor)
    meet()
    if dist.get_rank() == 2:
        dist.all_reduce(tensor, async_op=True)
        os._exit(9)
    return caught(lambda: dist.all_reduce(tensor.fill_(1)))


@pytest.mark.promise("A killed worker makes every other worker raise, and the error names it.")
def test_a_killed_worker_is_named(pool: Pool) -> None:
    with pool.fresh() as fresh:
        found = failing(fresh, exit_in_the_middle, 3)
    for kind, message in values(found[:2]):
        assert kind in ("PeerLostError", "AbortedError") and "worker 2" in message


def come_late() -> tuple[str, str]:
    tensor = torch.ones(4 * COUNT)
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        return caught(lambda: dist.recv(tensor[:1], 0))  # which rank 0 never sends
    dist.group.WORLD.set_timeout(timedelta(seconds=2))  # the other's is far away
    return caught(lambda: dist.all_reduce(tensor))


def test_a_timeout_fails_every_worker_and_names_the_late_one(pool: Pool) -> None:
    (kind, message), late = values(failing(pool, come_late, 2))
    assert kind == "CollectiveTimeoutError" and "it waits for worker 1" in message
    assert late[0] == "AbortedError" and "CollectiveTimeoutError" in late[1] and "it waits for worker 1" in late[1]


def end_during_a_call() -> tuple[str, bool]:
    """End the group while all channels move a tensor; nothing touches its memory afterwards."""
    tensor = torch.ones(40 * COUNT)
    dist.all_reduce(tensor[: 4 * COUNT])
    meet()
    work = dist.all_reduce(tensor, async_op=True)
    dist.group.WORLD.abort()
    tensor.fill_(7)
    try:
        work.wait()
    except RingfenceError as error:
        return type(error).__name__, bool((tensor == 7).all())
    return "", True


def test_memory_is_the_callers_once_a_call_has_failed(pool: Pool) -> None:
    with pool.fresh() as fresh:
        for _, untouched in fresh.check(end_during_a_call, 2, env=channels(2)):
            assert untouched


def fork() -> tuple[set[str], int]:
    dist.all_reduce(torch.ones(4 * COUNT))
    engine = dist.group.WORLD._session.engine
    links = [link for channel in engine.channels for link in channel.communicators.links()]
    ours = {os.readlink(f"/proc/self/fd/{link.stream.fileno()}") for link in links if link.stream is not None}
    assert ours
    kept, held = in_a_child(lambda: (sockets(), keys_held()))
    dist.all_reduce(torch.ones(4 * COUNT))
    return kept & ours, len(held)


@pytest.mark.promise("A child that Python forks holds no key and no connection, and can neither seal nor open.")
def test_a_forked_child_holds_nothing_of_a_channel(pool: Pool) -> None:
    assert pool.check(fork, 2, env=channels(2), renew=True) == [(set(), 0)] * 2


# -- device tensors --------------------------------------------------------------------------------------------------------


def on_a_device() -> tuple[bool, list[int]]:
    where = device.load()
    rank = dist.get_rank()
    tensor = whole(rank, 8 * COUNT).to(where)
    dist.all_reduce(tensor)
    expected = sum((whole(each, 8 * COUNT) for each in range(2)), torch.zeros(8 * COUNT))
    gathered = torch.empty(8 * COUNT, device=where)
    dist.all_gather_into_tensor(gathered, whole(rank, 4 * COUNT).to(where))
    parts = torch.cat([whole(each, 4 * COUNT) for each in range(2)])
    return bool((tensor.cpu() == expected).all() and (gathered.cpu() == parts).all()), sent_by_channel()


def test_device_tensors_pass_through_two_channels(devices: Pool) -> None:
    for right, (first, second) in devices.check(on_a_device, 2, env=channels(2), renew=True):
        assert right and 0.7 < second / first < 1.3


def scenarios(confidential: bool) -> tuple[list[str], bool]:
    """Every situation in which a staged collective must wait, with all passes spread over both channels."""
    dist.barrier()
    wrong = device_scenarios.run(SCENARIOS, None, confidential)
    return wrong, min(sent_by_channel()) > 1 << 20


@pytest.mark.parametrize(
    "confidential", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["normal", "confidential"]
)
def test_staged_collectives_wait_as_they_must_over_two_channels(devices: Pool, confidential: bool) -> None:
    found = devices.check(scenarios, 2, args=(confidential,), env=channels(2), renew=True, timeout=HANG)
    assert found == [([], True)] * 2


# -- counters --------------------------------------------------------------------------------------------------------------


def counted() -> int:
    before = ringfence.counters().peers[0].payload_sent if ringfence.counters().peers else 0
    dist.broadcast(torch.ones(10 * COUNT), 0)
    return ringfence.counters().peers[0].payload_sent - before


def test_counters_add_up_all_channels(pool: Pool) -> None:
    pool.check(counted, 2, env=channels(2), renew=True)
    assert pool.check(counted, 2, env=channels(2))[0] == 40 * COUNT
