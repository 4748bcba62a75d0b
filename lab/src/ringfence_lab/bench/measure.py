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
from ringfence_lab.bench.samples import Case, Round, Samples
from ringfence_lab.bench.units import size_text
from ringfence_lab.bench.worker_pool import Placement, WorkerPool
from ringfence_lab.tables import Progress

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

    def circumstances(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a case that identify the machine, the network and the variants."""
        place: dict[str, Any] = {"hosts": self.hosts, "rate": self.rate}
        if self.rate is not None:
            place["burst"] = burst_bytes(self.rate)
        return {**place, "variants": list(self.variants), "machine": machine.digest(facts)}


@dataclass(frozen=True)
class Measured:
    """A case and all its rounds."""

    case: Case
    rounds: list[Round]


class Measurement:
    """One run of the benchmark over its cases."""

    def __init__(self, setup: Setup, cases: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
        self._setup = setup
        self._facts = facts
        around = setup.circumstances(facts)
        self._cases = [{**case, **around} for case in cases]
        self._samples = Samples(setup.results)

    def run(self) -> list[Measured]:
        """Measure the missing rounds; return all rounds that were asked for, old and new."""
        missing = {count: self._missing(count) for count in sorted({case["workers"] for case in self._cases})}
        progress = Progress(sum(left for cases in missing.values() for _, left in cases))
        try:
            for workers, cases in missing.items():
                if cases:
                    self._run(workers, cases, progress)
        finally:
            progress.end()
        return [Measured(case, self._samples.rounds(case)[: self._setup.rounds]) for case in self._cases]

    def _missing(self, workers: int) -> list[tuple[Case, int]]:
        rounds = self._setup.rounds
        cases = [case for case in self._cases if case["workers"] == workers]
        return [(case, left) for case in cases if (left := rounds - len(self._samples.rounds(case))) > 0]

    def _run(self, workers: int, cases: Sequence[tuple[Case, int]], progress: Progress) -> None:
        progress.say(f"starting {workers} workers")
        with (
            placements_for(workers, self._setup.hosts, self._setup.rate) as placements,
            WorkerPool(placements, self._setup.variants, self._setup.device) as worker_pool,
        ):
            self._samples.begin({**self._facts, **worker_pool.facts}, self._setup.command, machine.now())
            for case, left in cases:
                what = describe(case)
                progress.say(what)
                measure = rounds_of(worker_pool, case)
                for _ in range(left):
                    number = len(self._samples.rounds(case))
                    self._samples.add(case, measure(number))
                    progress.step(what)


@contextlib.contextmanager
def placements_for(workers: int, hosts: int, rate: str | None) -> Iterator[list[Placement]]:
    """Yield the placement of each worker: on the loopback, or on hosts (network namespaces) that are removed afterwards."""
    if not hosts:
        yield [Placement()] * workers
        return
    with Hosts(hosts, rate) as made:
        yield made.placements(workers)


def describe(case: Case) -> str:
    """Return a short name of a case."""
    workers = f"{case['workers']} workers"
    if case["kind"] == "training":
        buckets = f" {case['bucket_mb']:g} MiB" if case["bucket_mb"] else ""
        return f"{case['model']}, {case['strategy']}{buckets}, {workers}"
    if case["kind"] == "trace":
        return f"trace of {case['model']}, {workers}"
    return f"{case['operation']}, {size_text(case['size'])}, {workers}{device_text(case)}"


def device_text(case: Case) -> str:
    """Return the device of a collective's tensors and what was simulated, or "" for host tensors."""
    if not case.get("device"):
        return ""
    rate = f", copies at {case['copy_rate'] / 1e9:g} GB/s" if case["copy_rate"] else ""
    return f", on {case['device']}{rate}{', confidential mode' if case['confidential'] else ''}"


def rounds_of(worker_pool: WorkerPool, case: Case, trace: Sequence[tuple[int, float]] = ()) -> Callable[[int], Round]:
    """Prepare a case and return a function that measures one round of it. `trace` are the steps that a trace replays."""
    if case["kind"] == "collective":
        return _collective(worker_pool, case)
    if case["kind"] == "trace":
        return _trace(worker_pool, case, trace)
    return _training(worker_pool, case)


def _collective(worker_pool: WorkerPool, case: Case) -> Callable[[int], Round]:
    wire = case.get("wire", "float32")
    arguments = {"operation": case["operation"], "size": case["size"], "wire": wire, "only": case["variants"]}
    if case.get("device"):
        simulated = {name: case[name] for name in ("copy_rate", "confidential")}
        prepared = worker_pool.tell("prepare_device", **arguments, **simulated)[0]
    else:
        prepared = worker_pool.tell("prepare", **arguments)[0]
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


def _training(worker_pool: WorkerPool, case: Case) -> Callable[[int], Round]:
    settings = {name: case[name] for name in ("model", "strategy", "bucket_mb")}
    worker_pool.tell("prepare_training", **settings, wire=case.get("wire", "float32"), only=case["variants"])
    return _steps(worker_pool, case, warm_up=2)  # DDP arranges its buckets after the first step


def _trace(worker_pool: WorkerPool, case: Case, trace: Sequence[tuple[int, float]]) -> Callable[[int], Round]:
    busy = case["device"] == "cpu"
    worker_pool.tell("prepare_trace", steps=list(trace), busy=busy, wire=case["wire"], only=case["variants"])
    return _steps(worker_pool, case, warm_up=1)


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
