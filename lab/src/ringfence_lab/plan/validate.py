"""Cross-validation: the model is calibrated on half of the cells of a study and predicts the other half, and vice versa."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ringfence_lab.plan.calibrate import Row, alone, calibrate, grouped, usable
from ringfence_lab.plan.predict import BASELINE, MEASURED, predict


@dataclass(frozen=True)
class Prediction:
    """One variant in one cell, predicted by a profile that was calibrated without the cell."""

    cell: str
    variant: str
    kind: str  # collective, training or trace
    scored: bool
    measured: float  # seconds
    predicted: float
    measured_ratio: float  # to Gloo
    predicted_ratio: float
    alone: float | None  # seconds of the step without communication: an input of the prediction

    @property
    def step(self) -> bool:
        return self.kind != "collective"

    @property
    def error(self) -> float:
        """The relative error of the seconds."""
        return abs(self.predicted / self.measured - 1)

    @property
    def ratio_error(self) -> float:
        return abs(self.predicted_ratio / self.measured_ratio - 1)

    def free_error(self, ratios: bool) -> float:
        """The relative error of a model in which communication is free: steps take their time alone, ratios are one."""
        if self.alone is None:
            raise ValueError(f"{self.cell} is no step")
        return abs((1 / self.measured_ratio if ratios else self.alone / self.measured) - 1)


@dataclass(frozen=True)
class Validation:
    """All lines, and their errors over the scored cells."""

    lines: tuple[Prediction, ...]
    seed: int
    cells: int
    scored_cells: int

    def errors(self, ratios: bool, steps: bool | None = None) -> tuple[float, float]:
        """Return the median and the worst error over scored cells: of all, of steps only, or of collectives only."""
        return _middle_and_worst([line.ratio_error if ratios else line.error for line in self._lines_of(ratios, steps)])

    def free_errors(self, ratios: bool) -> tuple[float, float]:
        """Return the same for a model in which communication is free: a useful model has smaller errors."""
        return _middle_and_worst([line.free_error(ratios) for line in self._lines_of(ratios, True)])

    def scored_of(self, steps: bool) -> int:
        """Return the number of scored cells."""
        return len({line.cell for line in self._lines_of(False, steps)})

    def _lines_of(self, ratios: bool, steps: bool | None) -> list[Prediction]:
        """Return the scored lines; without Gloo for ratios, whose ratio to itself is no prediction."""
        scored = [line for line in self.lines if line.scored and not (ratios and line.variant == BASELINE)]
        return [line for line in scored if steps is None or line.step == steps]

    def as_json(self) -> dict[str, Any]:
        def both(found: Callable[[bool], tuple[float, float]]) -> dict[str, Any]:
            names = ("median_error", "worst_error")
            return {
                what: {
                    name: None if math.isnan(error) else error for name, error in zip(names, found(ratio), strict=True)
                }
                for what, ratio in (("seconds", False), ("ratio", True))
            }

        return {
            "seed": self.seed,
            "cells": self.cells,
            "scored_cells": self.scored_cells,
            **both(self.errors),
            "collectives": {"scored_cells": self.scored_of(False), **both(lambda ratios: self.errors(ratios, False))},
            "steps": {
                "scored_cells": self.scored_of(True),
                **both(lambda ratios: self.errors(ratios, True)),
                "if_communication_were_free": both(self.free_errors),
            },
            "lines": [{**asdict(line), "error": line.error, "ratio_error": line.ratio_error} for line in self.lines],
        }


def _middle_and_worst(errors: list[float]) -> tuple[float, float]:
    return (statistics.median(errors), max(errors)) if errors else (math.nan, math.nan)


def validate(rows: Iterable[Row], seed: int = 0, cores: int = 2) -> Validation:
    """Divide the cells into two halves, cells of equal settings into the same one, and predict each half from the other."""
    cells = {name: cell for name, cell in grouped(rows).items() if usable(cell, BASELINE)}
    halves = _halves(cells, seed)
    lines: list[Prediction] = []
    for seen, unseen in (halves, halves[::-1]):
        profile = calibrate([row for name in seen for row in cells[name].values()], cores)
        for name in unseen:
            cell, by_itself = cells[name], alone(cells[name])
            gloo = predict(profile, cell[BASELINE], BASELINE, by_itself)
            for variant in MEASURED:
                if not usable(cell, variant) or variant not in profile.variants:
                    continue
                row, said = cell[variant], predict(profile, cell[variant], variant, by_itself)
                kind, measured, ratio = str(row["kind"]), float(row["seconds"]), float(row["ratio"])
                given = by_itself if kind != "collective" else None
                lines.append(
                    Prediction(name, variant, kind, bool(row["scored"]), measured, said, ratio, said / gloo, given)
                )
    lines.sort(key=lambda line: (line.cell, MEASURED.index(line.variant)))
    scored = {line.cell for line in lines if line.scored}
    return Validation(tuple(lines), seed, len(cells), len(scored))


def _halves(cells: Mapping[str, Mapping[str, Row]], seed: int) -> tuple[list[str], list[str]]:
    """Put neighbours in kind, workers and size into different halves, as the seed decides.

    So both halves contain all kinds and sizes, and predictions are interpolations. Cells of equal settings, such as a profiled
    one and one without clocks, stay together: they would predict each other.
    """
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name in sorted(cells):
        groups.setdefault(_settings(cells[name][BASELINE]), []).append(name)
    ordered = sorted(groups)
    halves: tuple[list[str], list[str]] = ([], [])
    for first in range(0, len(ordered), 2):
        side = hashlib.sha256(f"{seed}:{groups[ordered[first]][0]}".encode()).digest()[0] % 2
        for key in ordered[first : first + 2]:
            halves[side].extend(groups[key])
            side = 1 - side
    return halves


def _settings(row: Row) -> tuple[Any, ...]:
    """Return the settings of a cell, ordered so that similar cells are neighbours."""
    return (
        str(row["kind"]),
        int(row["workers"]),
        str(row.get("operation") or row.get("device") or ""),
        int(row.get("hosts") or 0),
        int(row.get("rate_bits") or 0),
        int(row.get("size") or 0),
        str(row.get("model") or ""),
        float(row.get("bucket_mb") or 0),
        str(row.get("wire") or ""),
    )
