"""Carries out a benchmark: which cases, which rounds are missing, who runs them where; samples go to their folder."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ringfence.lab.bench import machine
from ringfence.lab.bench.netns import Hosts, burst_bytes
from ringfence.lab.bench.samples import Case, Round, Samples
from ringfence.lab.bench.units import size_text
from ringfence.lab.bench.worker_pool import Seat, WorkerPool
from ringfence.lab.tables import Progress

BATCH_SECONDS: Final = 0.05  # small collectives are timed in batches at least this long
_MARGIN: Final = 1.3
_MOST_REPEATS: Final = 20_000

Turns = list[tuple[str, int]]


@dataclass(frozen=True)
class Setup:
    """What all cases of a run share."""

    variants: tuple[str, ...]
    rounds: int
    results: Path
    command: str
    hosts: int = 0  # 0: everything on the loopback
    rate: str | None = None

    def circumstances(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a case's settings that says where and with what it was measured."""
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
        """Measure what is missing; everything that was asked for, old and new."""
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
        wanted = self._setup.rounds
        cases = [case for case in self._cases if case["workers"] == workers]
        return [(case, left) for case in cases if (left := wanted - len(self._samples.rounds(case))) > 0]

    def _run(self, workers: int, cases: Sequence[tuple[Case, int]], progress: Progress) -> None:
        progress.say(f"starting {workers} workers")
        with (
            seats_for(workers, self._setup.hosts, self._setup.rate) as seats,
            WorkerPool(seats, self._setup.variants) as worker_pool,
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
def seats_for(workers: int, hosts: int, rate: str | None) -> Iterator[list[Seat]]:
    """Where the workers run: side by side, or on hosts of their own that are gone afterwards."""
    if not hosts:
        yield [Seat()] * workers
        return
    with Hosts(hosts, rate) as made:
        yield made.seats(workers)


def describe(case: Case) -> str:
    """A case in a few words."""
    workers = f"{case['workers']} workers"
    if case["kind"] == "training":
        buckets = f" {case['bucket_mb']:g} MiB" if case["bucket_mb"] else ""
        return f"{case['model']}, {case['strategy']}{buckets}, {workers}"
    if case["kind"] == "trace":
        return f"trace of {case['model']}, {workers}"
    return f"{case['operation']}, {size_text(case['size'])}, {workers}"


def rounds_of(worker_pool: WorkerPool, case: Case, trace: Sequence[tuple[int, float]] = ()) -> Callable[[int], Round]:
    """Prepare a case; a function that measures one round of it. `trace` is what a case of that kind replays."""
    if case["kind"] == "collective":
        return _collective(worker_pool, case)
    if case["kind"] == "trace":
        return _trace(worker_pool, case, trace)
    return _training(worker_pool, case)


def _collective(worker_pool: WorkerPool, case: Case) -> Callable[[int], Round]:
    wire = case.get("wire", "float32")
    arguments = {"operation": case["operation"], "size": case["size"], "wire": wire, "only": case["variants"]}
    prepared = worker_pool.tell("prepare", **arguments)[0]
    repeats = _repeats(worker_pool, prepared["variants"], case["busy"])

    def measure(number: int) -> Round:
        return worker_pool.measure("round", turns=_shuffled(repeats, number), busy=case["busy"])

    return measure


def _repeats(worker_pool: WorkerPool, variants: Sequence[str], busy: bool) -> dict[str, int]:
    """How often each variant must run to fill a batch; found in steps, since the first calls are slow."""
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
        return worker_pool.measure("train", turns=_shuffled(once, number))

    return measure


def _shuffled(repeats: Mapping[str, int], number: int) -> Turns:
    """Another order in each round, the same on every rank and in every run."""
    turns = list(repeats.items())
    random.Random(number).shuffle(turns)  # noqa: S311 (an order, not a secret)
    return turns
