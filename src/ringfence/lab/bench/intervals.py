"""Ratios between variants that took turns, with bootstrap intervals over the rounds."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95


class Interval(NamedTuple):
    """A median and where 95 % of the resampled medians lie."""

    median: float
    low: float
    high: float


def interval(values: Sequence[float], resamples: int = RESAMPLES) -> Interval:
    """The median of the rounds' values. The generator is seeded: the same samples give the same interval."""
    draw = random.Random(len(values))  # noqa: S311 (resampling, not secrets)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    tail = round((1 - CONFIDENCE) / 2 * resamples)
    return Interval(statistics.median(values), medians[tail], medians[-1 - tail])


def ratios(values: Sequence[float], first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Round by round, a variant's value over the mean of the two runs of the baseline in the same round."""
    return [2 * value / (a + b) for value, a, b in zip(values, first, second, strict=True)]


def resolution(first: Sequence[float], second: Sequence[float]) -> float:
    """How far from 1 the baseline over itself may read: what the instrument cannot tell apart in this run."""
    itself = interval([b / a for a, b in zip(first, second, strict=True)])
    return max(abs(itself.low - 1), abs(itself.high - 1))
