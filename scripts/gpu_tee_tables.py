"""`scripts/gpu-tee`: the figures and tables of docs/benchmarks/gpu-tee.md, from docs/results/gpu-tee; or --check them.

They are those of `ringfence report`, as SVG files and as tables in Markdown. Nobody types a figure.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from ringfence_lab.report import summary_text, tee_checks
from ringfence_lab.report.digest import digest
from ringfence_lab.report.figure import Figure
from ringfence_lab.report.study import Study, read
from ringfence_lab.report.tee_cells import CONFIDENTIAL, SEALED, having, steps
from ringfence_lab.report.tee_cells import brief as ratio_text
from ringfence_lab.report.tee_page import headline, inputs, summary
from ringfence_lab.report.tee_published import distances
from ringfence_lab.report.write import TEE_BUILDERS
from scripts import generated

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "docs" / "results" / "gpu-tee"
FIGURES: Final = ROOT / "docs" / "figures"
PAGE: Final = ROOT / "docs" / "benchmarks" / "gpu-tee.md"


def figures_of(study: Study) -> dict[str, Figure]:
    """Return the figures that the study has numbers for, by name."""
    return {figure.name: figure for build in TEE_BUILDERS for figure in build(study) if isinstance(figure, Figure)}


def filled(page: str, study: Study) -> str:
    """Return the page with fresh tables at its markers; a marker that names no table is a mistake."""
    figures = figures_of(study)
    return generated.filled(page, "gpu-tee", lambda name: _part(name, study, figures))


def _part(name: str, study: Study, figures: dict[str, Figure]) -> str:
    if name in TABLES:
        return TABLES[name](study)
    return figure_text(figures[name])


def figure_text(figure: Figure) -> str:
    """Return a figure in Markdown: its sentence, its picture, how to read it, and its table where it has one."""
    picture = f"![{figure.title}](../figures/{figure.name}.svg)"
    parts = [figure.says, "", picture, "", f"*{figure.reading}*"]
    if figure.table is not None:
        rows = [(name, *row) for name, some in figure.table.groups.items() for row in some]
        parts += ["", table(("cell", *figure.table.header), rows)]
    return "\n".join(parts)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def _summary(study: Study) -> str:
    runs = study.runs_of(study.cells)
    commands = ", ".join(f"`{command}`" for command in dict.fromkeys(run.command for run in runs))
    dates = sorted({run.date[:10] for run in runs})
    most = max(line.cores for cell in study.cells for line in cell.lines.values())
    rounds = sum(line.rounds for cell in study.cells for line in cell.lines.values())
    about = (
        f"{commands} on {summary_text.machine_text(study.facts)}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}: "
        f"{len(study.cells)} cells, {rounds} samples, at most {most:.2f} of {study.facts.get('cores')} cores in use."
    )
    return "\n".join([f"**{headline(study)}**", "", *(f"- {each}" for each in summary(study)), "", about])


def _distances(study: Study) -> str:
    header = ("source", "of what", "published", "simulated", "cell", "distance")
    return table(header, distances(study))


def _sealed(study: Study) -> str:
    rows = []
    for cell in having(steps(study), CONFIDENTIAL, SEALED):
        one, other = (cell.lines[name] for name in (CONFIDENTIAL, SEALED))
        assert one.ratio is not None and other.ratio is not None
        over = other.seconds.median / one.seconds.median
        what = f"{cell.model}{f', {cell.bucket_mb:g} MiB' if cell.bucket_mb else ''}"
        ratios = (ratio_text(one.ratio.median), ratio_text(other.ratio.median), f"{over:.2f}")
        rows.append((what, cell.preset, cell.workers, *ratios))
    return table(("model", "preset", "devices", "hop by hop", "ringfence", "ringfence over hop by hop"), rows)


def _inputs(study: Study) -> str:
    presets = sorted({cell.preset for cell in study.cells if cell.preset})
    rows = [(name, f"`{row[0]}`", row[1], row[3].replace("|", "/")) for name in presets for row in inputs(name)]
    return table(("preset", "input", "value", "source"), rows)


def _cores(study: Study) -> str:
    rows = []
    for cell in sorted(study.cells, key=lambda cell: cell.name):
        lines = cell.lines.values()
        lates = [tee_checks.late_text(cell, line.variant) for line in lines]
        span = f"{min(line.cores for line in lines):.2f} to {max(line.cores for line in lines):.2f}"
        dilations = f"{min(line.dilation for line in lines):g} to {max(line.dilation for line in lines):g}"
        worst = max(lates, key=lambda text: float(text.split()[0]) if text[0].isdigit() else 0.0)
        rows.append((f"`{cell.name}`", dilations, span, worst))
    return table(("cell", "dilation", "cores in use", "late, at most"), rows)


TABLES: Final[dict[str, Callable[[Study], str]]] = {
    "summary": _summary,
    "distances": _distances,
    "sealed": _sealed,
    "inputs": _inputs,
    "cores": _cores,
}


def stale(study: Study) -> list[str]:
    """Return what does not show these samples: the page by its text, pictures by the digest they carry."""
    found = [PAGE.name] if PAGE.read_text() != filled(PAGE.read_text(), study) else []
    for name, figure in figures_of(study).items():
        path = FIGURES / f"{name}.svg"
        if not path.exists() or f"samples {digest(figure.numbers)}" not in path.read_text():
            found.append(path.name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu-tee", description=__doc__)
    parser.add_argument("--check", action="store_true", help="say what is stale, and change nothing")
    options = parser.parse_args()
    study = read(RESULTS)
    if options.check:
        left = stale(study)
        print("\n".join(f"{name} is stale: run scripts/gpu-tee" for name in left) or "fresh")
        return 1 if left else 0
    from ringfence_lab.report.drawing import chart_of
    from ringfence_lab.report.style import save

    with tempfile.TemporaryDirectory() as pixels:
        for name, figure in figures_of(study).items():
            save(name, figure.numbers, chart_of(figure), FIGURES, Path(pixels))
    PAGE.write_text(filled(PAGE.read_text(), study))
    return 0


if __name__ == "__main__":
    sys.exit(main())
