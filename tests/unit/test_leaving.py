"""A worker that leaves while others dial it: their calls fail at once, at every stage of the handshake."""

from __future__ import annotations

import pytest
import torch

from tests.memory_cluster import World, all_reduce

LEAVER = 2


@pytest.mark.parametrize("deliveries", range(6))
def test_dialling_a_leaving_worker_fails_at_once(deliveries: int) -> None:
    """The leaver answers what arrives in so many deliveries, and never joins the collective."""
    world = World(3)
    others = [rank for rank in range(world.size) if rank != LEAVER]
    requests = [
        world.submit(world.communicators[rank], all_reduce(world.communicators[rank], torch.ones(10)))
        for rank in others
    ]
    for _ in range(deliveries):
        for engine in world.engines:
            engine.run_ready()
        world.wires.deliver()
    world.engines[LEAVER].leave()
    for _ in range(20):  # the leaver is not driven any more
        for rank in others:
            world.engines[rank].run_ready()
        world.wires.deliver()
    for request in requests:
        assert request.done
        assert f"worker {LEAVER} left the run" in str(request.error)
