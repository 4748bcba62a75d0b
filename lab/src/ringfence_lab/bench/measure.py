"""Runs a benchmark: finds the rounds that are missing, measures them and appends the samples to their folder."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ringfence_lab.bench import machine
from ringfence_lab.bench.netns import Hosts, burst_bytes
from ringfence_lab.bench.relay import LongLink
from ringfence_lab.bench.samples import Case, Round, Samples
from ringfence_lab.bench.tunnels import tunnels
from ringfence_lab.bench.worker_pool import Placement, WorkerPool
from ringfence_lab.progress import Progress

BATCH_SECONDS: Final = 0.05  # small collectives are timed in batches at least this long
_MARGIN: Final = 1.3
_MOST_REPEATS: Final = 20_000

Turns = list[tuple[str, int]]


@dataclass(frozen=True)
class Setup:
    """Settings that all cases of a run share."""

    variants: tuple[str, ...]
    rounds: int
    results: Path
    command: str
    hosts: int = 0  # 0: everything on the loopback
    rate: str | None = None
    device: str | None = None  # of the tensors; None: the host
    link: LongLink | None = None  # between hosts; None: a bridge

    def circumstances(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a case that identify the machine, the network and the variants."""
        place: dict[str, Any] = {"hosts": self.hosts, "rate": self.rate}
        if self.rate is not None:
            place["burst"] = burst_bytes(self.rate)
        if self.link is not None:
            place["link"] = self.link._asdict()
        return {**place, "variants": list(self.variants), "machine": machine.digest(facts)}


@dataclass(frozen=True)
class Measured:
    """A case and all its rounds."""

    case: Case
    rounds: list[Round]


def measure(setup: Setup, cases: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> list[Measured]:
    """Measure the missing rounds; return all rounds that were asked for, old and new."""
    samples = Samples(setup.results)
    all_cases = [{**case, **setup.circumstances(facts)} for case in cases]
    missing = [(case, left) for case in all_cases if (left := setup.rounds - len(samples.rounds(case))) > 0]
    with Progress(sum(left for _, left in missing)) as progress:
        for workers in sorted({case["workers"] for case, _ in missing}):
            progress.say(f"starting {workers} workers")
            with (
                placements_for(workers, setup.hosts, setup.rate, setup.variants, setup.link) as placements,
                WorkerPool(placements, setup.variants, setup.device) as worker_pool,
            ):
                samples.begin({**facts, **worker_pool.facts}, setup.command, machine.now())
                for case, left in missing:
                    if case["workers"] == workers:
                        what = f"{case.get('model') or case['operation']}, {workers} workers"
                        progress.say(what)
                        one = rounds_of(worker_pool, case)
                        for _ in range(left):
                            samples.add(case, one(len(samples.rounds(case))))
                            progress.step(what)
    return [Measured(case, samples.rounds(case)[: setup.rounds]) for case in all_cases]


@contextlib.contextmanager
def placements_for(
    workers: int, hosts: int, rate: str | None, variants: Sequence[str] = (), link: LongLink | None = None
) -> Iterator[list[Placement]]:
    """Yield the placement of each worker: on the loopback, or on hosts (network namespaces) that are removed afterwards.

    Hosts have the tunnels that these variants use.
    """
    if not hosts:
        yield [Placement()] * workers
        return
    with Hosts(hosts, rate, link) as made, tunnels(made.ends, variants):
        yield made.placements(workers)


def device_text(case: Case) -> str:
    """Return the device of a collective's tensors and what was simulated, or "" for host tensors."""
    if not case.get("device"):
        return ""
    rate = f", copies at {case['copy_rate'] / 1e9:g} GB/s" if case["copy_rate"] else ""
    return f", on {case['device']}{rate}{', confidential mode' if case['confidential'] else ''}"


def rounds_of(worker_pool: WorkerPool, case: Case, trace: Sequence[tuple[int, float]] = ()) -> Callable[[int], Round]:
    """Prepare a case and return a function that measures one round of it. `trace` are the steps that a trace replays."""
    common = {"wire": case.get("wire", "float32"), "only": case["variants"]}
    if case["kind"] == "collective":
        return _collective(worker_pool, case, common)
    if case["kind"] == "trace":
        worker_pool.tell("prepare_trace", steps=list(trace), busy=case["device"] == "cpu", **common)
        return _steps(worker_pool, case, warm_up=1)
    settings = {name: case[name] for name in ("model", "strategy", "bucket_mb")}
    worker_pool.tell("prepare_training", **settings, **common)
    return _steps(worker_pool, case, warm_up=2)  # DDP arranges its buckets after the first step


def _collective(worker_pool: WorkerPool, case: Case, common: Mapping[str, Any]) -> Callable[[int], Round]:
    names = ["operation", "size", *(["copy_rate", "confidential"] if case.get("device") else [])]
    command = "prepare_device" if case.get("device") else "prepare"
    prepared = worker_pool.tell(command, **{name: case[name] for name in names}, **common)[0]
    repeats = _repeats(worker_pool, prepared["variants"], case["busy"])

    def measure(number: int) -> Round:
        return worker_pool.measure("round", turns=shuffled(repeats, number), busy=case["busy"])

    return measure


def _repeats(worker_pool: WorkerPool, variants: Sequence[str], busy: bool) -> dict[str, int]:
    """Return how often each variant runs in a batch. It is found in two steps, since the first calls are slow."""
    repeats = dict.fromkeys(variants, 2)
    for seconds in (BATCH_SECONDS / 5, BATCH_SECONDS * _MARGIN):
        measured = worker_pool.measure("round", turns=list(repeats.items()), busy=busy)
        for name, sample in measured.items():
            repeats[name] = min(_MOST_REPEATS, max(1, math.ceil(seconds / sample["seconds"])))
    return repeats


def _steps(worker_pool: WorkerPool, case: Case, warm_up: int) -> Callable[[int], Round]:
    once = dict.fromkeys(case["variants"], 1)
    for _ in range(warm_up):
        worker_pool.measure("train", turns=list(once.items()))

    def measure(number: int) -> Round:
        return worker_pool.measure("train", turns=shuffled(once, number))

    return measure


def shuffled(repeats: Mapping[str, int], number: int) -> Turns:
    """Return the variants in an order that depends on the round only: the same on every rank and in every run."""
    turns = list(repeats.items())
    random.Random(number).shuffle(turns)  # noqa: S311 (an order, not a secret)
    return turns
