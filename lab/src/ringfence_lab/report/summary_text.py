"""The summary of a study for the top of the page, and its limits."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ringfence_lab.bench.intervals import MIN_ROUNDS
from ringfence_lab.report.figure import QUIET, Figure, counted, counting, distinct, having, ratio_of, uncounted, verdict
from ringfence_lab.report.labels import NAIVE, SEALED, UNSEALED, fully, is_step, percent, plain, what
from ringfence_lab.report.stages import lower_bound_sentence
from ringfence_lab.report.study import Cell, Study

READING: Final = (
    "A point is the median over the rounds of a variant's time over plaintext Gloo's in the same round: 1 is as "
    "fast, 2 takes twice as long. Whiskers are its 95 % bootstrap interval. The grey band is how far plaintext "
    "Gloo reads from itself in the same rounds: points inside it cannot be distinguished from 1. Hollow points come from "
    f"cells where that band is wider than ±0.10, or that have fewer than {MIN_ROUNDS} rounds; they are shown and not counted."
)


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


def summary(study: Study) -> list[str]:
    """Return the findings, the most important first."""
    sentences = [
        _distinguished(_plain_steps(study)),
        _worst(_plain_steps(study)),
        _cost_of_sealing(study),
        _naive(study),
    ]
    return [sentence for sentence in [*sentences, lower_bound_sentence(study)] if sentence]


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


def machine_text(facts: Mapping[str, Any]) -> str:
    """The machine in a line, for captions."""
    if not facts:
        return "a machine that the raw files do not describe"
    kernel = str(facts.get("kernel", "")).partition("-")[0]
    return ", ".join(part for part in (f"{facts.get('cores')} cores of {facts.get('cpu')}", kernel) if part)


def provenance(study: Study, figure: Figure) -> dict[str, str]:
    """Command, date, machine and interval of a figure's cells."""
    runs = study.runs_of(figure.cells)
    dates = sorted({run.date[:10] for run in runs})
    low, high = figure.rounds
    return {
        "Command": "; ".join(dict.fromkeys(run.command for run in runs)) or "not in the raw files",
        "Date": " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "not in the raw files",
        "Machine": machine_text(study.facts),
        "Samples": f"{counted(len(figure.cells), 'cell')}, {low if low == high else f'{low} to {high}'} rounds each; "
        f"Gloo against itself {_resolutions(figure.cells)}; 95 % bootstrap intervals",
    }


def _resolutions(cells: Sequence[Cell]) -> str:
    found = [cell.resolution for cell in cells]
    return f"±{min(found):.2f} to ±{max(found):.2f}" if len(found) > 1 else f"±{found[0]:.2f}"


def _plain_steps(study: Study) -> list[Cell]:
    steps = having((cell for cell in study.cells if plain(cell) and is_step(cell)), SEALED)
    return distinct(steps, lambda cell: (what(cell), cell.workers))


def _middle(cells: Iterable[Cell]) -> float:
    return statistics.median(ratio_of(cell).median for cell in cells)


def _distinguished(steps: Sequence[Cell]) -> str:
    scored = [cell for cell in steps if cell.scored]
    if len(scored) < 2:
        return ""
    found = [verdict(cell) for cell in scored]
    where = {"slower": "are slower", "faster": "are faster", "the same": "cannot be distinguished from it"}
    parts = [f"{found.count(each) or 'none'} {words}" for each, words in where.items()]
    among = f"Of {counted(len(scored), 'step')} that the machine was quiet enough to compare with plaintext Gloo"
    return f"{among}, {', '.join(parts)}."


def _worst(steps: Sequence[Cell]) -> str:
    scored = [cell for cell in steps if cell.scored]
    if len(scored) < 2:
        return ""
    worst, best = max(scored, key=lambda c: ratio_of(c).median), min(scored, key=lambda c: ratio_of(c).median)
    ends = (
        f"{fully(cell)} {ratio_of(cell).median:.2f} [{ratio_of(cell).low:.2f}, {ratio_of(cell).high:.2f}]"
        for cell in (worst, best)
    )
    return "Most and least: {} and {} times Gloo's time.".format(*ends)


def _cost_of_sealing(study: Study) -> str:
    """Sealing against a copy, over everything that was measured with both variants on the loopback."""
    cells, note = counting([cell for cell in having(study.cells, SEALED, UNSEALED) if plain(cell)])
    steps, others = (_over([c for c in cells if is_step(c) is kind], SEALED, UNSEALED) for kind in (True, False))
    named = ((steps, "steps"), (others, "bare collectives"))
    parts = [f"{statistics.median(some):.2f} in {name}" for some, name in named if some]
    if not parts:
        return ""
    what_for = "Sealing alone (ringfence over its own transport without encryption)"
    return f"{what_for} costs a factor of {' and '.join(parts)}, in the median{note}."


def _naive(study: Study) -> str:
    cells, note = counting([cell for cell in having(study.cells, SEALED, NAIVE) if plain(cell)])
    over = _over(cells, NAIVE, SEALED)
    if not over:
        return ""
    return (
        f"Sealing each message for each hop takes {statistics.median(over):.2f} times as long as "
        f"ringfence in the median of {counted(len(over), 'cell')}, up to {max(over):.2f} times{note}."
    )


def _over(cells: Iterable[Cell], one: str, other: str) -> list[float]:
    return [cell.lines[one].seconds.median / cell.lines[other].seconds.median for cell in cells]
