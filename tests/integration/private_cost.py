"""What a private sum costs: `python -m tests.integration.private_cost` prints the parts, the sum, and a DDP step, by degree.

Parts: conversion, keystream and addition of one worker, each over all blocks by itself, and together as `encode` does them.
Sums: four workers with members of their own, beside the sealed all-reduce of the same float32 tensor. Degree 1 is two pairs,
which a policy does not permit. Rounds are interleaved; figures are medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringfence
from ringfence import keys
from ringfence.keys import Secret
from ringfence.private_sums.fixed_point import FixedPoint
from ringfence.private_sums.masks import Keystreams, Pair
from ringfence.private_sums.pairs import private_group
from tests.members import Consortium
from tests.pool import Pool

ELEMENTS: Final = 25 * (1 << 20) // 4
DEGREES: Final = (1, 2, 3)
WORLD: Final = 4
SEQUENCE, WIDTH, LAYERS = 64, 256, 4  # of the model whose step is measured; its batch has one sequence


def milliseconds(run: Callable[[], object]) -> float:
    before = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - before)


def interleaved(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median milliseconds of each variant, after a round that does not count."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, run in variants.items():
            taken = milliseconds(run)
            if number:
                found[name].append(taken)
    return {name: statistics.median(taken) for name, taken in found.items()}


def pairs_for(degree: int) -> list[Pair]:
    return [Pair(Secret(os.urandom(keys.SECRET_BYTES)), bool(number % 2)) for number in range(degree)]


def parts(rounds: int) -> dict[str, float]:
    """Conversion, keystream and addition, each alone, and all of them for each degree."""
    torch.set_num_threads(1)
    form, values = FixedPoint.fit(torch.float32, torch.int32, 1.0, WORLD), torch.rand(ELEMENTS) * 2 - 1
    size = keys.PRIVATE_SUM_BLOCK_BYTES // 4
    words, keystream = torch.zeros(ELEMENTS, dtype=torch.int32), torch.zeros(size, dtype=torch.int32)
    zeros, buffer = bytes(4 * size), bytearray(4 * size + 16)

    def only_keystream() -> None:
        ((stream, _),) = Keystreams(pairs_for(1), 1)._streams
        for block in words.split(size):
            stream.update_into(memoryview(zeros)[: 4 * block.numel()], buffer)

    def only_addition() -> None:
        for block in words.split(size):
            block.add_(keystream[: block.numel()])

    variants: dict[str, Callable[[], object]] = {
        "conversion": lambda: form.encode(values, Keystreams([], 1)),
        "keystream": only_keystream,
        "addition": only_addition,
        "back": lambda: form.decode(words, torch.float32),
    }
    for degree in DEGREES:
        pairs = pairs_for(degree)
        variants[f"degree {degree}"] = lambda pairs=pairs: form.encode(values, Keystreams(pairs, 1))  # type: ignore[misc]
    return interleaved(variants, rounds)


def with_degree(degree: int) -> None:
    """Give this worker as many pairs, in a ring of four: seeds that both ends know, for a measurement only."""
    rank, private = dist.get_rank(), private_group(None)
    peers = {
        1: [rank ^ 1],
        2: [(rank + 1) % WORLD, (rank - 1) % WORLD],
        3: [each for each in range(WORLD) if each != rank],
    }
    private._pairs = [
        Pair(Secret(keys.digest(b"measured", bytes(sorted((rank, peer))))), rank < peer) for peer in peers[degree]
    ]


def sums(rounds: int) -> dict[str, float]:
    """The sealed all-reduce of a float32 tensor, and its private sum for each degree."""
    tensor = torch.rand(ELEMENTS) * 2 - 1
    copy = tensor.clone()

    def plain() -> None:
        copy.copy_(tensor)
        dist.all_reduce(copy)

    found: dict[str, list[float]] = {"all-reduce": [], **{f"degree {degree}": [] for degree in DEGREES}}
    for number in range(rounds + 1):
        for name in found:
            if name != "all-reduce":
                with_degree(int(name[-1]))
            dist.barrier()
            run = plain if name == "all-reduce" else lambda: ringfence.private_sum(tensor, bound=1.0)
            taken = milliseconds(run)
            if number:
                found[name].append(taken)
    return {name: statistics.median(taken) for name, taken in found.items()}


def steps(rounds: int) -> dict[str, float]:
    """A DDP step of a small transformer with one sequence on each worker: sealed, and with the hook for each degree."""
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, dropout=0.0)
    batch = torch.rand(1, SEQUENCE, WIDTH)
    replicas = {}
    for name in ("all-reduce", *(f"degree {degree}" for degree in DEGREES)):
        torch.manual_seed(0)
        replicas[name] = DistributedDataParallel(
            torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False), broadcast_buffers=False
        )
        if name != "all-reduce":
            replicas[name].register_comm_hook(None, ringfence.private_hook(bound=64.0))
    found: dict[str, list[float]] = {name: [] for name in replicas}
    for number in range(rounds + 2):  # DDP arranges its buckets in the first
        for name, replica in replicas.items():
            if name != "all-reduce":
                with_degree(int(name[-1]))
            replica.zero_grad()
            dist.barrier()
            taken = milliseconds(lambda replica=replica: replica(batch).square().mean().backward())  # type: ignore[misc]
            if number > 1:
                found[name].append(taken)
    gradients = sum(each.numel() for each in replica.parameters()) * 4
    return {**{name: statistics.median(taken) for name, taken in found.items()}, "gradient bytes": gradients}


def slowest(results: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: max(result[name] for result in results) for name in results[0]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.private_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, metavar="N")
    rounds = parser.parse_args().rounds
    found = parts(rounds)
    print("25 MiB of float32 on one worker, ms:", ", ".join(f"{name} {taken:.1f}" for name, taken in found.items()))
    with tempfile.TemporaryDirectory(prefix="ringfence-private-") as folder, Pool() as pool:
        environments = Consortium(Path(folder), ["a", "b", "c", "d"]).environments()
        results = slowest(pool.check(sums, WORLD, env=environments, args=(rounds,)))
        print(f"25 MiB among {WORLD} workers, ms (and beside the sealed all-reduce):")
        for name, taken in results.items():
            print(f"  {name}: {taken:.1f} ({taken / results['all-reduce']:.2f})")
        results = slowest(pool.check(steps, WORLD, env=environments, args=(rounds,)))
        size = results.pop("gradient bytes")
        print(f"DDP step of {WORLD} x {SEQUENCE} tokens, {size / 2**20:.1f} MiB of gradients, ms:")
        for name, taken in results.items():
            print(f"  {name}: {taken:.1f} ({taken / results['all-reduce']:.2f})")


if __name__ == "__main__":
    from tests.integration import private_cost  # so that workers find its functions

    private_cost.main()
