"""The cells of a study on simulated GPU TEEs: which of them a figure compares, and what they are called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ringfence_lab.bench.intervals import Interval
from ringfence_lab.bench.units import size_text
from ringfence_lab.report.figure import DIGITS, Point, ends
from ringfence_lab.report.labels import cut_text
from ringfence_lab.report.study import Cell, Study

KIND: Final = "gpu-tee"
CONFIDENTIAL: Final = "confidential"
ALL: Final = "all"
SEALED: Final = "ringfence"
SWITCHES: Final = ("direct", "parallel-authentication", "overlap")
NAMES: Final = {
    "plain": "no TEE",
    "plain-again": "no TEE, again",
    CONFIDENTIAL: "confidential, hop by hop",
    "direct": "direct channel",
    "parallel-authentication": "parallel authentication",
    "overlap": "overlap",
    ALL: "all three",
    SEALED: "ringfence",
}
_DOUBLED: Final = 1.5  # times less of the machine's cores: the same cell at another dilation


def steps(study: Study) -> list[Cell]:
    """Return the cells of steps with the inputs of their preset, those with more cores in use where there are two."""
    found: dict[tuple[object, ...], Cell] = {}
    for cell in study.cells:
        if cell.kind == KIND and not cell.operation and not cell.changed:
            key = place(cell)
            if key not in found or (cell.load or 0) > (found[key].load or 0):
                found[key] = cell
    return sorted(found.values(), key=order)


def place(cell: Cell) -> tuple[object, ...]:
    """Return what a cell has in common with the same at another dilation."""
    return (cell.preset, cell.model, cell.operation, cell.size, cell.bucket_mb, cell.workers, cell.samples, cell.scaled)


def order(cell: Cell) -> tuple[object, ...]:
    return (
        cell.preset or "",
        cell.operation or "",
        cell.size or 0,
        cell.model or "",
        cell.workers,
        cell.bucket_mb or 0,
    )


def dilated_twice(study: Study) -> list[tuple[Cell, Cell]]:
    """Return pairs of the same cell, the second with clearly fewer cores in use."""
    found: dict[tuple[object, ...], list[Cell]] = {}
    for cell in study.cells:
        if cell.kind == KIND and not cell.changed:
            found.setdefault(place(cell), []).append(cell)
    pairs = [sorted(some, key=lambda cell: -(cell.load or 0)) for some in found.values() if len(some) > 1]
    some = [(each[0], each[-1]) for each in pairs if (each[0].load or 0) > _DOUBLED * (each[-1].load or 0)]
    return sorted(some, key=lambda pair: order(pair[0]))


def default_buckets(cells: Iterable[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.bucket_mb is None]


def factor(cell: Cell, variant: str = CONFIDENTIAL) -> Interval:
    """Return the time of a variant over that without a TEE."""
    ratio = cell.lines[variant].ratio
    assert ratio is not None
    return ratio


def having(cells: Iterable[Cell], *variants: str) -> list[Cell]:
    return [
        cell for cell in cells if all(name in cell.lines and cell.lines[name].ratio is not None for name in variants)
    ]


def point(label: str, cell: Cell, variant: str) -> Point:
    found: Point = {"label": label, "ratio": ends(factor(cell, variant)), "resolution": round(cell.resolution, DIGITS)}
    return found if cell.scored else {**found, "scored": False}


def what(cell: Cell) -> str:
    """Return what was run, without the number of devices and the preset."""
    if cell.operation == "copy":
        return f"host-device copy, {size_text(cell.size or 0)}"
    if cell.operation:
        return f"all-reduce, {size_text(cell.size or 0)}"
    return f"{cell.model}" + (f", buckets of {cell.bucket_mb:g} MiB" if cell.bucket_mb else "")


def fully(cell: Cell) -> str:
    """Return the whole name of a cell."""
    parts = [what(cell), f"{cell.preset}", f"{cell.workers} devices"]
    parts += [cut_text(cell)] if cell.scaled != 1 else []
    parts += [cell.changed] if cell.changed else []
    return ", ".join(parts)


def brief(ratio: float) -> str:
    """Return a ratio with about three figures."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def changes(study: Study, preset: str, variant: str) -> dict[str, dict[str, Cell]]:
    """Return the cells with one input changed, by input and factor ("x0.5", "x2")."""
    found: dict[str, dict[str, Cell]] = {}
    for cell in having(study.cells, variant):
        if cell.kind == KIND and cell.preset == preset and cell.changed:
            name, _, times = cell.changed.rpartition(" ")
            found.setdefault(name, {})[times] = cell
    return found


def presets(cells: Sequence[Cell]) -> list[str]:
    return sorted({cell.preset for cell in cells if cell.preset})
