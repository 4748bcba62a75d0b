"""The page about GPU TEEs: what confidential mode costs on simulated devices, beside published figures, with its limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ringfence.errors import ConfigurationError
from ringfence_lab.accelerator import tee as devices
from ringfence_lab.report import tee
from ringfence_lab.report.figure import Missing, Picture, Table, over, ratio_of
from ringfence_lab.report.labels import brief, interval_text, percent, ratio_text
from ringfence_lab.report.page import Chapter, Section
from ringfence_lab.report.study import CellSummary, Study

TITLE: Final = "What GPU TEEs cost, simulated"
INTRO: Final = (
    "A GPU in confidential mode encrypts what it exchanges with the host, and a ring between GPUs then passes through the "
    "host's memory in every sub-step. Here the devices are simulated: each copy is really encrypted, moved through a bounce "
    "buffer, and authenticated, in the time that the inputs say. A cell is one point of the grid: the gradient buckets of a "
    "model, a number of devices and a set of inputs. In each round of a cell all variants run in turn. The step without a TEE "
    "runs twice; the difference is the resolution of the measurement."
)
LIMITS: Final = (
    "No GPU took part. Devices, links and driver threads are simulated: encryption and authentication of every copy are "
    "real, and how long they take is an input. The inputs are listed below with their sources; most are assumptions.",
    "Time is dilated, because a few cores cannot be several GPUs and their hosts. Only ratios of times have a meaning.",
    "Computing is time that passes, from a model's operations and one rate. A step is cut to a few buckets, and its "
    "computing alike. The optimizer, data loading and the first step are left out.",
    "The ring has one channel and sends each part whole. NCCL has several channels and cuts parts into slices, which hides "
    "a part of what is measured here.",
    "Published figures were measured on other hardware with models, batch sizes and bucket sizes that were not found. "
    "Only abstracts and openings of the papers were read; one may have used emulated drivers. No input was chosen to reach "
    "their figures, except the authentication rate of the preset software and two of the preset published.",
    "ringfence really seals and sends between processes. What its host could do in the same time is a limit on the rate "
    "of its links, from the planner's figures for one core of a trust domain.",
)
_CELLS: Final = (
    "Medians over the rounds, with 95 % intervals. Cores: processor time over wall time. Late: share of the wall time in which "
    "simulated time stood still, because the machine had to catch up."
)
_DISTANCES: Final = (
    "What was published, what the simulation gives, and how far apart they are. Only the preset published was "
    "adjusted to reduce the distance."
)


def chapter(study: Study, figures: Sequence[Picture | Missing]) -> Chapter:
    """Return the page of the cells on simulated GPU TEEs."""
    header = ("variant", "rounds", "simulated time", "over no TEE", "dilation", "cores", "late")
    cells = {_heading(cell): [_row(cell, name) for name in cell.lines] for cell in sorted(study.cells, key=tee.order)}
    dilated = "If contention of the machine were measured, more dilation would change the ratios."
    sections = (
        Section("distances", "Distance to published figures", _DISTANCES, tee.distances(study)),
        Section("steps", "All steps", "Times over that of the same step without a TEE.", tee.all_steps(study)),
        Section(
            "sensitivity", "Which input decides", "Ratios with one input halved or doubled.", tee.sensitivity(study)
        ),
        Section("dilation", "The same ratios at two dilations", dilated, tee.dilations(study)),
        Section("inputs", "Inputs and their sources", "", inputs(study)),
        Section("cells", "All cells", _CELLS, Table(header, cells)),
    )
    return Chapter(
        title=TITLE,
        headline=headline(study),
        summary=summary(study),
        intro=INTRO,
        reading="",
        limits=LIMITS,
        figures=figures,
        sections=[section for section in sections if any(section.table.groups.values())],
        baseline="the step without a TEE",
    )


def headline(study: Study) -> str:
    """Return one sentence: what confidential mode costs the largest model, and how far that is from what was published."""
    cells = tee.plain_steps(study, tee.CONFIDENTIAL)
    cells = [cell for cell in cells if cell.model == tee.LARGEST] or cells
    if not cells:
        return f"This study has no step on {tee.GPUS} devices in confidential mode."
    ratio = ratio_of(cells[0], tee.CONFIDENTIAL)
    said = (
        f"On {tee.GPUS} simulated GPU TEEs ({cells[0].preset}) a step of {cells[0].model} takes {ratio_text(ratio.median)} "
        f"[{ratio_text(ratio.low)}, {ratio_text(ratio.high)}] times the step without a TEE"
    )
    if cells[0].model == tee.LARGEST:
        said += f"; {tee.LEE} publish {tee.WORST} ({tee.distance(ratio.median, tee.WORST)})"
    return f"{said}."


def summary(study: Study) -> list[str]:
    """Return the findings, the most important first."""
    found = [
        f"{tee.fully(cell)}: all three optimisations together leave {ratio_text(ratio_of(cell, tee.ALL).median)} times, which "
        f"saves {100 * tee.saved(cell):.0f} % of the confidential step."
        for cell in tee.plain_steps(study, tee.CONFIDENTIAL, tee.ALL)
        if cell.model == tee.LARGEST
    ]
    sealed = tee.steps(study, tee.CONFIDENTIAL, tee.SEALED)
    if times := [over(cell, tee.SEALED, tee.CONFIDENTIAL) for cell in sealed]:
        found.append(
            f"ringfence takes {min(times):.2f} to {max(times):.2f} times as long as hop by hop, in {len(times)} cells; less in "
            f"{sum(each < 1 for each in times)} of them."
        )
    return found


def inputs(study: Study) -> Table:
    """Return the figures of the presets with their sources; of a preset that this version does not have, nothing."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for preset in tee.presets(study.cells):
        try:
            found = devices.load(preset)
        except ConfigurationError:
            continue
        for name, (unit, about) in devices.FIGURES.items():
            origin = found.origins[name]
            said = f"assumed: {origin.text}" if origin.assumed else f"{origin.text} ({origin.date})"
            row = (name, f"{getattr(found, name):g} {unit}".strip(), about, said)
            groups.setdefault(preset, []).append(row)
    return Table(("input", "value", "of what", "source"), groups)


def _heading(cell: CellSummary) -> str:
    return f"{tee.fully(cell)}, dilated for {cell.load or 0:g} cores · no TEE / no TEE ±{cell.resolution:.2f}"


def _row(cell: CellSummary, variant: str) -> tuple[str, ...]:
    line = cell.lines[variant]
    times = (brief(line.seconds.median), interval_text(line.ratio))
    late = percent(line.late_seconds / line.wall_seconds) if line.wall_seconds else "–"
    cores = (f"{line.dilation:g}", f"{line.cores:.2f}", late)
    return tee.NAMES.get(variant, variant), str(line.rounds), *times, *cores
