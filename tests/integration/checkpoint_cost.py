"""Prints how fast a checkpoint of one process is saved and loaded in memory: sealed, and plain by torch, in turns.

python -m tests.integration.checkpoint_cost [--rounds N] [--mebibytes N]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from ringfence import checkpoint
from ringfence.config.private_files import new_secret_file

TENSORS = 16


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """Return the time of a call, and its CPU time."""
    wall, cpu = time.monotonic(), time.process_time()
    call()
    return time.monotonic() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.checkpoint_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mebibytes", type=int, default=512)
    options = parser.parse_args()
    size = options.mebibytes << 20
    state = {f"tensor{number}": torch.randn(size // TENSORS // 4) for number in range(TENSORS)}
    figures: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        key, place = Path(folder) / "key", Path(folder) / "saved"
        new_secret_file(key)
        turns: dict[str, Callable[[], object]] = {
            "save, plain": lambda: dcp.save(state, checkpoint_id=place, no_dist=True),
            "load, plain": lambda: dcp.load(state, checkpoint_id=place, no_dist=True),
            "save, sealed": lambda: checkpoint.save(state, place, key=key),
            "load, sealed": lambda: checkpoint.load(state, place, key=key),
        }
        for _ in range(options.rounds):
            for name, call in turns.items():
                figures.setdefault(name, []).append(seconds(call))
                if name.startswith("load"):
                    shutil.rmtree(place)
    print(f"{options.mebibytes} MiB in {TENSORS} tensors, one process, medians of {options.rounds} rounds:")
    for name, times in figures.items():
        wall, cpu = (statistics.median(each) for each in zip(*times, strict=True))
        print(f"  {name:13} {size / wall / 1e9:5.2f} GB/s, {cpu / size * 1e9:5.2f} ns of CPU a byte")


if __name__ == "__main__":
    main()
