"""A figure before it is drawn: its numbers and its text, as plain data."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from ringfence_lab.bench.intervals import MIN_ROUNDS, Interval
from ringfence_lab.report.labels import SEALED, fully, order
from ringfence_lab.report.study import CellSummary, Study

DIGITS: Final = 4
QUIET: Final = f"within 10 % of itself, over {MIN_ROUNDS} rounds or more"  # where Gloo reads so, a cell counts
Point = dict[str, Any]
Key = TypeVar("Key")


class Table(NamedTuple):
    """Text cells, for numbers that the picture does not print."""

    header: Sequence[str]
    groups: Mapping[str, Sequence[Sequence[str]]]  # rows by the name that stands over them; "" where none does


@dataclass(frozen=True)
class Picture:
    """One picture."""

    name: str  # of its files
    chart: str  # how it is drawn
    title: str
    says: str  # what it shows, in one or two sentences with their figures
    reading: str  # how to read it
    numbers: dict[str, Any]
    cells: Sequence[CellSummary] = field(repr=False)
    table: Table | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the chart

    @property
    def rounds(self) -> tuple[int, int]:
        """Fewest and most rounds of a cell."""
        counts = [line.rounds for cell in self.cells for line in cell.lines.values()]
        return (min(counts), max(counts)) if counts else (0, 0)


@dataclass(frozen=True)
class Missing:
    """A picture that this study has no numbers for."""

    name: str
    title: str
    why: str


Builder = Callable[[Study], Sequence[Picture | Missing]]


def digest(numbers: Mapping[str, Any]) -> str:
    """Changes with any number. The file of a figure contains it, so that a stale one is found without drawing."""
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:16]


def point(label: str, cell: CellSummary, variant: str = SEALED) -> Point:
    found: Point = {
        "label": label,
        "ratio": ends(ratio_of(cell, variant)),
        "resolution": round(cell.resolution, DIGITS),
    }
    return found if cell.scored else {**found, "scored": False}


def ends(interval: Interval) -> list[float]:
    """Low, median, high."""
    return [round(value, DIGITS + 2) for value in (interval.low, interval.median, interval.high)]


def having(cells: Iterable[CellSummary], *variants: str) -> list[CellSummary]:
    """The cells in which all of these took part and have a ratio."""
    return [cell for cell in cells if all(name in cell.lines and cell.lines[name].ratio for name in variants)]


def distinct(cells: Iterable[CellSummary], key: Callable[[CellSummary], object]) -> list[CellSummary]:
    """One cell for each key, in order: the one with the most variants and rounds."""
    return [max(some, key=_weight) for some in grouped(sorted(cells, key=order), key).values()]


def _weight(cell: CellSummary) -> tuple[int, int]:
    return len(cell.lines), max((line.rounds for line in cell.lines.values()), default=0)


def grouped(cells: Iterable[CellSummary], key: Callable[[CellSummary], Key]) -> dict[Key, list[CellSummary]]:
    """The cells by key, in the order of their first ones."""
    found: dict[Key, list[CellSummary]] = {}
    for cell in cells:
        found.setdefault(key(cell), []).append(cell)
    return found


def ratio_of(cell: CellSummary, variant: str = SEALED) -> Interval:
    ratio = cell.lines[variant].ratio
    assert ratio is not None, "callers pick cells with `having`"
    return ratio


def over(cell: CellSummary, one: str, other: str) -> float:
    """How many times as long one variant takes as another of the same cell."""
    return cell.lines[one].seconds.median / cell.lines[other].seconds.median


def verdict(cell: CellSummary) -> str:
    """Whether the interval leaves what Gloo differs from itself by."""
    ratio = ratio_of(cell)
    if ratio.low > 1 + cell.resolution:
        return "slower"
    return "faster" if ratio.high < 1 - cell.resolution else "the same"


def spread(cells: Sequence[CellSummary]) -> str:
    """The median and the ends of the ratios, with what they belong to."""
    ranked = sorted(cells, key=lambda cell: ratio_of(cell).median)
    first, last = ranked[0], ranked[-1]
    low, high = (ratio_of(cell).median for cell in (first, last))
    if len(ranked) == 1:
        return f"{low:.2f} times plaintext Gloo's time ({fully(first)})"
    middle = statistics.median(ratio_of(cell).median for cell in ranked)
    return (
        f"{middle:.2f} times plaintext Gloo's time in the median of {len(ranked)} cells, "
        f"from {low:.2f} ({fully(first)}) to {high:.2f} ({fully(last)})"
    )


def counting(cells: Sequence[CellSummary]) -> tuple[Sequence[CellSummary], str]:
    """The cells that count; where none does, all of them, and the words that say so."""
    scored = [cell for cell in cells if cell.scored]
    if scored:
        return scored, ""
    why = " or ".join(sorted({"have too few rounds" if cell.few else "are too noisy" for cell in cells}))
    return cells, f" (all of these cells {why} to count)"


def doubt(cell: CellSummary) -> str:
    """Return why a cell is not scored."""
    return "too few rounds to count" if cell.few else "too noisy to count"


def uncounted(cells: Sequence[CellSummary], more: str = "") -> str:
    """A sentence for each reason for which some of these cells do not count, with a space before it."""
    left = [cell.few for cell in cells if not cell.scored]
    few, noisy = left.count(True), left.count(False)
    said = f" {counted(noisy, f'{more}cell is', f'{more}cells are')} too noisy to count." if noisy else ""
    return said + (f" {counted(few, f'{more}cell has', f'{more}cells have')} too few rounds to count." if few else "")


def ranged(values: Sequence[float]) -> str:
    """From the least to the most, with the median; one number where they do not differ."""
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high} (median {statistics.median(values):.2f})"


def counted(count: int, one: str, many: str | None = None) -> str:
    """ "1 cell", "3 cells"."""
    return f"{count} {one if count == 1 else many or one + 's'}"
