"""Writes the report of a study: reads the results, draws the figures, renders the page."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ringfence.errors import ConfigurationError
from ringfence.lab.report import overhead, stages, tuning
from ringfence.lab.report.figure import Builder, Figure, Missing
from ringfence.lab.report.page import page
from ringfence.lab.report.predictions import predictions
from ringfence.lab.report.study import Study, read

PAGE: Final = "report.html"
FIGURES: Final = "figures"
BUILDERS: Final[tuple[Builder, ...]] = (
    overhead.models,
    overhead.workers,
    overhead.variants,
    stages.stages,
    tuning.buckets,
    tuning.wires,
    overhead.rates,
    overhead.sizes,
    stages.roofline,
    predictions,
)


@dataclass(frozen=True)
class Report:
    """The page and figures that were written, and the figures that the study has no numbers for."""

    page: Path
    figures: list[Figure]
    missing: list[Missing]


def figures_of(study: Study, say: Callable[[str], None]) -> list[Figure | Missing]:
    """Return all figures in the order of the page."""
    found: list[Figure | Missing] = []
    for build in BUILDERS:
        if build is predictions:
            say("calibrating the planner with half of the cells to predict the other half")  # the one that takes long
        found += build(study)
    return found


def write(source: Path, target: Path, say: Callable[[str], None] = lambda _: None) -> Report:
    """Write the report of the study in `source` to `target`. `say` is called with each step.

    Raises ConfigurationError if the report cannot be written.
    """
    found = read(source)
    from ringfence.lab.report.drawing import draw  # late: it imports matplotlib, which takes a second

    figures = figures_of(found, say)
    drawn = [figure for figure in figures if isinstance(figure, Figure)]
    folder = target / FIGURES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pictures = {}
        for figure in drawn:
            say(f"drawing: {figure.title}")
            pictures[figure.name] = draw(figure, folder)
        _replace(target / PAGE, page(found, figures, pictures))
    except OSError as error:
        raise ConfigurationError(f"cannot write the report to {target}: {error.strerror}") from error
    missing = [figure for figure in figures if isinstance(figure, Missing)]
    return Report(target / PAGE, drawn, missing)


def _replace(path: Path, text: str) -> None:
    """Replace a file in one step, so that readers see the old or the new page."""
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(aside, 0o644)
    os.replace(aside, path)
