"""A script for `ringfence run`: trains until a file exists, or for a number of steps, and prints a digest of all losses.

Arguments: the file, and the number of steps; 0: until the file exists.
"""

from __future__ import annotations

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def say(line: str) -> None:
    """Print a line at once: `print` writes its end separately, and the workers of a machine share a pipe."""
    os.write(1, f"{line}\n".encode())


def main(stop: str, steps: int) -> None:
    dist.init_process_group("ringfence")
    torch.manual_seed(7)
    parallel = DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(dist.get_rank())
    losses: list[float] = []
    ended = torch.zeros(1)
    while len(losses) < steps or (not steps and not ended.item()):
        inputs = torch.randn(8, 256, generator=draw)
        loss = (parallel(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended.fill_(os.path.exists(stop))
        dist.all_reduce(ended)
        losses.append(loss.item())
        if len(losses) == 20:
            say("training")
    digest = hashlib.sha256(repr(losses).encode()).hexdigest()[:16]
    say(f"rank {dist.get_rank()}: {len(losses)} steps, losses {digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
