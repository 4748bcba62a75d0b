"""Finds the parameters with which a formula comes nearest to measurements: damped least squares, few parameters.

Residuals count by their power 1.5, between squares, which a single wild cell would rule, and absolute values, which have no
bottom to descend to. A weak spring draws every parameter to where it starts: what no cell speaks about stays there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

Vector = tuple[float, ...]
Bounds = Sequence[tuple[float, float]]

_STEP: Final = 1e-3  # for derivatives
_LEAST: Final = 0.03  # below this, residuals count by their squares
_GROWTH: Final = 4.0


def nearest(
    residuals: Callable[[Vector], Vector],
    weights: Sequence[float],
    start: Sequence[float],
    bounds: Bounds,
    spring: float = 0.0,
    most: int = 40,
) -> Vector:
    """Where the weighted residuals are smallest, within bounds, found from `start`; deterministic."""
    home = at = _within(tuple(start), bounds)
    now = residuals(at)
    damping = 0.1

    def cost(point: Vector, found: Vector) -> float:
        drawn = spring * sum((x - y) ** 2 for x, y in zip(point, home, strict=True))
        return drawn + sum(w * _weight(r) * r * r for w, r in zip(weights, found, strict=True))

    for _ in range(most):
        heavy = [w * _weight(r) for w, r in zip(weights, now, strict=True)]
        slopes = [_slope(residuals, at, now, index, bounds) for index in range(len(at))]
        matrix = [[_dot(one, heavy, other) for other in slopes] for one in slopes]
        target = [-_dot(one, heavy, now) - spring * (x - y) for one, x, y in zip(slopes, at, home, strict=True)]
        for index, row in enumerate(matrix):
            row[index] += spring + 1e-12
        while damping < 1e8:
            damped = [[x * (1 + damping * (i == j)) for j, x in enumerate(row)] for i, row in enumerate(matrix)]
            moved = _within(tuple(x + d for x, d in zip(at, solved(damped, target), strict=True)), bounds)
            then = residuals(moved)
            if cost(moved, then) < cost(at, now):
                break
            damping *= _GROWTH
        else:
            return at
        gained = 1 - cost(moved, then) / cost(at, now)
        at, now, damping = moved, then, max(1e-6, damping / _GROWTH**2)
        if gained < 1e-6:
            return at
    return at


def _weight(residual: float) -> float:
    """With which a residual's square makes it count by the power 1.5."""
    return 1 / math.sqrt(max(_LEAST, abs(residual)))


def solved(matrix: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """The solution of a small system of linear equations, by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, target, strict=True)]
    size = len(rows)
    for column in range(size):
        best = max(range(column, size), key=lambda row: abs(rows[row][column]))
        rows[column], rows[best] = rows[best], rows[column]
        pivot = rows[column][column] or 1e-30
        for row in range(size):
            if row != column:
                factor = rows[row][column] / pivot
                rows[row] = [x - factor * y for x, y in zip(rows[row], rows[column], strict=True)]
    return [row[size] / (row[index] or 1e-30) for index, row in enumerate(rows)]


def _slope(residuals: Callable[[Vector], Vector], at: Vector, now: Vector, index: int, bounds: Bounds) -> Vector:
    """How the residuals change with one parameter; looked at inwards where it stands at its bound."""
    step = -_STEP if at[index] + _STEP > bounds[index][1] else _STEP
    then = residuals(tuple(x + step * (i == index) for i, x in enumerate(at)))
    return tuple((b - a) / step for a, b in zip(now, then, strict=True))


def _dot(one: Sequence[float], weights: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * w * b for a, w, b in zip(one, weights, other, strict=True))


def _within(point: Vector, bounds: Bounds) -> Vector:
    return tuple(min(max(x, low), high) for x, (low, high) in zip(point, bounds, strict=True))
