"""Large collectives of real workers, alone on their machines and several on each: every schedule against a plain sum."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

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
