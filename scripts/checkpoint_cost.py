"""`scripts/checkpoint-cost`: how long saving and loading sealed checkpoints takes, over plain DCP.

One process saves and loads a state of 64 tensors and some values: with plain DCP (`FileSystemWriter`, `FileSystemReader`) and
sealed with one and with two threads, in turns within each round. Files are synced to disk in all of them. Loads are measured
warm, and cold after the files were dropped from the page cache. Ratios are those of the same round; medians are printed.
CPU seconds, of all threads, are also meaningful on a machine that is busy with other things.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp

from ringfence import checkpoint
from ringfence.private_files import new_secret_file

TENSORS = 64
GOALS = {"sealed, 2 threads": {"save": 0.85, "load": 0.80}, "sealed, 1 thread": {"save": 0.95, "load": 1.05}}


def state_of(size: int) -> dict[str, Any]:
    each = size // TENSORS // 4
    return {"layers": {f"{i}.weight": torch.randn(each) for i in range(TENSORS)}, "step": 7, "betas": (0.9, 0.999)}


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    """A state to load into, whose memory is touched."""
    return {"layers": {name: torch.zeros_like(each) for name, each in state["layers"].items()}, "step": 0, "betas": ()}


def drop_from_cache(folder: Path) -> None:
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Variants:
    """Ways to save and load, by name."""

    def __init__(self, key: str) -> None:
        self._key = key
        self.names = ("plain DCP", "sealed, 1 thread", "sealed, 2 threads")

    def save(self, name: str, state: dict[str, Any], folder: Path) -> None:
        if name == "plain DCP":
            dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
        else:
            checkpoint.save(state, folder, key=self._key, threads=int(name.split()[1]))

    def load(self, name: str, state: dict[str, Any], folder: Path) -> None:
        if name == "plain DCP":
            dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        else:
            checkpoint.load(state, folder, key=self._key, threads=int(name.split()[1]))


class Cost(NamedTuple):
    seconds: float
    cpu: float


def timed(call: Callable[[], None]) -> Cost:
    start, cpu = time.perf_counter(), time.process_time()
    call()
    return Cost(time.perf_counter() - start, time.process_time() - cpu)


def measure(root: Path, rounds: int, size: int) -> list[dict[str, dict[str, Cost]]]:
    """Return the seconds of each round, variant and operation. The first round warms up and does not count."""
    new_secret_file(root / "key")
    variants, state = Variants(str(root / "key")), state_of(size)
    found = []
    for number in range(rounds + 1):
        seconds: dict[str, dict[str, Cost]] = {}
        turn = number % len(variants.names)
        for name in variants.names[turn:] + variants.names[:turn]:
            folder, target = root / "checkpoint", emptied(state)
            row = {"save": timed(lambda name=name, folder=folder: variants.save(name, state, folder))}  # type: ignore[misc]
            for kind in ("load", "cold load"):
                if kind == "cold load":
                    drop_from_cache(folder)
                row[kind] = timed(lambda name=name, target=target, folder=folder: variants.load(name, target, folder))  # type: ignore[misc]
                if target["step"] != 7 or any(
                    not torch.equal(target["layers"][i], state["layers"][i]) for i in target["layers"]
                ):
                    raise AssertionError(f"{name} loaded other numbers")
            shutil.rmtree(folder)
            seconds[name] = row
        if number:
            found.append(seconds)
            print(json.dumps(seconds), flush=True)
    return found


def report(rounds: list[dict[str, dict[str, Cost]]]) -> str:
    lines = ["| variant | operation | seconds | over plain DCP | goal | CPU seconds | over plain DCP |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")

    def median(name: str, operation: str, field: int) -> str:
        found = statistics.median(each[name][operation][field] for each in rounds)
        ratio = statistics.median(each[name][operation][field] / each["plain DCP"][operation][field] for each in rounds)
        return f"{found:.2f} | {ratio:.2f}"

    for name in sorted(rounds[0]):
        for operation in rounds[0][name]:
            goal = GOALS.get(name, {}).get(operation.removeprefix("cold "), "")
            lines.append(
                f"| {name} | {operation} | {median(name, operation, 0)} | {goal} | {median(name, operation, 1)} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/checkpoint-cost", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to save (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=1024, help="size of the state (default: %(default)s)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="ringfence-checkpoint-", dir=arguments.folder) as folder:
        print(report(measure(Path(folder), arguments.rounds, arguments.mebibytes << 20)))


if __name__ == "__main__":
    main()
