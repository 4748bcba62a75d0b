"""The figure of predicted against measured times; each half of the study is predicted from the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ringfence.errors import ConfigurationError
from ringfence_lab.plan.validate import Line, Validation, validate
from ringfence_lab.report.figure import DIGITS, Figure, Missing, Table
from ringfence_lab.report.labels import brief, fully, order, percent, variant_text
from ringfence_lab.report.study import Cell, Study

_READING: Final = (
    "Each point is one variant in one cell: left to right the time that was measured, upwards the time that the "
    "planner's cost model predicts from cells it was calibrated with, of which this is none. On the line it is "
    "right; between the dotted lines it is within 10 %. Hollow points come from cells in which Gloo reads more "
    "than 10 % from itself, or that have too few rounds; they are shown and not counted."
)
_WORST: Final = 8
_SEED: Final = 0


def predictions(study: Study) -> Sequence[Figure | Missing]:
    title = "Predicted against measured"
    cores = study.facts.get("cores")
    if not cores:
        return [Missing("predictions", title, "nothing says how many cores the machine has")]
    try:
        found = validate(study.rows, _SEED, cores)
    except ConfigurationError as error:
        return [Missing("predictions", title, str(error))]
    cells = {cell.name: cell for cell in study.cells}
    lines = [line for line in found.lines if line.cell in cells]
    if not lines:
        return [Missing("predictions", title, "the model covers none of the cells")]
    numbers: dict[str, Any] = {}
    for line in lines:
        numbers.setdefault(_name(line), []).append(_point(line))
    used = sorted((cells[name] for name in {line.cell for line in lines}), key=order)
    return [Figure("predictions", "scatter", title, _says(found), _READING, numbers, used, _table(lines, cells))]


def _says(found: Validation) -> str:
    if not found.scored_cells:
        return "In no cell does Gloo read within 10 % of itself: the model is shown, and not verified."
    (middle, worst), (ratio_middle, ratio_worst) = found.errors(ratios=False), found.errors(ratios=True)
    return (
        "Calibrated on half of the cells, the model predicts the times of the other half to within "
        f"{percent(middle)} in the median and {percent(worst)} at worst, and their ratios to Gloo to within "
        f"{percent(ratio_middle)} and {percent(ratio_worst)}, over the {found.scored_cells} of {found.cells} cells "
        "in which Gloo reads within 10 % of itself."
    )


def _name(line: Line) -> str:
    return variant_text("gloo-a" if line.variant == "gloo" else line.variant)


def _point(line: Line) -> dict[str, Any]:
    point = {"measured": round(line.measured, DIGITS + 4), "predicted": round(line.predicted, DIGITS + 4)}
    return point if line.scored else {**point, "scored": False}


def _table(lines: Sequence[Line], cells: dict[str, Cell]) -> Table:
    """Where the model is farthest off, among what counts."""
    worst = sorted((line for line in lines if line.scored), key=lambda line: -line.error)[:_WORST]
    rows = [
        (fully(cells[line.cell]), _name(line), brief(line.measured), brief(line.predicted), percent(line.error))
        for line in worst
    ]
    return Table(("farthest off", "variant", "measured", "predicted", "off by"), {"": rows})
