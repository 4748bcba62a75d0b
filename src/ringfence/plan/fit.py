"""Finds the parameters with which a formula comes nearest to measurements: Nelder and Mead's simplex, few parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Vector = tuple[float, ...]


def minimum(
    of: Callable[[Vector], float], start: Sequence[float], reach: float = 0.7, most: int = 200, near: float = 1e-4
) -> Vector:
    """Where `of` is smallest, found from `start`; deterministic, and needs no derivatives."""
    corners = [tuple(start)]
    corners += [tuple(x + (reach if i == at else 0.0) for i, x in enumerate(start)) for at in range(len(start))]
    found = sorted((of(corner), corner) for corner in corners)
    for _ in range(most):
        best, worst = found[0], found[-1]
        if worst[0] - best[0] <= near * (abs(best[0]) + near):
            break
        centre = _mean([corner for _, corner in found[:-1]])
        mirrored = _at(of, centre, worst[1], -1.0)
        if mirrored < best:
            found[-1] = min(mirrored, _at(of, centre, worst[1], -2.0))
        elif mirrored < found[-2]:
            found[-1] = mirrored
        else:
            inner = _at(of, centre, min(mirrored, worst)[1], 0.5)
            if inner < min(mirrored, worst):
                found[-1] = inner
            else:
                found = [best, *(_at(of, best[1], corner, 0.5) for _, corner in found[1:])]
        found.sort()
    return found[0][1]


def _at(of: Callable[[Vector], float], centre: Vector, corner: Vector, distance: float) -> tuple[float, Vector]:
    point = tuple(c + distance * (x - c) for c, x in zip(centre, corner, strict=True))
    return of(point), point


def _mean(corners: Sequence[Vector]) -> Vector:
    return tuple(sum(values) / len(corners) for values in zip(*corners, strict=True))
