"""Measure single calls of all-reduce between two workers: medians after a barrier, and means back to back.

    python -m scripts.call_latency > docs/results/call-latency.json

`ringfence bench` times batches of calls that follow each other at once, as a training step issues them, and shows means. At
small sizes Gloo's mean is far above its median: some of its calls take very long. So this script times every call by itself,
after a barrier, and takes the median; and it times the same calls back to back. A call's time is that of the slower worker.
Gloo and ringfence take turns in the same two processes.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from ringfence_lab.bench.machine import facts, now

ROUNDS: Final = 15
CALLS: Final = {4 << 10: 60, 64 << 10: 60, 1 << 20: 30, 25 << 20: 6}  # of each round, by size
WARM_UP: Final = 3
BACKENDS: Final = ("gloo", "ringfence")


def worker(rank: int, port: int, into: str) -> None:
    """One of the two workers; rank 0 writes the samples of both."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    samples: dict[int, dict[str, dict[str, list[float]]]] = {
        size: {name: {"single": [], "batch": []} for name in BACKENDS} for size in CALLS
    }
    for size, calls in CALLS.items():
        tensor = torch.ones(size // 4)
        for count in range(ROUNDS):
            for name in BACKENDS if count % 2 else BACKENDS[::-1]:
                for _ in range(WARM_UP):
                    dist.all_reduce(tensor, group=groups[name])
                taken = samples[size][name]
                taken["single"] += [single(tensor, groups[name]) for _ in range(calls)]
                taken["batch"].append(batch(tensor, groups[name], calls))
                tensor.fill_(1.0)
    slower: list[Any] = [None, None]
    dist.all_gather_object(slower, samples)
    if rank == 0:
        Path(into).write_text(json.dumps([summary(size, slower) for size in CALLS]))
    dist.destroy_process_group()


def single(tensor: torch.Tensor, group: Any) -> float:
    """Seconds of one call that both workers begin together."""
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    return time.perf_counter() - began


def batch(tensor: torch.Tensor, group: Any, calls: int) -> float:
    """Mean seconds of calls that follow each other at once."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    return (time.perf_counter() - began) / calls


def summary(size: int, workers: list[Any]) -> dict[str, Any]:
    """Of both workers' samples: each call counts with the slower worker's time."""
    found: dict[str, Any] = {"size": size}
    for name in BACKENDS:
        singles = [max(pair) for pair in zip(*(each[size][name]["single"] for each in workers), strict=True)]
        batches = [max(pair) for pair in zip(*(each[size][name]["batch"] for each in workers), strict=True)]
        found[name] = {
            "median_after_barrier": statistics.median(singles),
            "p95_after_barrier": statistics.quantiles(singles, n=20)[-1],
            "mean_back_to_back": statistics.fmean(batches),
            "calls": len(singles),
        }
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
        probe.close()
        secret = Path(folder) / "run.secret"
        secret.write_text(secrets.token_hex(32) + "\n")
        secret.chmod(0o600)
        os.environ.update(RINGFENCE_SECRET_FILE=str(secret), RINGFENCE_RUN_ID="call-latency", OMP_NUM_THREADS="1")
        into = Path(folder) / "samples.json"
        processes.spawn(worker, (port, str(into)), nprocs=2)
        rows = json.loads(into.read_text())
    command = "python -m scripts.call_latency"
    json.dump(
        {"command": command, "date": now(), "machine": facts(), "rounds": ROUNDS, "sizes": rows}, sys.stdout, indent=1
    )
    print()


if __name__ == "__main__":
    main()
