"""The page of a report: a summary, the figures with their provenance, what others published, and every cell.

The text and structure are in `templates/page.html`; this module computes what stands in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import jinja2

from ringfence_lab.bench.intervals import Interval
from ringfence_lab.bench.units import size_text
from ringfence_lab.report import summary_text
from ringfence_lab.report.figure import Figure, Missing, doubt, verdict
from ringfence_lab.report.labels import SEALED, brief, brief_interval, fully, order, variant_text
from ringfence_lab.report.published import PUBLISHED, READ
from ringfence_lab.report.study import Cell, Study

TITLE: Final = "What protection costs here"
_FACTS: Final = {
    "cpu": "CPU", "cores": "Cores", "memory_gib": "Memory, GiB", "kernel": "Kernel", "python": "Python", "openssl": "OpenSSL",
    "source": "Digest of the code",
}  # fmt: skip
_NUMBER: Final = re.compile(r"[±–]?[\d.,]*( ?(s|ms|µs|%|[KMG]i?B|B))?( \[[\d., ]+\])?")


def page(study: Study, figures: Sequence[Figure | Missing], pictures: Mapping[str, str], tees: str = "") -> str:
    """Return the HTML document. `pictures` are addresses of images, such as `data:` URIs, by the names of their figures.

    `tees` is the address of the page about GPU TEEs, if there is one.
    """
    drawn = [figure for figure in figures if isinstance(figure, Figure)]
    return template("page.html").render(
        tees=tees,
        title=TITLE,
        about=_about(study),
        headline=summary_text.headline(study),
        summary=summary_text.summary(study),
        reading=summary_text.READING,
        limits=summary_text.limits(study),
        figures=drawn,
        pictures=pictures,
        sources={figure.name: summary_text.provenance(study, figure) for figure in drawn},
        missing=[f"{each.title}: {each.why}." for each in figures if isinstance(each, Missing)],
        cells={_heading(cell): [_row(cell, name) for name in cell.lines] for cell in sorted(study.cells, key=order)},
        machine=machine_facts(study.facts),
        commands=dict.fromkeys(run.command for run in study.runs_of(study.cells)),
        published=PUBLISHED,
        read=READ,
    )


def template(name: str) -> jinja2.Template:
    """Return a template of the report by the name of its file."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ringfence_lab.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["column"] = _column
    environment.tests["numeric"] = _are_numbers
    return environment.get_template(name)


def _column(groups: Mapping[str, Iterable[Sequence[str]]], index: int) -> list[str]:
    """Return the texts of one column of a table."""
    return [row[index] for rows in groups.values() for row in rows]


def _are_numbers(texts: Sequence[str]) -> bool:
    """Return whether all texts are numbers with or without a unit: these are aligned to the right."""
    return all(_NUMBER.fullmatch(text) for text in texts)


def _about(study: Study) -> str:
    dates = sorted({run.date[:10] for run in study.runs_of(study.cells)})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "date unknown"
    cells, samples = len(study.cells), sum(line.rounds for cell in study.cells for line in cell.lines.values())
    return f"{summary_text.machine_text(study.facts)} · {when} · {cells} cells, {samples:,} samples"


def _heading(cell: Cell) -> str:
    result = ""
    if SEALED in cell.lines and cell.lines[SEALED].ratio:
        result = f": ringfence is {verdict(cell)}" if cell.scored else f": {doubt(cell)}"
    return f"{fully(cell)} · Gloo / Gloo ±{cell.resolution:.2f}{result}"


def _row(cell: Cell, variant: str) -> tuple[str, ...]:
    line = cell.lines[variant]
    return (
        variant_text(variant),
        str(line.rounds),
        brief_interval(line.seconds),
        _ratio(line.ratio),
        brief(line.cpu_seconds),
        size_text(line.sent_bytes),
    )


def _ratio(ratio: Interval | None) -> str:
    return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else "–"


def machine_facts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return what is known of the machine, by the title under which the page shows it."""
    known = {title: str(facts[name]) for name, title in _FACTS.items() if facts.get(name) is not None}
    if caches := facts.get("caches"):
        known["Caches"] = ", ".join(f"{name} {size}" for name, size in caches.items())
    if versions := facts.get("versions"):
        known["Versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    if gloo := facts.get("gloo"):
        known["Gloo"] = ", ".join(f"{value} {name}" for name, value in gloo.items()) + ", over TCP"
    return known
