"""Figures of what a user can choose: the size of DDP's buckets, and what gradients travel as."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ringfence_lab.report.figure import Figure, Missing, Table, distinct, ends, grouped, having, ranged
from ringfence_lab.report.labels import (
    ALONE,
    NAIVE,
    SEALED,
    brief,
    bucket_text,
    interval_text,
    is_step,
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
    found = distinct(having(found, SEALED), lambda cell: (_sweep(cell), cell.bucket_mb))
    sweeps = {name: sorted(cells, key=_bucket) for name, cells in grouped(found, _sweep).items() if len(cells) > 2}
    if not sweeps:
        return [Missing("buckets", title, "no model was stepped with three or more sizes of buckets")]
    says = " ".join(_best(name, cells) for name, cells in sweeps.items())
    return [_figure("buckets", title, says, sweeps, "bucket_cap_mb", _bucket_label)]


def _best(name: str, cells: Sequence[Cell]) -> str:
    best = min(cells, key=lambda cell: cell.lines[SEALED].seconds.median)
    worst = max(cells, key=lambda cell: cell.lines[SEALED].seconds.median)
    times = [brief(cell.lines[SEALED].seconds.median) for cell in (best, worst)]
    names = [bucket_text(cell.bucket_mb) for cell in (best, worst)]
    return f"{name}: a sealed step is shortest with {names[0]} ({times[0]}) and longest with {names[1]} ({times[1]})."


def wires(study: Study) -> Sequence[Figure | Missing]:
    title = "What gradients travel as"
    found = distinct(having(study.cells, SEALED), lambda cell: (_wired(cell), cell.wire))
    groups = {name: cells for name, cells in grouped(found, _wired).items() if len(cells) > 1}
    if not groups:
        return [Missing("wires", title, "nothing was measured both as float32 and as bfloat16")]
    parts = [f"{variant_text(name)} {text}" for name in ("gloo-a", SEALED) if (text := _gain(groups, name))]
    says = f"bfloat16 in the place of float32, time of a step: {'; '.join(parts)}."
    return [_figure("wires", title, says, groups, "wire", lambda cell: cell.wire)]


def _gain(groups: Mapping[str, Sequence[Cell]], variant: str) -> str:
    """How many times as long a step takes with half the bytes."""
    both = (
        {cell.wire: cell.lines[variant].seconds.median for cell in cells if variant in cell.lines}
        for cells in groups.values()
    )
    times = [each["bfloat16"] / each["float32"] for each in both if {"float32", "bfloat16"} <= each.keys()]
    return f"{ranged(times)} times" if times else ""


def _figure(
    name: str, title: str, says: str, groups: Mapping[str, list[Cell]], setting: str, label: Callable[[Cell], str]
) -> Figure:
    """Seconds by a setting: a panel for each group of cells that differ in nothing else, a line for each variant."""
    numbers = {
        group: {
            variant_text(each): [
                {"label": label(cell), "seconds": ends(cell.lines[each].seconds)}
                for cell in cells
                if each in cell.lines
            ]
            for each in _SHOWN
            if any(each in cell.lines for cell in cells)
        }
        for group, cells in groups.items()
    }
    rows = {
        group: [
            (label(cell), *(_time(cell, each) for each in _SHOWN), interval_text(cell.lines[SEALED].ratio))
            for cell in cells
        ]
        for group, cells in groups.items()
    }
    options = {"what": "seconds", "left": "seconds a step", "log": False, "under": setting}
    cells = [cell for some in groups.values() for cell in some]
    return Figure(name, "panels", title, says, _READING, numbers, cells, Table((setting, *_COLUMNS), rows), options)


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
