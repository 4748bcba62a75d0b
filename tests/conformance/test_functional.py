"""Other interfaces to the same collectives: functional, differentiable, coalesced and batched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.pool import Pool


def own(rank: int, count: int = 4) -> Tensor:
    return torch.arange(count, dtype=torch.float32) + 10 * rank


def expected_sum(world: int, count: int = 4) -> Tensor:
    return sum((own(rank, count) for rank in range(world)), torch.zeros(count))


def functional_collectives() -> list[str]:
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    mine, summed = own(rank, 2 * world), expected_sum(world, 2 * world)
    gathered = torch.cat([own(r, 2 * world) for r in range(world)])
    part = summed.chunk(world)[rank]
    exchanged = torch.cat([own(r, 2 * world).chunk(world)[rank] for r in range(world)])
    even = [2] * world
    ring = [(r + 1) % world for r in range(world)]
    results: dict[str, tuple[Tensor, Tensor]] = {
        "all_reduce": (functional.all_reduce(mine, "sum", group), summed),
        "average": (functional.all_reduce(mine, "avg", group), summed / world),
        "all_gather": (functional.all_gather_tensor(mine, 0, group), gathered),
        "reduce_scatter": (functional.reduce_scatter_tensor(mine, "sum", 0, group), part),
        "all_reduce_coalesced": (functional.all_reduce_coalesced([mine, mine * 2], "sum", group)[1], summed * 2),
        "all_gather_coalesced": (functional.all_gather_into_tensor_coalesced([mine, -mine], group)[1], -gathered),
        "reduce_scatter_coalesced": (
            functional.reduce_scatter_tensor_coalesced([mine, -mine], "sum", [0, 0], group)[1],
            -part,
        ),
        "broadcast": (functional.broadcast(mine, world - 1, group), own(world - 1, 2 * world)),
        "all_to_all": (functional.all_to_all_single(mine, even, even, group), exchanged),
        "permute": (functional.permute_tensor(mine, ring, group), own((rank - 1) % world, 2 * world)),
    }
    assert torch.equal(mine, own(rank, 2 * world))
    return [
        name for name, (actual, expected) in results.items() if not torch.allclose(torch.as_tensor(actual), expected)
    ]


def test_functional_collectives(pool: Pool, backend: str) -> None:
    assert pool.check(functional_collectives, 3, backend) == [[]] * 3


def gradients() -> list[str]:
    """Each differentiable collective, with the expected gradient of a loss of rank-weighted sums."""
    rank, world = dist.get_rank(), dist.get_world_size()
    weights = [float(r + 1) for r in range(world)]
    every = sum(weights)

    def buffers() -> list[Tensor]:
        return [torch.empty(4) for _ in range(world)]

    def copies(x: Tensor) -> list[Tensor]:
        return [x * 1 for _ in range(world)]

    group = dist.group.WORLD  # explicit: torch evaluates the default of these functions on import
    last = world - 1
    ways: dict[str, tuple[Callable[[Tensor], Any], float]] = {
        "all_reduce": (lambda x: differentiable.all_reduce(x * 1, group=group), every),
        "all_gather": (lambda x: differentiable.all_gather(x, group)[last], every if rank == last else 0.0),
        "broadcast": (lambda x: differentiable.broadcast(x * 1, 0, group), every if rank == 0 else 0.0),
        "reduce_scatter": (lambda x: differentiable.reduce_scatter(torch.empty(4), copies(x), group=group), every),
        "all_to_all": (lambda x: sum(differentiable.all_to_all(buffers(), copies(x), group), torch.zeros(4)), every),
    }
    faults = []
    for name, (way, gradient) in ways.items():
        x = own(rank).requires_grad_()
        (way(x).sum() * weights[rank]).backward()
        assert x.grad is not None
        if not torch.allclose(x.grad, torch.full((4,), gradient)):
            faults.append(f"{name}: {x.grad} instead of {gradient}")
    return faults


def test_differentiable_collectives(pool: Pool, backend: str) -> None:
    assert pool.check(gradients, 3, backend) == [[]] * 3


def coalesced(asynchronous: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [own(rank, count) for count in (1, 5, 1000)]
    with _coalescing_manager(async_ops=asynchronous) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    if asynchronous:
        manager.wait()
    for tensor in tensors:
        assert torch.equal(tensor, expected_sum(world, tensor.numel()))
    outputs = [torch.empty(world * count) for count in (1, 5)]
    with _coalescing_manager(async_ops=asynchronous) as manager:
        for output in outputs:
            dist.all_gather_into_tensor(output, own(rank, output.numel() // world))
    if asynchronous:
        manager.wait()
    for output in outputs:
        assert torch.equal(output, torch.cat([own(r, output.numel() // world) for r in range(world)]))
    parts = [torch.empty(count) for count in (2, 3)]
    with _coalescing_manager(async_ops=asynchronous) as manager:
        for part in parts:
            dist.reduce_scatter_tensor(part, own(rank, part.numel() * world))
    if asynchronous:
        manager.wait()
    for part in parts:
        assert torch.equal(part, expected_sum(world, part.numel() * world).chunk(world)[rank])


def test_coalescing_manager(pool: Pool, backend: str) -> None:
    pool.check(coalesced, 3, backend, (False,))
    pool.check(coalesced, 3, backend, (True,))


def batched() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    incoming = [torch.zeros(5) for _ in range(world)]
    peers = [peer for peer in range(world) if peer != rank]
    operations = [dist.P2POp(dist.isend, own(rank * world + peer, 5), peer) for peer in peers]
    operations += [dist.P2POp(dist.irecv, incoming[peer], peer) for peer in peers]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for peer in peers:
        assert torch.equal(incoming[peer], own(peer * world + rank, 5))


def test_batched_point_to_point(pool: Pool, backend: str) -> None:
    pool.check(batched, 4, backend)


def then_chain() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    future = dist.all_reduce(own(rank), async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert torch.equal(doubled.wait(), 2 * expected_sum(world))


def test_callback_sees_the_result(pool: Pool, backend: str) -> None:
    pool.check(then_chain, 3, backend)
