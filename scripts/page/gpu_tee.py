"""The page of GPU TEEs: figures and tables of `ringfence report` for docs/results/gpu-tee, in Markdown."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ringfence_lab.bench import names
from ringfence_lab.bench.tee_variants import tee_of
from ringfence_lab.report import study, tee
from ringfence_lab.report.figure import Picture, Table, over, ratio_of
from ringfence_lab.report.labels import order, ratio_text
from ringfence_lab.report.page import machine_text
from ringfence_lab.report.study import Study
from ringfence_lab.report.tee_page import headline, summary
from ringfence_lab.report.write import TEE_BUILDERS
from ringfence_lab.study import grid, tee_cost
from scripts.generated import table
from scripts.page import RESULTS, ROOT, published_point

KIND: Final = "gpu-tee"
PAGES: Final = (ROOT / "docs" / "benchmarks" / "gpu-tee.md",)


def read(results: Path) -> Study:
    return study.read(results / "gpu-tee")


def pictures(found: Study) -> list[Picture]:
    """Those of the page, which has a table of ringfence."""
    figures = [figure for build in TEE_BUILDERS for figure in build(found) if isinstance(figure, Picture)]
    return [figure for figure in figures if figure.name != "tee-ringfence"]


def _figure(name: str, found: Study) -> str:
    """A figure in Markdown: its sentence, its picture, and how to read it, unless the first figure says so."""
    first, *others = pictures(found)
    figure = next(figure for figure in (first, *others) if figure.name == name)
    reading = f"\n\n*{figure.reading}*" if figure is first or figure.reading not in first.reading else ""
    return f"{figure.says}\n\n![{figure.title}](../figures/{name}.svg){reading}"


def _table(found: Table) -> str:
    """A table in Markdown."""
    rows = [row for some in found.groups.values() for row in some]
    return table(found.header, [[cell.replace("|", "/") for cell in row] for row in rows])


def _by_cell(found: Table) -> str:
    """The same of a table that begins with the name of a cell: it is written in the first of its rows."""
    rows: list[Sequence[str]] = []
    for _, same in itertools.groupby(itertools.chain(*found.groups.values()), key=lambda row: row[0]):
        first, *others = same
        rows += [first, *(("", *row[1:]) for row in others)]
    return _table(Table(found.header, {"": rows}))


def _summary(found: Study) -> str:
    lines = [line for cell in found.cells for line in cell.lines.values()]
    about = (
        f"`{found.command}` on {machine_text(found.facts)}, {found.days}: {len(found.cells)} cells, "
        f"{sum(line.rounds for line in lines)} samples, at most {max(line.cores for line in lines):.2f} of "
        f"{found.facts.get('cores')} cores in use."
    )
    return "\n".join([f"**{headline(found)}**", "", *(f"- {each}" for each in summary(found)), "", about])


def _steps(found: Study) -> str:
    """All steps, without the columns of ringfence, which has a table of its own."""
    made = tee.all_steps(found)
    return _table(Table(made.header[:-2], {name: [row[:-2] for row in rows] for name, rows in made.groups.items()}))


SETTINGS: Final = ("model", "preset", "bucket_mb", "workers", "host_cores")


def _bytes_alone() -> dict[tuple[Any, ...], float]:
    """By settings of a cell: the seconds of a step of ringfence if a copy had no fixed cost and hosts took no time."""
    seconds = {}
    for cell in grid.built_in("gpu-tee-ringfence"):
        figures = {**cell.settings["tee"], "copy_overhead": 0.0}
        rates = tee_of(names.TEE_SEALED, figures)
        seconds[tuple(cell.settings[each] for each in SETTINGS)] = tee_cost.sealed_seconds(
            rates, cell.settings["workers"], cell.trace, math.inf
        )
    return seconds


def _ringfence(_: Study) -> str:
    """ringfence beside hop by hop, and beside the time that its bytes alone take."""
    found = study.read(RESULTS / "gpu-tee-ringfence")
    bounds, rows = _bytes_alone(), []
    for cell in sorted(found.cells, key=lambda cell: (-(cell.host_cores or 0), order(cell))):
        bucket = "default" if cell.bucket_mb is None else f"{cell.bucket_mb:g} MiB"
        ratios = (ratio_text(ratio_of(cell, name).median) for name in (tee.CONFIDENTIAL, tee.SEALED))
        beside = f"{over(cell, tee.SEALED, tee.CONFIDENTIAL):.2f}"
        settings = tuple(getattr(cell, each) for each in SETTINGS)
        bound = ratio_text(bounds[settings] / cell.lines[names.TEE_BASELINE[0]].seconds.median)
        about = (f"{cell.model}", f"{cell.preset}", bucket, f"{cell.workers}", f"{cell.host_cores:g}")
        rows.append([*about, *ratios, bound, beside])
    shown = ("hop by hop", "ringfence", "bytes alone", "over hop by hop")
    header = ("model", "preset", "buckets", "devices", "cores", *shown)
    return f"{table(header, rows)}\n\n`{found.command}`, {found.days}."


TABLES: Final[dict[str, Callable[[Study], str]]] = {
    "ringfence": _ringfence,
    "summary": _summary,
    "distances": lambda found: _table(tee.distances(found)),
    "tee-models": lambda found: _figure("tee-models", found),
    "tee-switches": lambda found: _figure("tee-switches", found),
    "steps": _steps,
    "dilations": lambda found: _by_cell(tee.dilations(found)),
    "sensitivity": lambda found: _by_cell(tee.sensitivity(found)),
    "point-choices": lambda _: published_point.choices(),
    "point-steps": lambda _: published_point.steps(study.read(RESULTS / "gpu-tee-published")),
}
