"""The page about GPU TEEs: what confidential mode costs on simulated devices, beside published figures, with its limits.

The text and structure are in `templates/gpu-tee.html`; this module computes what stands in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ringfence.errors import ConfigurationError
from ringfence_lab.accelerator import tee
from ringfence_lab.report import summary_text
from ringfence_lab.report.figure import Figure, Missing
from ringfence_lab.report.labels import brief as brief_time
from ringfence_lab.report.page import machine_facts, template
from ringfence_lab.report.published import PUBLISHED, READ
from ringfence_lab.report.study import Cell, Study
from ringfence_lab.report.tee_cells import (
    ALL,
    CONFIDENTIAL,
    NAMES,
    SEALED,
    brief,
    factor,
    fully,
    having,
    order,
    presets,
    steps,
)
from ringfence_lab.report.tee_checks import late_text
from ringfence_lab.report.tee_published import GPUS, LEE, WORST, distance, distances, reduction

TITLE: Final = "What GPU TEEs cost, simulated"
LIMITS: Final = (
    "No GPU took part. Devices, links and driver threads are simulated: encryption and authentication of every copy are "
    "real, and how long they take is an input. The inputs are listed below with their sources; most are assumptions.",
    "Time is dilated, because a few cores cannot be several GPUs and their hosts. Only ratios of times have a meaning.",
    "Computing is time that passes, from a model's operations and one rate. A step is cut to a few buckets, and its "
    "computing alike. The optimizer, data loading and the first step are left out.",
    "The ring has one channel and sends each part whole. NCCL has several channels and cuts parts into slices, which hides "
    "a part of what is measured here.",
    "Published figures were measured on other hardware with models, batch sizes and bucket sizes that were not found. "
    "Only abstracts and openings of the papers were read. No input was chosen to reach their figures, except the "
    "authentication rate of the preset software.",
    "ringfence really seals and sends between processes. What its host could do in the same time is a limit on the rate "
    "of its links, from the planner's figures for one core of a trust domain.",
)
_PRESENT: Final = ("Lee et al.", "Fastrack", "Phala", "Tinfoil", "NVIDIA")


def tee_page(study: Study, figures: Sequence[Figure | Missing], pictures: Mapping[str, str], others: str = "") -> str:
    """Return the HTML document. `others` is the address of the page about the other cells of the study, if there is one."""
    drawn = [figure for figure in figures if isinstance(figure, Figure)]
    return template("gpu-tee.html").render(
        title=TITLE,
        about=_about(study),
        headline=headline(study),
        summary=summary(study),
        limits=LIMITS,
        distances=[tuple(each) for each in distances(study)],
        figures=drawn,
        pictures=pictures,
        sources={figure.name: _provenance(study, figure) for figure in drawn},
        missing=[f"{each.title}: {each.why}." for each in figures if isinstance(each, Missing)],
        inputs={f"{name}": inputs(name) for name in presets(study.cells)},
        cells={_heading(cell): [_row(cell, name) for name in cell.lines] for cell in sorted(study.cells, key=order)},
        machine=machine_facts(study.facts),
        commands=dict.fromkeys(run.command for run in study.runs_of(study.cells)),
        published=[entry for entry in PUBLISHED if entry.who.startswith(_PRESENT)],
        read=READ,
        others=others,
    )


def headline(study: Study) -> str:
    """Return one sentence: what confidential mode costs the largest model, and how far that is from what was published."""
    cells = having([cell for cell in steps(study) if cell.workers == GPUS and cell.bucket_mb is None], CONFIDENTIAL)
    cells = [cell for cell in cells if cell.model == "gpt2-xl"] or cells
    if not cells:
        return f"This study has no step on {GPUS} devices in confidential mode."
    cell = cells[0]
    ratio = factor(cell)
    said = (
        f"On {GPUS} simulated GPU TEEs ({cell.preset}) a step of {cell.model} takes {brief(ratio.median)} "
        f"[{brief(ratio.low)}, {brief(ratio.high)}] times the step without a TEE"
    )
    if cell.model == "gpt2-xl":
        said += f"; {LEE} publish {WORST} ({distance(ratio.median, WORST)})"
    return f"{said}."


def summary(study: Study) -> list[str]:
    """Return the findings, the most important first."""
    found = []
    for cell in having([cell for cell in steps(study) if cell.model == "gpt2-xl" and cell.workers == GPUS], ALL):
        if cell.bucket_mb is None:
            found.append(
                f"{fully(cell)}: all three optimisations together leave {brief(factor(cell, ALL).median)} times, which saves "
                f"{100 * reduction(cell, ALL):.0f} % of the confidential step."
            )
    sealed = having(steps(study), CONFIDENTIAL, SEALED)
    if sealed:
        over = [cell.lines[SEALED].seconds.median / cell.lines[CONFIDENTIAL].seconds.median for cell in sealed]
        found.append(
            f"ringfence takes {min(over):.2f} to {max(over):.2f} times as long as hop by hop, in {len(over)} cells; less in "
            f"{sum(each < 1 for each in over)} of them."
        )
    return found


def inputs(preset: str) -> list[tuple[str, ...]]:
    """Return the figures of a preset with their sources; of one that this version does not have, nothing."""
    try:
        found = tee.load(preset)
    except ConfigurationError:
        return []
    rows: list[tuple[str, ...]] = []
    for name, (unit, about) in tee.FIGURES.items():
        origin = found.origins[name]
        said = f"assumed: {origin.text}" if origin.assumed else f"{origin.text} ({origin.date})"
        rows.append((name, f"{getattr(found, name):g} {unit}".strip(), about, said))
    return rows


def _about(study: Study) -> str:
    dates = sorted({run.date[:10] for run in study.runs_of(study.cells)})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "date unknown"
    return f"{summary_text.machine_text(study.facts)} · {when} · {len(study.cells)} cells"


def _provenance(study: Study, figure: Figure) -> dict[str, str]:
    found = summary_text.provenance(study, figure)
    low, high = figure.rounds
    rounds = str(low) if low == high else f"{low} to {high}"
    widest = max(cell.resolution for cell in figure.cells)
    cells = "1 cell" if len(figure.cells) == 1 else f"{len(figure.cells)} cells"
    found["Samples"] = (
        f"{cells}, {rounds} rounds each; the step without a TEE against itself ±{widest:.2f} at most; 95 % bootstrap intervals"
    )
    return found


def _heading(cell: Cell) -> str:
    return f"{fully(cell)}, dilated for {cell.load or 0:g} cores · no TEE / no TEE ±{cell.resolution:.2f}"


def _row(cell: Cell, variant: str) -> tuple[str, ...]:
    line = cell.lines[variant]
    ratio = line.ratio
    return (
        NAMES.get(variant, variant),
        str(line.rounds),
        brief_time(line.seconds.median),
        f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else "–",
        f"{line.dilation:g}",
        f"{line.cores:.2f}",
        late_text(cell, variant),
    )
