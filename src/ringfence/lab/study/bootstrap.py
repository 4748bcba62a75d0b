"""The benchmark's bootstrap intervals of a median, fast enough for a hundred thousand of them.

A resampled median depends on the values only through their ranks, and which ranks are drawn depends only on how many values
there are. So the draws are made once for each number of rounds and kept as pairs of middle ranks with their counts; an interval
is then a walk along a few dozen pairs. It is the interval that `bench.intervals` finds for the same values in order.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from ringfence.lab.bench.intervals import CONFIDENCE, RESAMPLES, Interval

FEWEST: Final = 5  # rounds that an interval is believed of: that of a single one has no width at all


def interval(values: Sequence[float]) -> Interval:
    """The median and its 95 % bootstrap interval."""
    ranked = sorted(values)
    medians = sorted(((ranked[low] + ranked[high]) / 2, count) for (low, high), count in _middles(len(ranked)))
    tail = round((1 - CONFIDENCE) / 2 * RESAMPLES)
    middle = (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2
    return Interval(middle, _at(medians, tail), _at(medians, RESAMPLES - 1 - tail))


def resolution(first: Sequence[float], second: Sequence[float]) -> float:
    """How far from 1 the baseline over itself may read."""
    itself = interval([b / a for a, b in zip(first, second, strict=True)])
    return max(abs(itself.low - 1), abs(itself.high - 1))


@lru_cache(maxsize=256)
def _middles(count: int) -> tuple[tuple[tuple[int, int], int], ...]:
    """The two middle ranks of each resample (the same one twice, if the number is odd), and how often they came."""
    draw = random.Random(count)  # noqa: S311 (resampling, not secrets)
    low, high = (count - 1) // 2, count // 2
    ranks = (sorted(draw.choices(range(count), k=count)) for _ in range(RESAMPLES))
    return tuple(Counter((each[low], each[high]) for each in ranks).items())


def _at(medians: Sequence[tuple[float, int]], position: int) -> float:
    """What stands at a position of the sorted resamples."""
    for median, count in medians:
        if position < count:
            return median
        position -= count
    raise IndexError(position)
