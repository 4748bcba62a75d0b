"""Records the traces of this folder: a small model, two workers, Gloo.

    OMP_NUM_THREADS=1 python lab/tests/data/traces/record.py FOLDER

The files are as torch wrote them, without the names of the machine and of temporary files.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

WORKERS = 2
STEPS = 3


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16))


def record(rank: int, folder: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORKERS)
    place = Path(folder)
    replicated = DistributedDataParallel(model(), bucket_cap_mb=0.1)
    sharded = model()
    mesh = init_device_mesh("cpu", (WORKERS,))
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for name, module, shapes, told in (
        ("ddp", replicated, True, True),
        ("ddp-without-shapes", replicated, False, True),
        ("ddp-without-steps", replicated, True, False),
        ("fsdp2", sharded, True, True),
    ):
        observer = ExecutionTraceObserver()
        if name == "ddp":
            observer.register_callback(str(place / f"ddp-execution-trace-rank{rank}.json.gz"))
        train(module, shapes, told, str(place / f"{name}-rank{rank}.json.gz"), observer if name == "ddp" else None)
    dist.barrier()
    dist.destroy_process_group()


def train(
    module: nn.Module, shapes: bool, told: bool, path: str, observer: ExecutionTraceObserver | None = None
) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    data = torch.ones(8, 64)

    def step() -> None:
        optimizer.zero_grad()
        module(data).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    once = schedule(wait=0, warmup=1, active=STEPS, repeat=1) if told else None
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=shapes, schedule=once, execution_trace_observer=observer
    ) as profiler:
        for _ in range(STEPS + 1):
            step()
            if told:
                profiler.step()
    profiler.export_chrome_trace(path)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(record, (sys.argv[1], f"{folder}/store"), nprocs=WORKERS)
    for path in Path(sys.argv[1]).glob("*.json.gz"):
        recorded = json.loads(gzip.decompress(path.read_bytes()))
        kept = {key: value for key, value in recorded.items() if key not in ("host_name", "traceName")}
        path.write_bytes(gzip.compress(json.dumps(kept, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    main()
