"""One worker of the demo: joins a group of two, and adds up a tensor each time its parent says so."""

from __future__ import annotations

import json
import socket
import sys
from datetime import timedelta

import torch
from torch import distributed

from ringfence.cli.demo.workers import SENTENCE

COPIES = 80  # 4,000 bytes
TIMEOUT = timedelta(seconds=20)


def main(backend: str, rank: int, store: str, channel: int) -> None:
    """Answer each line from the parent with a line of JSON, until the parent hangs up."""
    with socket.socket(fileno=channel) as parent, parent.makefile("rw") as lines:
        group = distributed.FileStore(store, 2)
        distributed.init_process_group(backend, store=group, rank=rank, world_size=2, timeout=TIMEOUT)
        for _ in lines:
            print(json.dumps(add_up(rank)), file=lines, flush=True)
        distributed.destroy_process_group()


def add_up(rank: int) -> dict[str, str]:
    """Worker 0 brings a tensor whose bytes spell a sentence, worker 1 brings zeros: the sum is that tensor."""
    weights = torch.frombuffer(bytearray(SENTENCE * COPIES), dtype=torch.float32)
    tensor = weights.clone() if rank == 0 else torch.zeros_like(weights)
    try:
        distributed.all_reduce(tensor)
        distributed.barrier()  # the sum may be complete here while the other worker refuses its part of it
    except RuntimeError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"sum": "right" if torch.equal(tensor, weights) else "wrong"}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
