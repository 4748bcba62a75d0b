"""The page of a report: a summary, the figures with their provenance, tables, and the machine.

The structure is in `templates/page.html`; a `Chapter` has what stands in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jinja2

from ringfence_lab.report.figure import Missing, Picture, Table, counted
from ringfence_lab.report.study import Study

_FACTS: Final = {
    "cpu": "CPU", "features": "CPU features", "cores": "Cores", "memory_gib": "Memory, GiB", "kernel": "Kernel",
    "python": "Python", "openssl": "OpenSSL",
    "source": "Digest of the code",
}  # fmt: skip
_NUMBER: Final = re.compile(r"[±–]?[\d.,]*( ?(s|ms|µs|%|[KMG]i?B|B))?( \[[\d., ]+\])?")


class Section(NamedTuple):
    """A table with words over it."""

    name: str
    title: str
    text: str
    table: Table


@dataclass(frozen=True)
class Chapter:
    """The words, figures and tables of a page."""

    title: str
    headline: str
    summary: Sequence[str]
    intro: str
    reading: str  # how to read the figures; "" where each says it
    limits: Sequence[str]  # what a reader must know before quoting a figure
    figures: Sequence[Picture | Missing]
    sections: Sequence[Section]
    baseline: str  # what ratios are to, and what was run twice

    @property
    def drawn(self) -> list[Picture]:
        return [figure for figure in self.figures if isinstance(figure, Picture)]

    @property
    def missing(self) -> list[Missing]:
        return [figure for figure in self.figures if isinstance(figure, Missing)]


def page(study: Study, chapter: Chapter, pictures: Mapping[str, str], beside: Mapping[str, str] | None = None) -> str:
    """Return the HTML document.

    `pictures` are addresses of images, such as `data:` URIs, by the names of their figures; `beside` are the words of links
    to other pages by their addresses.
    """
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
    return environment.get_template("page.html").render(
        chapter=chapter,
        about=_about(study),
        pictures=pictures,
        sources={figure.name: provenance(study, figure, chapter.baseline) for figure in chapter.drawn},
        machine=_machine_facts(study.facts),
        commands=[study.command] if study.command else [],
        beside=beside or {},
    )


def _column(groups: Mapping[str, Iterable[Sequence[str]]], index: int) -> list[str]:
    """Return the texts of one column of a table."""
    return [row[index] for rows in groups.values() for row in rows]


def _are_numbers(texts: Sequence[str]) -> bool:
    """Return whether all texts are numbers with or without a unit: these are aligned to the right."""
    return all(_NUMBER.fullmatch(text) for text in texts)


def _about(study: Study) -> str:
    samples = sum(line.rounds for cell in study.cells for line in cell.lines.values())
    when = study.days or "date unknown"
    return f"{machine_text(study.facts)} · {when} · {len(study.cells)} cells, {samples:,} samples"


def provenance(study: Study, figure: Picture, baseline: str) -> dict[str, str]:
    """Return the command, date, machine and interval of a figure's cells."""
    low, high = figure.rounds
    least, most = (f"±{each(cell.resolution for cell in figure.cells):.2f}" for each in (min, max))
    return {
        "Command": study.command or "not known",
        "Date": study.days or "not known",
        "Machine": machine_text(study.facts),
        "Samples": f"{counted(len(figure.cells), 'cell')}, {low if low == high else f'{low} to {high}'} rounds each; "
        f"{baseline} against itself {least if len(figure.cells) == 1 else f'{least} to {most}'}; 95 % bootstrap intervals",
    }


def machine_text(facts: Mapping[str, Any]) -> str:
    """Return the machine in a line, for captions."""
    if not facts:
        return "a machine that the study does not describe"
    kernel = str(facts.get("kernel", "")).partition("-")[0]
    return ", ".join(part for part in (f"{facts.get('cores')} cores of {facts.get('cpu')}", kernel) if part)


def _machine_facts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return what is known of the machine, by the title under which the page shows it."""
    known = {title: str(facts[name]) for name, title in _FACTS.items() if facts.get(name) is not None}
    for name, title in {"caches": "Caches", "versions": "Versions"}.items():
        if facts.get(name):
            known[title] = ", ".join(f"{part} {value}" for part, value in facts[name].items())
    if gloo := facts.get("gloo"):
        known["Gloo"] = ", ".join(f"{value} {name}" for name, value in gloo.items()) + ", over TCP"
    return known
