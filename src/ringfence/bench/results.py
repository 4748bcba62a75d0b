"""From rounds to what a reader wants: medians, ratios with intervals, the instrument's resolution, CPU time per byte."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ringfence.bench import names
from ringfence.bench.intervals import Interval, interval, ratios, resolution
from ringfence.bench.measure import Measured
from ringfence.bench.samples import Case, Round


@dataclass(frozen=True)
class Line:
    """One contender in one case."""

    contender: str
    seconds: float  # median over the rounds
    ratio: Interval  # to the mean of the two Gloo runs of the same round
    cpu_seconds: float  # of all workers together
    cpu_ns_per_byte: float | None  # over the bytes that a collective must move; None for training
    wire_bytes: float  # what all workers sent, as TCP payload
    stages: dict[str, float] | None = None  # shares of the time


@dataclass(frozen=True)
class Result:
    """One case."""

    case: Case
    rounds: int
    resolution: float
    lines: list[Line]

    def as_json(self) -> dict[str, Any]:
        lines = [{**asdict(line), "ratio": line.ratio._asdict()} for line in self.lines]
        return {"case": self.case, "rounds": self.rounds, "resolution": self.resolution, "contenders": lines}


def result(measured: Measured) -> Result:
    """What the rounds of a case say."""
    rounds = measured.rounds
    first, second = (_column(rounds, name, "seconds") for name in names.BASELINE)
    taking_part = [name for name in measured.case["contenders"] if all(name in samples for samples in rounds)]
    lines = [_line(measured.case, rounds, name, first, second) for name in taking_part]
    return Result(measured.case, len(rounds), resolution(first, second), lines)


def _line(case: Case, rounds: Sequence[Round], name: str, first: list[float], second: list[float]) -> Line:
    seconds = _column(rounds, name, "seconds")
    cpu = statistics.median(_column(rounds, name, "cpu"))
    per_byte = None
    if case["kind"] == "collective":
        per_byte = cpu * 1e9 / names.necessary_bytes(case["operation"], case["size"], case["workers"])
    return Line(
        contender=name,
        seconds=statistics.median(seconds),
        ratio=interval(ratios(seconds, first, second)),
        cpu_seconds=cpu,
        cpu_ns_per_byte=per_byte,
        wire_bytes=statistics.median(_column(rounds, name, "sent")),
        stages=_stages(rounds, name),
    )


def _column(rounds: Sequence[Round], name: str, what: str) -> list[float]:
    return [samples[name][what] for samples in rounds]


def _stages(rounds: Sequence[Round], name: str) -> dict[str, float] | None:
    """The shares of each stage, as means: shares that add up to one stay so."""
    all_shares = [samples[name]["stages"] for samples in rounds if "stages" in samples[name]]
    if not all_shares:
        return None
    return {stage: statistics.fmean(shares[stage] for shares in all_shares) for stage in all_shares[0]}
