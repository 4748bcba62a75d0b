"""A worker that leaves while others are still dialling it: they learn of it at once, at every stage of the dial."""

from __future__ import annotations

import pytest
import torch

from tests.memory_cluster import World, all_reduce

LEAVER = 2


@pytest.mark.parametrize("deliveries", range(6))
def test_whoever_dials_a_worker_that_leaves_is_told_at_once(deliveries: int) -> None:
    """The leaver answers as much of the dials as arrives in so many deliveries, and never takes part."""
    world = World(3)
    others = [rank for rank in range(world.size) if rank != LEAVER]
    operations = [world.submit(world.groups[rank], all_reduce(world.groups[rank], torch.ones(10))) for rank in others]
    for _ in range(deliveries):
        for engine in world.engines:
            engine.run_ready()
        world.wires.deliver()
    world.engines[LEAVER].leave()
    for _ in range(20):  # from now on nobody drives the leaver
        for rank in others:
            world.engines[rank].run_ready()
        world.wires.deliver()
    for operation in operations:
        assert operation.done
        assert f"worker {LEAVER} left the run" in str(operation.error)
