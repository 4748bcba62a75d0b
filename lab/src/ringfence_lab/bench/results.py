"""Summarizes rounds: medians, ratios with intervals, the resolution of the measurement, CPU time per byte."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
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
class Line:
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
        found = {**asdict(self), "ratio": self.ratio._asdict()}
        if self.staging is None:  # host tensors
            del found["staging"]
        if self.counted is None:  # another implementation
            del found["counted"]
        else:
            found["counted"] = self.counted._asdict()
        return found


@dataclass(frozen=True)
class Result:
    """One case."""

    case: Case
    rounds: int
    resolution: float
    lines: list[Line]
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
    return Result(measured.case, len(rounds), resolution(first, second), lines, sealed_over, predicted)


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


def _line(case: Case, rounds: Sequence[Round], name: str, first: list[float], second: list[float]) -> Line:
    seconds = _column(rounds, name, "seconds")
    cpu = statistics.median(_column(rounds, name, "cpu"))
    per_byte = None
    if case["kind"] == "collective":
        per_byte = cpu * 1e9 / names.necessary_bytes(case["operation"], case["size"], case["workers"])
    return Line(
        variant=name,
        seconds=statistics.median(seconds),
        ratio=interval(ratios(seconds, first, second)),
        cpu_seconds=cpu,
        cpu_ns_per_byte=per_byte,
        wire_bytes=statistics.median(_column(rounds, name, "sent")),
        stages=_stages(rounds, name),
        staging=_staging(rounds, name),
        counted=_counted(rounds, name),
    )


def _column(rounds: Sequence[Round], name: str, what: str) -> list[float]:
    return [samples[name][what] for samples in rounds]


def _counted(rounds: Sequence[Round], name: str) -> Traffic | None:
    """Return the median of what was counted; the rounds of a collective do not differ."""
    found = [samples[name]["counted"] for samples in rounds if "counted" in samples[name]]
    return Traffic(*map(statistics.median, zip(*found, strict=True))) if found else None


def _stages(rounds: Sequence[Round], name: str) -> dict[str, float] | None:
    """Return the mean share of each stage."""
    all_shares = [samples[name]["stages"] for samples in rounds if "stages" in samples[name]]
    if not all_shares:
        return None
    return {stage: statistics.fmean(shares[stage] for shares in all_shares) for stage in all_shares[0]}


def _staging(rounds: Sequence[Round], name: str) -> dict[str, Any] | None:
    """Return the mean seconds of each stage of a call and of a pass."""
    found = [samples[name]["staging"] for samples in rounds if "staging" in samples[name]]
    if not found:
        return None
    means = {
        part: {stage: statistics.fmean(each[part][stage] for each in found) for stage in found[0][part]}
        for part in ("call", "pass")
    }
    return {**means, "passes": statistics.fmean(each["passes"] for each in found)}
