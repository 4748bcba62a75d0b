"""Figures of what a user can choose: the size of DDP's buckets, and what gradients travel as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ringfence_lab.report.figure import Figure, Missing, Table, distinct, ends, having, ranged
from ringfence_lab.report.labels import (
    ALONE,
    NAIVE,
    SEALED,
    brief,
    bucket_text,
    is_step,
    order,
    variant_text,
    what,
    workers_text,
)
from ringfence_lab.report.study import Cell, Study

_SHOWN: Final = ("gloo-a", SEALED, NAIVE, ALONE)
_COLUMNS: Final = ("Gloo", "ringfence", "hop by hop", "alone", "ringfence / Gloo")
_READING: Final = (
    "Seconds of a step: medians over the rounds, whiskers 95 % intervals. Only variants of the same cell took "
    "turns; a shared machine may have been slower for one cell than for the next."
)


def buckets(study: Study) -> Sequence[Figure | Missing]:
    title = "Bucket size"
    found = [cell for cell in study.cells if is_step(cell) and cell.strategy != "fsdp2" and not cell.rate_bits]
    found = distinct(sorted(having(found, SEALED), key=order), lambda cell: (_sweep(cell), cell.bucket_mb))
    sweeps: dict[str, list[Cell]] = {}
    for cell in found:
        sweeps.setdefault(_sweep(cell), []).append(cell)
    sweeps = {name: sorted(cells, key=_bucket) for name, cells in sweeps.items() if len(cells) > 2}
    if not sweeps:
        return [Missing("buckets", title, "no model was stepped with three or more sizes of buckets")]
    numbers = {name: _lines(cells, _bucket_label) for name, cells in sweeps.items()}
    says = " ".join(_best(name, cells) for name, cells in sweeps.items())
    rows = {
        name: [(_bucket_label(cell), *(_time(cell, each) for each in _SHOWN), _ratio(cell)) for cell in cells]
        for name, cells in sweeps.items()
    }
    header = ("bucket_cap_mb", *_COLUMNS)
    cells = [cell for some in sweeps.values() for cell in some]
    return [Figure("buckets", "sweep", title, says, _READING, numbers, cells, Table(header, rows))]


def _best(name: str, cells: Sequence[Cell]) -> str:
    best = min(cells, key=lambda cell: cell.lines[SEALED].seconds.median)
    worst = max(cells, key=lambda cell: cell.lines[SEALED].seconds.median)
    times = [brief(cell.lines[SEALED].seconds.median) for cell in (best, worst)]
    names = [bucket_text(cell.bucket_mb) for cell in (best, worst)]
    return f"{name}: a sealed step is shortest with {names[0]} ({times[0]}) and longest with {names[1]} ({times[1]})."


def wires(study: Study) -> Sequence[Figure | Missing]:
    title = "What gradients travel as"
    groups: dict[str, dict[str, Cell]] = {}
    for cell in distinct(sorted(having(study.cells, SEALED), key=order), lambda cell: (_wired(cell), cell.wire)):
        groups.setdefault(_wired(cell), {})[cell.wire] = cell
    groups = {name: cells for name, cells in groups.items() if len(cells) > 1}
    if not groups:
        return [Missing("wires", title, "nothing was measured both as float32 and as bfloat16")]
    numbers = {name: _lines(list(cells.values()), lambda cell: cell.wire) for name, cells in groups.items()}
    parts = [f"{variant_text(name)} {text}" for name in ("gloo-a", SEALED) if (text := _gain(groups, name))]
    says = f"bfloat16 in the place of float32, time of a step: {'; '.join(parts)}."
    rows = {
        name: [(wire, *(_time(cell, each) for each in _SHOWN), _ratio(cell)) for wire, cell in cells.items()]
        for name, cells in groups.items()
    }
    header = ("wire", *_COLUMNS)
    cells = [cell for some in groups.values() for cell in some.values()]
    return [Figure("wires", "pairs", title, says, _READING, numbers, cells, Table(header, rows))]


def _gain(groups: dict[str, dict[str, Cell]], variant: str) -> str:
    """How many times as long a step takes with half the bytes."""
    pairs = [
        (cells["bfloat16"].lines[variant].seconds.median, cells["float32"].lines[variant].seconds.median)
        for cells in groups.values()
        if {"float32", "bfloat16"} <= cells.keys() and all(variant in cell.lines for cell in cells.values())
    ]
    over = [half / full for half, full in pairs]
    return f"{ranged(over)} times" if over else ""


def _lines(cells: Sequence[Cell], label: Any) -> dict[str, list[dict[str, Any]]]:
    """Seconds by variant."""
    return {
        variant_text(name): [
            {"label": label(cell), "seconds": ends(cell.lines[name].seconds)} for cell in cells if name in cell.lines
        ]
        for name in _SHOWN
        if any(name in cell.lines for cell in cells)
    }


def _sweep(cell: Cell) -> str:
    """All settings but the bucket."""
    parts = [what(cell), workers_text(cell)]
    if cell.wire != "float32":
        parts.append(cell.wire)
    if cell.hosts:
        parts.append(f"{cell.hosts} hosts")
    return ", ".join(parts)


def _wired(cell: Cell) -> str:
    """All settings but the wire type."""
    parts = [what(cell), workers_text(cell)]
    if cell.bucket_mb:
        parts.append(f"{cell.bucket_mb:g} MiB")
    if cell.hosts:
        parts.append(f"{cell.hosts} hosts, {cell.rate_bits or 0}")
    return ", ".join([*parts, *(["busy"] if cell.busy else [])])


def _bucket(cell: Cell) -> float:
    """DDP's default is 25 MiB after a first bucket of 1: just below 25."""
    return 24.9 if cell.bucket_mb is None else cell.bucket_mb


def _bucket_label(cell: Cell) -> str:
    return "default" if cell.bucket_mb is None else f"{cell.bucket_mb:g}"


def _time(cell: Cell, variant: str) -> str:
    return brief(cell.lines[variant].seconds.median) if variant in cell.lines else "–"


def _ratio(cell: Cell) -> str:
    ratio = cell.lines[SEALED].ratio
    return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else "–"
