"""Summarizes rounds: medians, ratios with intervals, the resolution of the measurement, CPU time per byte."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from ringfence.collectives import Collective
from ringfence_lab.bench import names
from ringfence_lab.bench.byte_counts import Traffic, machines_of, traffic
from ringfence_lab.bench.intervals import Interval, interval, ratios, resolution
from ringfence_lab.bench.measure import Measured
from ringfence_lab.bench.samples import Case, Round

_SEALED: Final = "ringfence"
_WIDTH: Final = 4  # bytes of a float32


@dataclass(frozen=True)
class VariantResult:
    """One variant in one case."""

    variant: str
    seconds: float  # median over the rounds
    ratio: Interval  # to the mean of the two runs of the baseline in the same round
    cpu_seconds: float  # of all workers together
    cpu_ns_per_byte: float | None  # over the bytes that a collective must move; None for training
    wire_bytes: float  # what all workers sent, as TCP payload
    stages: dict[str, float] | None = None  # shares of the time
    staging: dict[str, Any] | None = None  # seconds of a `call` and of a `pass` by stage, and the number of `passes`
    counted: Traffic | None = None  # by ringfence itself: what all workers sent, sealed and inside machines

    def as_json(self) -> dict[str, Any]:
        found = {**asdict(self), "ratio": self.ratio._asdict(), "counted": self.counted and self.counted._asdict()}
        # Host tensors have no staging, and nobody counts the bytes of another implementation.
        return {name: value for name, value in found.items() if value is not None or name not in ("staging", "counted")}


@dataclass(frozen=True)
class Result:
    """One case."""

    case: Case
    rounds: int
    resolution: float
    lines: list[VariantResult]
    sealed_over: dict[str, Interval]  # ringfence over each variant that is not the baseline, round by round
    predicted: Traffic | None = None  # what ringfence's schedules send in one collective of host tensors

    def as_json(self) -> dict[str, Any]:
        return {
            **({} if self.predicted is None else {"predicted": self.predicted._asdict()}),
            "case": self.case,
            "rounds": self.rounds,
            "resolution": self.resolution,
            "variants": [line.as_json() for line in self.lines],
            "sealed_over": {name: ratio._asdict() for name, ratio in self.sealed_over.items()},
        }


def result(measured: Measured) -> Result:
    """Summarize the rounds of a case."""
    rounds = measured.rounds
    baseline = names.baseline(measured.case)
    first, second = (_column(rounds, name, "seconds") for name in baseline)
    taking_part = [name for name in measured.case["variants"] if all(name in samples for samples in rounds)]
    lines = [_line(measured.case, rounds, name, first, second) for name in taking_part]
    sealed_over = _sealed_over(rounds, taking_part, baseline)
    predicted = _predicted(measured.case) if any(line.counted for line in lines) else None
    itself = resolution([b / a for a, b in zip(first, second, strict=True)])
    return Result(measured.case, len(rounds), itself, lines, sealed_over, predicted)


def _predicted(case: Case) -> Traffic | None:
    if case["kind"] != "collective" or case.get("device"):
        return None
    workers = case["workers"]
    size = max(1, case["size"] // _WIDTH // workers) * workers * _WIDTH  # as the benchmark's tensors are
    return traffic(Collective[case["operation"].upper()], size, workers, machines_of(case["hosts"], workers))


def _sealed_over(rounds: Sequence[Round], taking_part: Sequence[str], baseline: Sequence[str]) -> dict[str, Interval]:
    if _SEALED not in taking_part:
        return {}
    sealed = _column(rounds, _SEALED, "seconds")
    others = [name for name in taking_part if name not in (_SEALED, *baseline)]
    columns = {name: _column(rounds, name, "seconds") for name in others}
    return {name: interval(ratios(sealed, column, column)) for name, column in columns.items()}


def _line(case: Case, rounds: Sequence[Round], name: str, first: list[float], second: list[float]) -> VariantResult:
    seconds = _column(rounds, name, "seconds")
    cpu = statistics.median(_column(rounds, name, "cpu"))
    per_byte = None
    if case["kind"] == "collective":
        per_byte = cpu * 1e9 / names.necessary_bytes(case["operation"], case["size"], case["workers"])
    counted, shares, staging = (_recorded(rounds, name, what) for what in ("counted", "stages", "staging"))
    return VariantResult(
        variant=name,
        seconds=statistics.median(seconds),
        ratio=interval(ratios(seconds, first, second)),
        cpu_seconds=cpu,
        cpu_ns_per_byte=per_byte,
        wire_bytes=statistics.median(_column(rounds, name, "sent")),
        stages=_means(shares) if shares else None,
        staging=_staging(staging) if staging else None,
        counted=Traffic(*map(statistics.median, zip(*counted, strict=True))) if counted else None,
    )


def _column(rounds: Sequence[Round], name: str, what: str) -> list[float]:
    return [samples[name][what] for samples in rounds]


def _recorded(rounds: Sequence[Round], name: str, what: str) -> list[Any]:
    """Return what some variants record and others do not."""
    return [samples[name][what] for samples in rounds if what in samples[name]]


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {stage: statistics.fmean(each[stage] for each in found) for stage in found[0]}


def _staging(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean seconds of each stage of a call and of a pass."""
    means = {part: _means([each[part] for each in found]) for part in ("call", "pass")}
    return {**means, "passes": statistics.fmean(each["passes"] for each in found)}
