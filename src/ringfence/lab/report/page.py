"""The page: a summary in plain words, the figures with where they come from, what others published, every cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Final

from ringfence.lab.bench.intervals import Interval
from ringfence.lab.bench.units import size_text
from ringfence.lab.report import html, summary_text
from ringfence.lab.report.figure import Figure, Missing, doubt, verdict
from ringfence.lab.report.labels import SEALED, brief, brief_interval, fully, order, variant_text
from ringfence.lab.report.published import PUBLISHED, READ
from ringfence.lab.report.study import Cell, Study

TITLE: Final = "What protection costs here"
_FACTS: Final = {
    "cpu": "CPU", "cores": "Cores", "memory_gib": "Memory, GiB", "kernel": "Kernel", "python": "Python", "openssl": "OpenSSL",
    "source": "Digest of the code",
}  # fmt: skip


def page(study: Study, figures: Sequence[Figure | Missing], pictures: Mapping[str, str]) -> str:
    """The whole document. `pictures` are SVG by the name of their figure."""
    drawn = [figure for figure in figures if isinstance(figure, Figure)]
    body = [*_top(study, figures), *(_section(study, figure, pictures[figure.name]) for figure in drawn)]
    body += [_missing(figures), _cells(study), _machine(study), _published()]
    style = (resources.files("ringfence.lab.report") / "page.css").read_text()
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>ringfence: {TITLE.lower()}</title>",
            f"<style>\n{style}</style>",
            "</head>",
            "<body>",
            *(part for part in body if part),
            "</body>",
            "</html>",
            "",
        ]
    )


def _top(study: Study, figures: Sequence[Figure | Missing]) -> Iterator[str]:
    dates = sorted({run.date[:10] for run in study.runs_of(study.cells)})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "date unknown"
    cells, samples = len(study.cells), sum(line.rounds for cell in study.cells for line in cell.lines.values())
    yield "<header>"
    yield f"<h1>{TITLE}</h1>"
    about = f"{summary_text.machine_text(study.facts)} · {when} · {cells} cells, {samples:,} samples"
    yield html.paragraph(about, "soft")
    yield html.paragraph(summary_text.headline(study), "headline")
    yield "</header>"
    yield html.bullets(summary_text.summary(study))
    yield html.paragraph(
        "ringfence is a torch.distributed backend that encrypts and authenticates everything between workers. A "
        "cell is one point of the grid of this study: a model, a trace of a model's gradient buckets, or a single "
        "collective, with so many workers and settings. In each round of a cell all variants do the same work in "
        "turn; plaintext Gloo, PyTorch's own backend, runs twice, and what it differs from itself is what the "
        "instrument cannot tell apart."
    )
    links = [
        f'<li><a href="#{escape(figure.name)}">{escape(figure.title)}</a></li>'
        for figure in figures
        if isinstance(figure, Figure)
    ]
    others = {"cells": "All cells", "machine": "The machine", "published": "What others published"}
    links += [f'<li><a href="#{name}">{title}</a></li>' for name, title in others.items()]
    yield '<nav aria-label="Contents"><ul>\n' + "\n".join(links) + "\n</ul></nav>"
    yield "<h2>How to read the figures</h2>"
    yield html.paragraph(summary_text.READING)
    yield "<h2>Before you quote a figure</h2>"
    yield html.bullets(summary_text.limits(study))


def _section(study: Study, figure: Figure, picture: str) -> str:
    parts = [
        f'<section id="{escape(figure.name)}" class="own-page">',
        f"<h2>{escape(figure.title)}</h2>",
        html.paragraph(figure.says),
    ]
    parts += ["<figure>", picture, f'<figcaption class="reading">{escape(figure.reading)}</figcaption>', "</figure>"]
    if figure.table:
        parts.append(html.table(figure.table.header, figure.table.groups))
    return "\n".join([*parts, html.terms(summary_text.provenance(study, figure), "provenance"), "</section>"])


def _missing(figures: Sequence[Figure | Missing]) -> str:
    found = [f"{each.title}: {each.why}." for each in figures if isinstance(each, Missing)]
    if not found:
        return ""
    return "\n".join(['<section id="missing">', "<h2>Not in this study</h2>", html.bullets(found), "</section>"])


def _cells(study: Study) -> str:
    header = ("variant", "rounds", "time", "over Gloo", "CPU, all workers", "sent, all workers")
    groups = {_heading(cell): [_row(cell, name) for name in cell.lines] for cell in sorted(study.cells, key=order)}
    note = (
        "Medians over the rounds, with 95 % intervals. Behind a cell's name: how far plaintext Gloo reads from "
        "itself, and what that and the number of rounds leave to be said of ringfence."
    )
    return "\n".join(
        [
            '<section id="cells" class="own-page">',
            "<h2>All cells</h2>",
            html.paragraph(note, "reading"),
            html.table(header, groups),
            "</section>",
        ]
    )


def _heading(cell: Cell) -> str:
    told = ""
    if SEALED in cell.lines and cell.lines[SEALED].ratio:
        told = f": ringfence is {verdict(cell)}" if cell.scored else f": {doubt(cell)}"
    return f"{fully(cell)} · Gloo / Gloo ±{cell.resolution:.2f}{told}"


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


def _machine(study: Study) -> str:
    facts = study.facts
    known = {title: str(facts[name]) for name, title in _FACTS.items() if facts.get(name) is not None}
    if caches := facts.get("caches"):
        known["Caches"] = ", ".join(f"{name} {size}" for name, size in caches.items())
    if versions := facts.get("versions"):
        known["Versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    if gloo := facts.get("gloo"):
        known["Gloo"] = ", ".join(f"{value} {name}" for name, value in gloo.items()) + ", over TCP"
    commands = dict.fromkeys(run.command for run in study.runs_of(study.cells))
    said = (
        html.terms(known, "provenance") if known else html.paragraph("The raw files of this study do not describe it.")
    )
    told = "\n".join(f"<p><code>{escape(command)}</code></p>" for command in commands)
    parts = ['<section id="machine">', "<h2>The machine</h2>", said, told, "</section>"]
    return "\n".join(part for part in parts if part)


def _published() -> str:
    rows = "\n".join(
        f"<tr><td>{escape(each.who)}</td><td>{escape(each.what)}</td><td>{escape(each.figure)}</td>"
        f"<td>{escape(READ[each.read])}. {escape(each.doubt)} {_address(each.source)}</td></tr>"
        for each in PUBLISHED
    )
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("who", "of what", "figure", "how we know, and doubts"))
    return "\n".join(
        [
            '<section id="published" class="own-page">',
            "<h2>What others published</h2>",
            html.paragraph(
                "Other hardware, other guarantees, other rules of measuring: GPU TEEs, confidential GPUs, "
                "supercomputers. None of these figures was measured here, none stands in a chart with ours, and no "
                "ratio between them and ours means anything. They are here because a reader will have seen them."
            ),
            '<div class="wide" tabindex="0"><table class="published">',
            f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>",
            "</section>",
        ]
    )


def _address(source: str) -> str:
    return (
        f'<a href="{escape(source)}">{escape(source.removeprefix("https://"))}</a>'
        if source
        else "No address was kept."
    )
