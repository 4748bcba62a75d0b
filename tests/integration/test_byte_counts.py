"""Bytes that a collective seals, puts on the wire and keeps inside machines: counted, they equal what its schedule says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringfence
from ringfence.collectives import Collective, Thresholds
from ringfence.keys import SEGMENT_BYTES
from ringfence.machines import spread
from ringfence_lab.bench.byte_counts import Traffic, traffic
from tests.pool import IN_SHARED_MEMORY, ON_TWO_MACHINES, Pool
from tests.progress_thread import between_steps

MACHINES = {  # the machine of each of four workers
    "one machine": (1, 1, 1, 1),
    "two machines": (1, 2, 1, 2),
    "two machines in order": (1, 1, 2, 2),
    "uneven machines": (1, 1, 1, 2),
    "four machines": (1, 2, 3, 4),
}
SMALL, LARGE = 40, 4 * 5 * SEGMENT_BYTES + 160  # elements times four; the larger one is executed in several passes
ODD = 700_004  # bytes of a tensor that does not divide evenly
KINDS = [kind for kind in Collective if kind not in (Collective.GROUP_OPENING, Collective.BARRIER)]


def call(kind: Collective, size: int, root: int) -> None:
    """Call a collective of so many bytes in all."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole, part = torch.ones(size // 4), torch.ones(size // 4 // ranks)
    parts = list(torch.ones(size // 4 // ranks * ranks).chunk(ranks)) if rank == root else None
    match kind:
        case Collective.ALL_REDUCE:
            dist.all_reduce(whole)
        case Collective.REDUCE:
            dist.reduce(whole, root)
        case Collective.BROADCAST:
            dist.broadcast(whole, root)
        case Collective.ALL_GATHER:
            dist.all_gather_single(whole, part)
        case Collective.REDUCE_SCATTER:
            dist.reduce_scatter_single(part, whole)
        case Collective.GATHER:
            dist.gather(part, parts, root)
        case Collective.SCATTER:
            dist.scatter(part, parts, root)
        case Collective.ALL_TO_ALL:
            dist.all_to_all_single(torch.empty_like(whole), whole)


def sent() -> Traffic:
    peers = between_steps(ringfence.counters).peers
    return Traffic(
        sum(peer.sealed_sent for peer in peers),
        sum(peer.wire_sent for peer in peers),
        sum(peer.local_sent for peer in peers),
    )


def counted(calls: list[tuple[Collective, int, int]]) -> list[Traffic]:
    """Call each collective twice, so that its links exist, and return what the second call sent."""
    found = []
    for number, each in enumerate(calls):
        call(*each)
        meet(f"{number} warm")
        before = sent()
        meet(f"{number} counted")
        call(*each)
        meet(f"{number} done")
        found.append(Traffic(*(after - was for was, after in zip(before, sent(), strict=True))))
    return found


def meet(name: str) -> None:
    """Wait, without a collective, until all workers are here: they have received everything, so it was written."""
    store = dist.distributed_c10d._get_default_store()
    if store.add(name, 1) == dist.get_world_size():
        store.set(f"{name}, all", "")
    store.wait([f"{name}, all"])


def calls() -> list[tuple[Collective, int, int]]:
    sizes: dict[Collective, tuple[int, ...]] = dict.fromkeys(KINDS, (SMALL * 4, LARGE))
    for kind in (Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST):
        sizes[kind] = (SMALL * 4, ODD, LARGE)
    rooted = (Collective.REDUCE, Collective.BROADCAST, Collective.GATHER, Collective.SCATTER)
    return [(kind, size, 2 if kind in rooted else 0) for kind in KINDS for size in sizes[kind]]


@pytest.fixture(scope="module", params=["compiled", "python"])
def workers(request: pytest.FixtureRequest, pool: Pool) -> Any:
    with pool.fresh([["env", f"RINGFENCE_DATAPLANE={request.param}"]] * 4) as fresh:
        yield fresh


@pytest.mark.parametrize("name", MACHINES)
def test_counted_bytes_equal_those_of_the_schedule(workers: Pool, name: str) -> None:
    env = [{"RINGFENCE_INTERFACE": f"127.0.1.{machine}"} for machine in MACHINES[name]]
    results = workers.check(counted, 4, ON_TWO_MACHINES, args=(calls(),), env=env)
    for number, (kind, size, root) in enumerate(calls()):
        for rank in range(4):
            expected = traffic(kind, size, 4, spread(MACHINES[name]), root=root, only=[rank])
            assert results[rank][number] == expected, (kind, size, rank)


@pytest.mark.parametrize("way", ["ringfence", IN_SHARED_MEMORY])
def test_workers_of_one_machine_seal_everything_or_nothing(workers: Pool, way: str) -> None:
    """With one host in the roster, the setting decides."""
    machines = spread((1, 1, 1, 1)) if way == IN_SHARED_MEMORY else ()
    results = workers.check(counted, 4, way, args=(calls(),))
    for number, (kind, size, root) in enumerate(calls()):
        total = Traffic(*(sum(results[rank][number][which] for rank in range(4)) for which in range(3)))
        assert total == traffic(kind, size, 4, machines, root=root)
        assert (total.sealed == total.wire == 0) if machines else not total.local


def test_a_machine_sends_what_one_worker_alone_on_it_would_send() -> None:
    """Two machines of four workers: an all-reduce seals twice the tensor, and not fourteen times as in a flat ring."""
    size = 100 << 20
    two_levels = traffic(Collective.ALL_REDUCE, size, 8, spread((1, 1, 1, 1, 2, 2, 2, 2)))
    assert two_levels.sealed == traffic(Collective.ALL_REDUCE, size, 2).sealed == 2 * size
    assert traffic(Collective.ALL_REDUCE, size, 8).sealed == 14 * size
    assert traffic(Collective.ALL_REDUCE, size, 8, table=Thresholds(small=1 << 40)).sealed == 24 * size  # doubling
