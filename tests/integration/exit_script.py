"""A minimal training script that ends in one of several ways without destroying its process group."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

LARGE = 1 << 23  # elements: more than the kernel buffers for a peer that does not read


def main(way: str, store: str, rank: int, world: int) -> None:
    dist.init_process_group("ringfence", store=dist.FileStore(store, world), rank=rank, world_size=world)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    assert tensor[0].item() == world
    match way:
        case "falls off the end":
            return
        case "sys.exit":
            sys.exit(0)
        case "with work outstanding":
            dist.all_reduce(tensor, async_op=True)
        case "one leaves early" if rank != 1:
            dist.all_reduce(tensor)
        case "an exception with work under way" if rank == 0:
            dist.broadcast(torch.ones(LARGE), 0, async_op=True)
            engine = dist.group.WORLD._loop.engine  # type: ignore[union-attr]
            while not engine.blocked:
                os.sched_yield()
            raise ValueError("an error in the script")
        case "an exception with work under way":
            dist.recv(tensor, 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
