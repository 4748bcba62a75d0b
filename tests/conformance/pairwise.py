"""A small set of cases in which every allowed pair of values of two axes occurs: pairwise covering, greedy, seeded."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Axes = Mapping[str, Sequence[Any]]
Row = dict[str, Any]
Pair = frozenset[tuple[str, Any]]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """The pairs of axis values that a row holds."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def all_pairs(axes: Axes, allowed: Callable[[Row], bool]) -> set[Pair]:
    """What a covering must hold."""
    rows = (
        {one: left, two: right} for one, two in combinations(axes, 2) for left, right in product(axes[one], axes[two])
    )
    return {pair for row in rows if allowed(row) for pair in pairs_of(row)}


def cover(axes: Axes, allowed: Callable[[Row], bool] = lambda row: True, seed: int = 0) -> list[Row]:
    """Rows that cover all pairs. `allowed` is asked about partial rows and may forbid combinations of two axes."""
    chance = random.Random(seed)
    missing = all_pairs(axes, allowed)
    rows = []
    while missing:
        # Ordered by text: sets have no order of their own, and the covering must be the same in every process.
        start = chance.choice(sorted(missing, key=lambda pair: sorted(map(repr, pair))))
        row = dict(sorted(start, key=repr))
        for axis in chance.sample([name for name in axes if name not in row], len(axes) - 2):
            row[axis] = _best(row, axis, axes[axis], allowed, missing, chance)
        missing -= pairs_of(row)
        rows.append({axis: row[axis] for axis in axes})
    return rows


def _best(
    row: Row,
    axis: str,
    choices: Sequence[Any],
    allowed: Callable[[Row], bool],
    missing: set[Pair],
    chance: random.Random,
) -> Any:
    """The value of the axis that covers most of what is missing; ties fall by chance."""
    possible = [value for value in choices if allowed({**row, axis: value})]
    if not possible:
        raise ValueError(f"no value of {axis} is allowed with {row}")

    def gain(value: Any) -> int:
        return sum(frozenset((item, (axis, value))) in missing for item in row.items())

    return max(possible, key=lambda value: (gain(value), chance.random()))
