"""Fits the parameters of a formula to measurements: bounded least squares of few parameters.

Residuals count by their power 1.5, between squares, which one outlier would dominate, and absolute values, whose minimum is
not smooth. A weak penalty holds each parameter near its start, so that a parameter without influence stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Vector = tuple[float, ...]
Bounds = Sequence[tuple[float, float]]

_LEAST: Final = 0.03  # below this, residuals count by their squares


def nearest(
    residuals: Callable[[Vector], Vector],
    weights: Sequence[float],
    start: Sequence[float],
    bounds: Bounds,
    penalty: float = 0.0,
) -> Vector:
    """Return the point within `bounds` at which the weighted residuals are smallest. The result is deterministic.

    `residuals` returns one value for each of `weights`; `penalty` weighs the squared distance from `start`.
    """
    low, high = np.transpose(bounds)
    home = np.clip(start, low, high)

    def weighted(point: NDArray[np.float64]) -> NDArray[np.float64]:
        found = np.asarray(residuals(tuple(point.tolist())))
        scaled = np.sqrt(weights) * found / np.maximum(_LEAST, np.abs(found)) ** 0.25
        return np.concatenate([scaled, np.sqrt(penalty) * (point - home)])

    found = least_squares(weighted, home, bounds=(low, high), xtol=1e-6, ftol=1e-6, gtol=1e-6, max_nfev=60)
    return tuple(found.x.tolist())
