"""As many workers as this machine holds: light processes, forked with torch loaded, that really join and reduce.

    python -m tests.integration.many 64 --bytes 1048576

Prints how long the join, the first and the second all-reduce took, and what one process used. Each worker stands for a machine.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import resource
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.pool import Pool


def work(rank: int, size: int, folder: Path, nbytes: int, answer: Connection) -> None:
    os.environ.update(
        RINGFENCE_SECRET_FILE=str(folder / "secret"), RINGFENCE_SAME_HOST="sealed", RINGFENCE_CHANNELS="1"
    )
    torch.set_num_threads(1)
    moments = [time.monotonic()]
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("ringfence", store=store, rank=rank, world_size=size)
    moments.append(time.monotonic())
    right = True
    for _ in range(2):
        tensor = torch.full((nbytes // 4,), float(rank))
        dist.all_reduce(tensor)
        right &= bool((tensor == size * (size - 1) / 2).all())
        moments.append(time.monotonic())
    files = len(os.listdir("/proc/self/fd"))
    private = sum(
        int(line.split()[1]) for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "Private" in line
    )
    dist.barrier()
    dist.destroy_process_group()
    answer.send((right, [after - before for before, after in itertools.pairwise(moments)], files, private))


def run(size: int, nbytes: int) -> list[tuple[bool, list[float], int, int]]:
    """Return, for each worker: whether its sums were right, its times, its open files and its private KiB."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Pool.new_secret(folder / "secret")
        workers: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(rank, size, folder, nbytes, theirs), daemon=True)
            process.start()
            theirs.close()
            workers.append((process, ours))
        found = [pipe.recv() for _, pipe in workers]
        for process, _ in workers:
            process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workers", type=int)
    parser.add_argument("--bytes", type=int, default=1 << 20)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    found = run(options.workers, options.bytes)
    assert all(right for right, *_ in found), "a worker has a wrong sum"
    join, first, second = (max(times[index] for _, times, *_ in found) for index in range(3))
    print(f"{options.workers} workers, {options.bytes} bytes: all sums are right")
    print(f"the slowest worker: join {join:.1f} s, first all-reduce {first:.1f} s, second {second:.1f} s")
    print(
        f"at most {max(each[2] for each in found)} files and {max(each[3] for each in found) / 1024:.0f} MiB of its own"
    )


if __name__ == "__main__":
    main()
