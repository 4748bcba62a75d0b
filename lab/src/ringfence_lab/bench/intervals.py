"""Ratios between variants that take turns, with bootstrap intervals over the rounds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95
MIN_ROUNDS: Final = 5  # rounds below which an interval is not trusted: that of a single round has no width at all


class Interval(NamedTuple):
    """A median, and the limits between which 95 % of the resampled medians lie."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def interval(values: Sequence[float]) -> Interval:
    """Return the median of `values` and its 95 % bootstrap interval. The same values in the same order give the same."""
    found = np.asarray(values)
    middle = [(len(found) - 1) // 2, len(found) // 2]
    medians = np.sort(np.sort(found[_resamples(len(found))], axis=1)[:, middle].mean(axis=1))
    tail = round((1 - CONFIDENCE) / 2 * RESAMPLES)
    return Interval(float(np.median(found)), float(medians[tail]), float(medians[-1 - tail]))


@lru_cache(maxsize=64)
def _resamples(count: int) -> NDArray[np.int64]:
    """Return the indices of each resample of `count` values, one resample a row."""
    draw = random.Random(count)  # noqa: S311 (resampling, not secrets)
    return np.array([draw.choices(range(count), k=count) for _ in range(RESAMPLES)])


def ratios(values: Sequence[float], first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return a variant's value over the mean of the two baseline runs, round by round."""
    return [2 * value / (a + b) for value, a, b in zip(values, first, second, strict=True)]


def resolution(values: Sequence[float]) -> float:
    """Return how far from 1 the ratio of the two baseline runs may read: smaller differences cannot be measured."""
    found = interval(values)
    return max(abs(found.low - 1), abs(found.high - 1))
