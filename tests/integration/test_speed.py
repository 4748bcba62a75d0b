"""The acceptor: sealing may not become dear unnoticed. Sealed over plaintext Gloo, 25 MiB, 2 workers, in the same processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ringfence.keys import SEGMENT_BYTES
from ringfence.lab.bench.intervals import ratios
from ringfence.lab.bench.worker_pool import Placement, WorkerPool

LIMIT = 1.25  # where a core seals about 10 GB/s
CIPHER_LIMIT = 1.5  # elsewhere: over Gloo's time, so many times what the ciphers alone take
SIZE = 25 << 20
ROUNDS = 11
ATTEMPTS = 6  # a machine with other work to do may disturb some of them
SLOWED = "tests.integration.slowed:SlowedSession"


@pytest.fixture(scope="module")
def worker_pool() -> Iterator[WorkerPool]:
    with WorkerPool([Placement()] * 2, ["gloo-a", "gloo-b", "ringfence", SLOWED]) as workers:
        workers.tell("prepare", operation="all_reduce", size=SIZE)
        yield workers


def cipher_seconds() -> float:
    """What sealing and opening of one all-reduce take on one core: each worker seals and opens as much as the tensor has."""
    cipher, nonce, segment = AESGCM(bytes(32)), bytes(12), bytes(SEGMENT_BYTES)
    seconds = []
    for _ in range(100):
        start = time.perf_counter()
        cipher.encrypt(nonce, segment, None)
        seconds.append(time.perf_counter() - start)
    return 2 * SIZE / SEGMENT_BYTES * statistics.median(seconds)


@pytest.fixture(scope="module")
def limit(worker_pool: WorkerPool) -> float:
    """The limit for this machine: CPUs differ by a factor of three in what AES costs them."""
    rounds = [worker_pool.measure("round", turns=[("gloo-a", 2)], busy=False) for _ in range(ROUNDS)]
    gloo = statistics.median(samples["gloo-a"]["seconds"] for samples in rounds)
    return max(LIMIT, 1 + CIPHER_LIMIT * cipher_seconds() / gloo)


def median_ratio(worker_pool: WorkerPool, variant: str) -> float:
    turns = [("gloo-a", 2), (variant, 2), ("gloo-b", 2)]
    rounds = [worker_pool.measure("round", turns=turns, busy=False) for _ in range(ROUNDS)]
    seconds = {name: [samples[name]["seconds"] for samples in rounds] for name, _ in turns}
    return statistics.median(ratios(seconds[variant], seconds["gloo-a"], seconds["gloo-b"]))


def passes(worker_pool: WorkerPool, variant: str, limit: float) -> tuple[bool, list[float]]:
    """Whether any attempt stays within the limit; and what was read."""
    read: list[float] = []
    while len(read) < ATTEMPTS and (not read or read[-1] > limit):
        read.append(median_ratio(worker_pool, variant))
    return read[-1] <= limit, read


def test_sealed_all_reduce_stays_within_the_limit(worker_pool: WorkerPool, limit: float) -> None:
    passed, read = passes(worker_pool, "ringfence", limit)
    print(f"sealed over plaintext Gloo at 25 MiB, 2 workers: {read}, the limit is {limit:.2f}")
    assert passed, f"sealed over plaintext Gloo at 25 MiB, 2 workers: {read}, the limit is {limit:.2f}"


def test_the_limit_detects_slowed_sealing(worker_pool: WorkerPool, limit: float) -> None:
    passed, read = passes(worker_pool, SLOWED, limit)
    assert not passed, f"slowed sealing over plaintext Gloo: {read}, and the limit did not detect it"
