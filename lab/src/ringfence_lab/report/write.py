"""Writes the report of a study: reads the results, draws the figures, renders the page."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ringfence.errors import ConfigurationError
from ringfence_lab.report import overhead, stages, tee, tee_checks, tuning
from ringfence_lab.report.figure import Builder, Figure, Missing
from ringfence_lab.report.page import page
from ringfence_lab.report.predictions import predictions
from ringfence_lab.report.study import Study, read
from ringfence_lab.report.tee_cells import KIND
from ringfence_lab.report.tee_page import tee_page

PAGE: Final = "report.html"
TEE_PAGE: Final = "gpu-tee.html"
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
TEE_BUILDERS: Final[tuple[Builder, ...]] = (
    tee.models,
    tee.devices,
    tee.all_reduces,
    tee.switches,
    tee.ringfence,
    tee_checks.communication,
    tee_checks.dilation,
    tee_checks.sensitivity,
)


@dataclass(frozen=True)
class Report:
    """The pages and figures that were written, and the figures that the study has no numbers for."""

    pages: list[Path]
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
    on_tees, others = found.part(lambda kind: kind == KIND), found.part(lambda kind: kind != KIND)
    pages: list[tuple[str, list[Figure | Missing], Callable[[Mapping[str, str]], str]]] = []
    if others.cells or not on_tees.cells:
        figures = figures_of(others, say)
        beside = TEE_PAGE if on_tees.cells else ""
        pages.append((PAGE, figures, lambda pictures: page(others, figures, pictures, beside)))
    if on_tees.cells:
        chapter = [figure for build in TEE_BUILDERS for figure in build(on_tees)]
        beside_tees = PAGE if others.cells else ""
        pages.append((TEE_PAGE, chapter, lambda pictures: tee_page(on_tees, chapter, pictures, beside_tees)))
    return _write(pages, target, say)


def _write(
    pages: Sequence[tuple[str, list[Figure | Missing], Callable[[Mapping[str, str]], str]]],
    target: Path,
    say: Callable[[str], None],
) -> Report:
    from ringfence_lab.report.drawing import draw  # late: it imports matplotlib, which takes a second

    folder = target / FIGURES
    drawn: list[Figure] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figures, render in pages:
            pictures = {}
            for figure in figures:
                if isinstance(figure, Figure):
                    say(f"drawing: {figure.title}")
                    pictures[figure.name] = draw(figure, folder)
                    drawn.append(figure)
            _replace(target / name, render(pictures))
    except OSError as error:
        raise ConfigurationError(f"cannot write the report to {target}: {error.strerror}") from error
    missing = [figure for _, figures, _ in pages for figure in figures if isinstance(figure, Missing)]
    return Report([target / name for name, _, _ in pages], drawn, missing)


def _replace(path: Path, text: str) -> None:
    """Replace a file in one step, so that readers see the old or the new page."""
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(aside, 0o644)
    os.replace(aside, path)
