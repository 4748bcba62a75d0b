"""Collectives of Python objects, with different sizes on each rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.pool import Pool


def thing(rank: int, size: int = 0) -> dict[str, Any]:
    return {"rank": rank, "bytes": bytes(size * rank), "nested": [{"é": (rank, None)}]}


def everywhere(size: int) -> None:
    world = dist.get_world_size()
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, thing(dist.get_rank(), size))
    assert gathered == [thing(rank, size) for rank in range(world)]


def from_one_to_all(size: int) -> None:
    objects = [thing(1, size), 2, None] if dist.get_rank() == 1 else [None] * 3
    dist.broadcast_object_list(objects, 1)
    assert objects == [thing(1, size), 2, None]


def from_one_to_each(size: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = [None]
    dist.scatter_object_list(mine, [thing(r, size) for r in range(world)] if rank == 1 else None, 1)
    assert mine == [thing(rank, size)]


def from_all_to_one(size: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] | None = [None] * world if rank == 1 else None
    dist.gather_object(thing(rank, size), gathered, 1)
    assert gathered is None or gathered == [thing(r, size) for r in range(world)]


def from_one_to_one(size: int) -> None:
    if dist.get_rank() == 0:
        dist.send_object_list([thing(5, size), "two"], 1)
    elif dist.get_rank() == 1:
        received: list[Any] = [None, None]
        dist.recv_object_list(received, 0)
        assert received == [thing(5, size), "two"]


def test_objects_of_unequal_sizes(pool: Pool, backend: str) -> None:
    for way in (everywhere, from_one_to_all, from_one_to_each, from_all_to_one, from_one_to_one):
        for size in (0, 100_003):
            pool.check(way, 3, backend, (size,))
