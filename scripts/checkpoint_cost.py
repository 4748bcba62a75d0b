"""Measure how long saving and loading sealed checkpoints takes, over plain DCP.

    python -m scripts.checkpoint_cost [--folder DIR] [--rounds N] [--mebibytes N]

One process saves and loads a state of 64 tensors: with plain DCP and sealed with one and with two threads, in turns within each
round. Files are synced to disk in all of them. Loads are measured warm, and cold after the files were dropped from the page
cache. Ratios are those of the same round; medians are printed. CPU seconds are those of all threads.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from ringfence import checkpoint
from ringfence.cli.terminal import table
from ringfence.config.private_files import new_secret_file

TENSORS = 64
VARIANTS = ("plain DCP", "sealed, 1 thread", "sealed, 2 threads")
OPERATIONS = ("save", "load", "cold load")

Cost = tuple[float, float]  # seconds, and CPU seconds


def execute(variant: str, operation: str, state: dict[str, Any], folder: Path, key: str) -> None:
    """Save or load a state."""
    if variant == "plain DCP" and operation == "save":
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    elif variant == "plain DCP":
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    else:
        call: Callable[..., Any] = checkpoint.save if operation == "save" else checkpoint.load
        call(state, folder, key=key, threads=int(variant.split()[1]))


def measure(root: Path, rounds: int, size: int) -> list[dict[tuple[str, str], Cost]]:
    """Return the costs of each round by variant and operation. The first round warms up and does not count."""
    new_secret_file(root / "key")
    state = {f"{i}.weight": torch.randn(size // TENSORS // 4) for i in range(TENSORS)}
    found = []
    for number in range(rounds + 1):
        costs: dict[tuple[str, str], Cost] = {}
        turn, folder = number % len(VARIANTS), root / "checkpoint"
        for variant in VARIANTS[turn:] + VARIANTS[:turn]:
            target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            for operation in OPERATIONS:
                if operation == "cold load":
                    drop_from_cache(folder)
                start, cpu = time.perf_counter(), time.process_time()
                execute(variant, operation, state if operation == "save" else target, folder, str(root / "key"))
                costs[variant, operation] = time.perf_counter() - start, time.process_time() - cpu
            if any(not torch.equal(target[name], tensor) for name, tensor in state.items()):
                raise AssertionError(f"{variant} loaded other numbers")
            shutil.rmtree(folder)
        found.append(costs)
    return found[1:]


def drop_from_cache(folder: Path) -> None:
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def report(rounds: list[dict[tuple[str, str], Cost]]) -> str:
    """Return the medians, and those of the ratios to plain DCP in the same round."""
    rows = []
    for variant, operation in sorted(rounds[0]):
        cells = [variant, operation]
        for field in (0, 1):
            values = [costs[variant, operation][field] for costs in rounds]
            plain = [costs["plain DCP", operation][field] for costs in rounds]
            ratios = [value / other for value, other in zip(values, plain, strict=True)]
            cells += [f"{statistics.median(values):.2f}", f"{statistics.median(ratios):.2f}"]
        rows.append(cells)
    return table([("variant", "operation", "seconds", "over plain", "CPU seconds", "over plain"), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.checkpoint_cost", description="Measure checkpoints.")
    parser.add_argument("--folder", type=Path, help="where to save; default: the system's temporary folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=1024, help="size of the state; default: %(default)s")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="ringfence-checkpoint-", dir=options.folder) as folder:
        print(report(measure(Path(folder), options.rounds, options.mebibytes << 20)))


if __name__ == "__main__":
    main()
