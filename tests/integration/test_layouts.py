"""Large collectives of real workers, alone on their machines and several on each: every schedule against a plain sum."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ringfence
from tests.integration.test_channels import whole
from tests.pool import Pool

pytestmark = pytest.mark.processes

COUNT = 600_011  # elements of float32: parts and passes end at odd places


def large_collectives() -> list[str]:
    """Run them; return the names of those with a wrong result on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part = COUNT // size
    wrong = []
    total = whole(rank, COUNT)
    dist.all_reduce(total)
    if not torch.equal(total, sum(whole(each, COUNT) for each in range(size))):
        wrong.append("all_reduce")
    gathered = torch.empty(part * size)
    dist.all_gather_into_tensor(gathered, whole(rank, part))
    if not torch.equal(gathered, torch.cat([whole(each, part) for each in range(size)])):
        wrong.append("all_gather")
    scattered = torch.empty(part)
    dist.reduce_scatter_tensor(scattered, whole(rank, part * size))
    expected = sum(whole(each, part * size) for each in range(size))
    if not torch.equal(scattered, expected[rank * part : (rank + 1) * part]):
        wrong.append("reduce_scatter")
    sent = whole(rank, COUNT)
    dist.broadcast(sent, size - 1)
    if not torch.equal(sent, whole(size - 1, COUNT)):
        wrong.append("broadcast")
    return wrong


def spread(*machines: int) -> list[dict[str, str]]:
    """The environment of each worker, for machines with these numbers of workers."""
    hosts = [f"127.0.1.{number}" for number, workers in enumerate(machines, 1) for _ in range(workers)]
    return [{"RINGFENCE_SAME_HOST": "shared", "RINGFENCE_INTERFACE": host} for host in hosts]


IN_THE_GATE = [(1,) * 9, (4, 4), (3, 1), (1,) * 4, (2,) * 5]
AT_NIGHT = [*((1,) * size for size in range(2, 13)), (8,), (1,) * 8 + (2,), (2,) * 6]


@pytest.mark.parametrize(
    "machines", [*IN_THE_GATE, *(pytest.param(each, marks=pytest.mark.nightly) for each in AT_NIGHT)], ids=str
)
def test_large_collectives_on_machines(pool: Pool, machines: tuple[int, ...]) -> None:
    world = sum(machines)
    assert pool.check(large_collectives, world, env=spread(*machines)) == [[]] * world


def exchange_small_parts(part: int) -> tuple[bool, list[int]]:
    """Return whether the result is right, and the workers that this one sealed for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    given = torch.arange(float(part * size)) + 1000 * rank
    found = torch.empty_like(given)
    before = {peer.worker: peer.sealed_sent for peer in ringfence.counters().peers}
    dist.all_to_all_single(found, given)
    sealed = [peer.worker for peer in ringfence.counters().peers if peer.sealed_sent > before.get(peer.worker, 0)]
    expected = torch.cat([torch.arange(rank * part, (rank + 1) * part) + 1000.0 * each for each in range(size)])
    return torch.equal(found, expected), sealed


@pytest.mark.nightly  # 16 processes; the gate runs the schedule in memory
@pytest.mark.parametrize("machines", [(4,) * 4, (8, 8)], ids=str)
def test_an_all_to_all_of_small_parts_passes_through_the_own_column(pool: Pool, machines: tuple[int, ...]) -> None:
    workers = machines[0]
    for part in (1, 5000):
        found = pool.check(exchange_small_parts, 16, args=(part,), env=spread(*machines))
        for rank, (right, sealed) in enumerate(found):
            assert right
            assert sealed == [each for each in range(16) if each % workers == rank % workers and each != rank]
