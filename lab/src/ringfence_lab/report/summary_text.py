"""The page of a study: its headline, its limits, and the table of all cells."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from ringfence_lab.bench.intervals import MIN_ROUNDS
from ringfence_lab.bench.units import size_text
from ringfence_lab.report.figure import (
    QUIET,
    Missing,
    Picture,
    Table,
    counted,
    counting,
    distinct,
    doubt,
    having,
    ratio_of,
    uncounted,
    verdict,
)
from ringfence_lab.report.labels import (
    SEALED,
    brief,
    brief_interval,
    fully,
    interval_text,
    is_step,
    order,
    percent,
    plain,
    variant_text,
    what,
)
from ringfence_lab.report.page import Chapter, Section
from ringfence_lab.report.study import CellSummary, Study

TITLE: Final = "What protection costs here"
INTRO: Final = (
    "ringfence is a torch.distributed backend that encrypts and authenticates everything between workers. A cell is one point "
    "of the grid of this study: a model, a trace of a model's gradient buckets, or a single collective, with a number of "
    "workers and settings. In each round of a cell all variants do the same work in turn. Plaintext Gloo, PyTorch's own "
    "backend, runs twice: the difference between its two runs is the resolution of the measurement."
)
READING: Final = (
    "A point is the median over the rounds of a variant's time over plaintext Gloo's in the same round: 1 is as "
    "fast, 2 takes twice as long. Whiskers are its 95 % bootstrap interval. The grey band is how far plaintext "
    "Gloo reads from itself in the same rounds: points inside it cannot be distinguished from 1. Hollow points come from "
    f"cells where that band is wider than ±0.10, or that have fewer than {MIN_ROUNDS} rounds; they are shown and not counted."
)

_CELLS: Final = (
    "Medians over the rounds, with 95 % intervals. After the name of a cell: how far plaintext Gloo reads from itself, and "
    "whether that and the number of rounds are enough to compare ringfence with it."
)


def chapter(study: Study, figures: Sequence[Picture | Missing]) -> Chapter:
    """Return the page of a study."""
    header = ("variant", "rounds", "time", "over Gloo", "CPU, all workers", "sent, all workers")
    cells = {_heading(cell): [_row(cell, name) for name in cell.lines] for cell in sorted(study.cells, key=order)}
    return Chapter(
        title=TITLE,
        headline=headline(study),
        summary=(),
        intro=INTRO,
        reading=READING,
        limits=limits(study),
        figures=figures,
        sections=[Section("cells", "All cells", _CELLS, Table(header, cells))],
        baseline="Gloo",
    )


def _heading(cell: CellSummary) -> str:
    result = ""
    if SEALED in cell.lines and cell.lines[SEALED].ratio:
        result = f": ringfence is {verdict(cell)}" if cell.scored else f": {doubt(cell)}"
    return f"{fully(cell)} · Gloo / Gloo ±{cell.resolution:.2f}{result}"


def _row(cell: CellSummary, variant: str) -> tuple[str, ...]:
    line = cell.lines[variant]
    times = (brief_interval(line.seconds), interval_text(line.ratio), brief(line.cpu_seconds))
    return variant_text(variant), str(line.rounds), *times, size_text(line.sent_bytes)


def headline(study: Study) -> str:
    """Return one sentence: the cost of sealing a training step on this machine."""
    steps = _plain_steps(study)
    scored = [cell for cell in steps if cell.scored]
    if not steps:
        cells, note = counting(having(filter(plain, study.cells), SEALED))
        if not cells:
            return "This study holds no cell that compares ringfence with plaintext Gloo."
        often = f"in the median of {counted(len(cells), 'cell')}{note}"
        return f"On this machine a sealed collective takes {_middle(cells):.2f} times plaintext Gloo's time {often}."
    replayed = ", real or replayed" if any(cell.kind == "trace" for cell in steps) else ""
    if not scored:
        return (
            f"On this machine nothing can be said of training steps{replayed}: in none of "
            f"{counted(len(steps), 'cell')} does plaintext Gloo read {QUIET}."
        )
    middle = _middle(scored)
    often = f"{middle:.2f} times in {'the median of ' if len(scored) > 1 else ''}{counted(len(scored), 'cell')}"
    if all(verdict(cell) == "the same" for cell in scored):
        much = "as long as with plaintext Gloo, within the resolution of the measurement"
    else:
        much = f"{percent(abs(middle - 1))} {'longer' if middle >= 1 else 'shorter'} than with plaintext Gloo"
    step = f"a training step{replayed}, in which" if replayed else "a training step in which"
    return f"On this machine {step} everything between workers is sealed takes {much} ({often}).{uncounted(steps, 'more ')}"


def limits(study: Study) -> list[str]:
    """Return what a reader must know before quoting a figure."""
    found = [
        "One machine carries all workers: every byte is sealed, sent, received and opened by the same cores. A "
        "network between real machines hides more of the cost, and hardware with more cores for each worker too.",
        "The machine may have been shared. Variants of one cell take turns, so that their ratio is sound even "
        "where the times are not; times of different cells are not comparable in this way.",
        "Intervals are 95 % bootstrap intervals of the median over the rounds. They say nothing of another day.",
    ]
    if any(0 < cell.hosts < cell.workers for cell in study.cells):
        found.append(
            "Where a cell has fewer hosts than workers, workers of one host share memory: what they exchange is not sealed and "
            "its ratio compares transports, too. With one host nothing is sealed."
        )
    cores = study.facts.get("cores")
    crowded = sorted({cell.workers for cell in study.cells if cores and cell.workers > cores})
    if crowded:
        many = " and ".join(str(count) for count in crowded)
        found.append(
            f"With {many} workers on {cores} cores, workers wait for each other's cores; small messages then "
            "measure the scheduler of the operating system."
        )
    if any(cell.kind == "trace" for cell in study.cells):
        found.append(
            "A trace replays the buckets that DDP would reduce for a model, for real, and burns (CPU) or waits out "
            "(GPU) the time that computing would take. No GPU took part."
        )
    scaled = {fully(cell) for cell in study.cells if cell.scaled != 1}
    if scaled:
        found.append(
            "Steps with more bytes than the study replays are cut, bytes and computing alike, in "
            f"{counted(len(scaled), 'cell')}; their names say to which part. Their ratios stand for the whole step "
            "only where communication outweighs computing: of a few buckets the last, which no computing hides, is a "
            "larger part than of many."
        )
    if study.left_out:
        found.append(
            f"The folder holds {counted(study.left_out, 'more cell')} of another machine or of other code; the "
            "report shows the last that was measured or asked for."
        )
    return found


def _plain_steps(study: Study) -> list[CellSummary]:
    steps = having((cell for cell in study.cells if plain(cell) and is_step(cell)), SEALED)
    return distinct(steps, lambda cell: (what(cell), cell.workers))


def _middle(cells: Iterable[CellSummary]) -> float:
    return statistics.median(ratio_of(cell).median for cell in cells)
