"""The model against measurement: calibrated on half of a study's cells, it predicts the other half, and the reverse."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ringfence.plan.calibrate import Row, alone, calibrate, grouped, usable
from ringfence.plan.predict import BASELINE, CONTENDERS, predict


@dataclass(frozen=True)
class Line:
    """One contender in one cell, predicted by a profile that has not seen the cell."""

    cell: str
    contender: str
    scored: bool
    measured: float  # seconds
    predicted: float
    measured_ratio: float  # to Gloo
    predicted_ratio: float

    @property
    def error(self) -> float:
        """Of the seconds, as a share of what was measured."""
        return abs(self.predicted / self.measured - 1)

    @property
    def ratio_error(self) -> float:
        return abs(self.predicted_ratio / self.measured_ratio - 1)


@dataclass(frozen=True)
class Validation:
    """All lines, and what they come to over the cells that are scored."""

    lines: tuple[Line, ...]
    seed: int
    cells: int
    scored_cells: int

    def errors(self, ratios: bool) -> tuple[float, float]:
        """The median and the worst, over scored cells; Gloo's ratio to itself is no prediction."""
        scored = [line for line in self.lines if line.scored and not (ratios and line.contender == BASELINE)]
        found = sorted(line.ratio_error if ratios else line.error for line in scored)
        if not found:
            return float("nan"), float("nan")
        return (found[(len(found) - 1) // 2] + found[len(found) // 2]) / 2, found[-1]

    def as_json(self) -> dict[str, Any]:
        median, worst = self.errors(ratios=False)
        ratio_median, ratio_worst = self.errors(ratios=True)
        return {
            "seed": self.seed,
            "cells": self.cells,
            "scored_cells": self.scored_cells,
            "seconds": {"median_error": median, "worst_error": worst},
            "ratio": {"median_error": ratio_median, "worst_error": ratio_worst},
            "lines": [{**asdict(line), "error": line.error, "ratio_error": line.ratio_error} for line in self.lines],
        }


def validate(rows: Iterable[Row], seed: int = 0, cores: int = 2) -> Validation:
    """Cells are dealt into two halves; each half is predicted from the other."""
    cells = {name: cell for name, cell in grouped(rows).items() if usable(cell, BASELINE)}
    halves = _halves(cells, seed)
    lines: list[Line] = []
    for seen, unseen in (halves, halves[::-1]):
        profile = calibrate([row for name in seen for row in cells[name].values()], cores)
        for name in unseen:
            cell = cells[name]
            gloo = predict(profile, cell[BASELINE], BASELINE, alone(cell))
            for contender in CONTENDERS:
                if usable(cell, contender) and contender in profile.ways:
                    lines.append(_line(profile, name, cell, contender, gloo))
    lines.sort(key=lambda line: (line.cell, CONTENDERS.index(line.contender)))
    scored = {line.cell for line in lines if line.scored}
    return Validation(tuple(lines), seed, len(cells), len(scored))


def _line(profile: Any, name: str, cell: Mapping[str, Row], contender: str, gloo: float) -> Line:
    row = cell[contender]
    said = predict(profile, row, contender, alone(cell))
    return Line(
        cell=name,
        contender=contender,
        scored=bool(row["scored"]),
        measured=float(row["seconds"]),
        predicted=said,
        measured_ratio=float(row["ratio"]),
        predicted_ratio=said / gloo,
    )


def _halves(cells: Mapping[str, Mapping[str, Row]], seed: int) -> tuple[list[str], list[str]]:
    """Neighbours in kind, workers and size are parted, and the seed says which of the two goes where.

    So neither half lacks a kind or ends at another size; what is asked for is the cell between, not the cell beyond.
    """

    def place(name: str) -> tuple[str, int, str, int, int, float, str]:
        row = cells[name][BASELINE]
        what = str(row.get("operation") or row.get("device") or "")
        bucket = float(row.get("bucket_mb") or 0)
        return (
            str(row["kind"]),
            int(row["workers"]),
            what,
            int(row.get("hosts") or 0),
            int(row.get("size") or 0),
            bucket,
            name,
        )

    ordered = sorted(cells, key=place)
    halves: tuple[list[str], list[str]] = ([], [])
    for first in range(0, len(ordered), 2):
        side = hashlib.sha256(f"{seed}:{ordered[first]}".encode()).digest()[0] % 2
        for name in ordered[first : first + 2]:
            halves[side].append(name)
            side = 1 - side
    return halves
