"""Published figures of GPU TEEs as numbers, and how far the simulated ones are from them. Nothing is fitted to them."""

from __future__ import annotations

import statistics
from typing import Final, NamedTuple

from ringfence_lab.report.study import Cell, Study
from ringfence_lab.report.tee_cells import ALL, CONFIDENTIAL, default_buckets, factor, fully, having, presets, steps

LEE: Final = "Lee et al."
FASTRACK: Final = "Fastrack"
GPUS: Final = 4
AVERAGE, WORST, ENLARGED = 8.68, 41.6, 3.03  # Lee et al.: all models, GPT-2 XL, GPT-2 XL with larger buckets
COPIES: Final = (12.69, 33.53)  # Fastrack: CPU-GPU communication
SAVED: Final = 0.846  # Fastrack: of the run time, at most


_NOTHING: Final = 0.005  # of a step's time: a smaller difference is no reduction


class Distance(NamedTuple):
    """A published figure beside the simulated one."""

    who: str
    of_what: str
    published: str
    simulated: str
    cell: str
    distance: str


def distance(simulated: float, published: float) -> str:
    """Return such as "1.4 times above"."""
    times = simulated / published
    return f"{times:.2f} times above" if times >= 1 else f"{1 / times:.2f} times below"


def outside(simulated: float, low: float, high: float) -> str:
    """Return where a number lies, given a range."""
    if low <= simulated <= high:
        return "within the range"
    return distance(simulated, high if simulated > high else low)


def distances(study: Study) -> list[Distance]:
    """Return every published figure for which the study has a number."""
    found: list[Distance] = []
    cells = having([cell for cell in steps(study) if cell.workers == GPUS], CONFIDENTIAL)
    for preset in presets(cells):
        plain = default_buckets([cell for cell in cells if cell.preset == preset])
        if len(plain) > 1:
            mean = statistics.fmean(factor(cell).median for cell in plain)
            models = f"mean of {', '.join(str(cell.model) for cell in plain)} ({preset})"
            row = ("average of its models on four GPUs", f"{AVERAGE}", f"{mean:.1f}", models, distance(mean, AVERAGE))
            found.append(Distance(LEE, *row))
        largest = [cell for cell in plain if cell.model == "gpt2-xl"]
        enlarged = [cell for cell in cells if cell.preset == preset and cell.model == "gpt2-xl" and cell.bucket_mb]
        enlarged = sorted(enlarged, key=lambda cell: cell.bucket_mb or 0)[-1:]
        for some, number, words in ((largest, WORST, "default"), (enlarged, ENLARGED, "larger")):
            for cell in some:
                here = factor(cell).median
                about = f"GPT-2 XL on four GPUs, {words} buckets"
                row = (about, f"{number}", f"{here:.1f}", fully(cell), distance(here, number))
                found.append(Distance(LEE, *row))
    return [*found, *_fastrack(study)]


def _fastrack(study: Study) -> list[Distance]:
    found = []
    copies = [cell for cell in study.cells if cell.operation == "copy" and not cell.changed]
    published = f"{COPIES[0]} to {COPIES[1]}"
    for cell in sorted(having(copies, CONFIDENTIAL), key=lambda cell: (cell.preset or "", cell.size or 0)):
        here = factor(cell).median
        row = ("CPU-GPU communication", published, f"{here:.1f}", fully(cell), outside(here, *COPIES))
        found.append(Distance(FASTRACK, *row))
    some = having(steps(study), CONFIDENTIAL, ALL)
    for preset in presets(some):
        best = max((cell for cell in some if cell.preset == preset), key=lambda cell: reduction(cell, ALL))
        here = reduction(best, ALL)
        where = "as published" if here == SAVED else f"{100 * (here - SAVED):+.1f} points"
        row = ("run time saved by all three, at most", f"{SAVED:.1%}", f"{here:.1%}", fully(best), where)
        found.append(Distance(FASTRACK, *(text.replace("%", " %") for text in row)))
    return found


def reduction(cell: Cell, variant: str) -> float:
    """Return the share of the confidential step's time that a variant saves."""
    saved = 1 - cell.lines[variant].seconds.median / cell.lines[CONFIDENTIAL].seconds.median
    return saved if abs(saved) >= _NOTHING else 0.0
