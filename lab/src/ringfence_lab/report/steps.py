"""Figures of a training step: where its time goes, and what a user can choose, DDP's buckets and what gradients travel as."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ringfence_lab.bench.units import bucket_text
from ringfence_lab.report.figure import DIGITS, Missing, Picture, Table, distinct, ends, grouped, having, ranged
from ringfence_lab.report.labels import (
    ALONE,
    NAIVE,
    PROFILED,
    SEALED,
    brief,
    fully,
    interval_text,
    is_step,
    named,
    order,
    percent,
    plain,
    variant_text,
)
from ringfence_lab.report.study import CellSummary, Study

PIECES: Final = ("compute", "seal", "open", "lock", "reduce", "wire", "wait", "rest")
_MOST_BARS: Final = 20
_STAGES_READING: Final = (
    "Each bar is what one worker did in one step, laid end to end and divided by the time the step took; pieces "
    "beyond the dashed line at 100 % were done at the same time as others. Compute is the same step without any "
    "communication. Seal and open are AES-256-GCM; lock is waiting in the middle of them for the interpreter's "
    "lock or for a core; wire is system calls on sockets; wait is waiting for other workers; rest is all else. "
    "Means over workers and rounds, with clocks around each stage."
)
_SHOWN: Final = ("gloo-a", SEALED, NAIVE, ALONE)
_COLUMNS: Final = ("Gloo", "ringfence", "hop by hop", "alone", "ringfence / Gloo")
_READING: Final = (
    "Seconds of a step: medians over the rounds, whiskers 95 % intervals. Only variants of the same cell took "
    "turns; a shared machine may have been slower for one cell than for the next."
)


def pieces(cell: CellSummary) -> dict[str, float]:
    """Seconds of each piece of a step. What compute and the stages leave of it is waiting, as far as any was seen, and rest."""
    line = cell.lines[PROFILED]
    found = dict.fromkeys(PIECES, 0.0)
    if is_step(cell) and ALONE in cell.lines:
        found["compute"] = cell.lines[ALONE].seconds.median
    for stage in ("seal", "open", "lock", "reduce"):
        found[stage] = line.stages.get(stage, 0.0)
    found["wire"] = line.stages.get("send", 0.0) + line.stages.get("receive", 0.0)
    left = max(0.0, line.seconds.median - sum(found.values()))
    found["wait"] = min(left, line.stages.get("wait", 0.0))
    found["rest"] = left - found["wait"]
    return found


def stages(study: Study) -> Sequence[Picture | Missing]:
    title = "Where the time goes"
    found = [cell for cell in study.cells if PROFILED in cell.lines and cell.lines[PROFILED].stages and not cell.busy]
    found = distinct([cell for cell in found if not is_step(cell) or ALONE in cell.lines], fully)  # compute is known
    if not found:
        why = "no cell was measured with clocks around the stages (variant ringfence-profiled)"
        return [Missing("stages", title, why)]
    found = sorted(sorted(found, key=lambda cell: not plain(cell))[:_MOST_BARS], key=order)
    shares = {named(cell): _shares(cell) for cell in found}
    crypto = sorted((each["seal"] + each["open"], name.replace("\n", ", ")) for name, each in shares.items())
    lowest, highest = (f"{percent(share)} ({name})" for share, name in (crypto[0], crypto[-1]))
    says = f"Sealing and opening take {lowest} to {highest} of the time of a worker."
    hidden = sum(sum(each.values()) > 1.01 for each in shares.values())
    if hidden:
        says += f" In {hidden} of {len(shares)} cells part of the work is hidden behind other work."
    used = [piece for piece in PIECES if any(each[piece] > 0 for each in shares.values())]
    numbers = {name: {piece: each[piece] for piece in used} for name, each in shares.items()}
    rows = [
        (fully(cell), *(brief(pieces(cell)[piece]) for piece in used), brief(cell.lines[PROFILED].seconds.median))
        for cell in found
    ]
    table, options = Table(("", *used, "took"), {"": rows}), {"under": "share of the time it took"}
    return [Picture("stages", "stacked", title, says, _STAGES_READING, numbers, found, table, options)]


def _shares(cell: CellSummary) -> dict[str, float]:
    took = cell.lines[PROFILED].seconds.median
    return {piece: round(seconds / took, DIGITS) for piece, seconds in pieces(cell).items()}


def buckets(study: Study) -> Sequence[Picture | Missing]:
    title = "Bucket size"
    found = [cell for cell in study.cells if is_step(cell) and cell.strategy != "fsdp2" and not cell.rate_bits]
    found = distinct(having(found, SEALED), lambda cell: (_sweep(cell), cell.bucket_mb))
    sweeps = {name: sorted(cells, key=_bucket) for name, cells in grouped(found, _sweep).items() if len(cells) > 2}
    if not sweeps:
        return [Missing("buckets", title, "no model was stepped with three or more sizes of buckets")]
    says = " ".join(_best(name, cells) for name, cells in sweeps.items())
    return [_figure("buckets", title, says, sweeps, "bucket_cap_mb", _bucket_label)]


def _best(name: str, cells: Sequence[CellSummary]) -> str:
    best = min(cells, key=lambda cell: cell.lines[SEALED].seconds.median)
    worst = max(cells, key=lambda cell: cell.lines[SEALED].seconds.median)
    times = [brief(cell.lines[SEALED].seconds.median) for cell in (best, worst)]
    names = [bucket_text(cell.bucket_mb) for cell in (best, worst)]
    return f"{name}: a sealed step is shortest with {names[0]} ({times[0]}) and longest with {names[1]} ({times[1]})."


def wires(study: Study) -> Sequence[Picture | Missing]:
    title = "What gradients travel as"
    found = distinct(having(study.cells, SEALED), lambda cell: (_wired(cell), cell.wire))
    groups = {name: cells for name, cells in grouped(found, _wired).items() if len(cells) > 1}
    if not groups:
        return [Missing("wires", title, "nothing was measured both as float32 and as bfloat16")]
    parts = [f"{variant_text(name)} {text}" for name in ("gloo-a", SEALED) if (text := _gain(groups, name))]
    says = f"bfloat16 in the place of float32, time of a step: {'; '.join(parts)}."
    return [_figure("wires", title, says, groups, "wire", lambda cell: cell.wire)]


def _gain(groups: Mapping[str, Sequence[CellSummary]], variant: str) -> str:
    """How many times as long a step takes with half the bytes."""
    both = (
        {cell.wire: cell.lines[variant].seconds.median for cell in cells if variant in cell.lines}
        for cells in groups.values()
    )
    times = [each["bfloat16"] / each["float32"] for each in both if {"float32", "bfloat16"} <= each.keys()]
    return f"{ranged(times)} times" if times else ""


def _figure(
    name: str,
    title: str,
    says: str,
    groups: Mapping[str, list[CellSummary]],
    setting: str,
    label: Callable[[CellSummary], str],
) -> Picture:
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
    return Picture(name, "panels", title, says, _READING, numbers, cells, Table((setting, *_COLUMNS), rows), options)


def _sweep(cell: CellSummary) -> str:
    """All settings but the bucket."""
    return fully(replace(cell, bucket_mb=None, scaled=1.0))


def _wired(cell: CellSummary) -> str:
    """All settings but the wire type."""
    return fully(replace(cell, wire="float32", scaled=1.0))


def _bucket(cell: CellSummary) -> float:
    """DDP's default is 25 MiB after a first bucket of 1: just below 25."""
    return 24.9 if cell.bucket_mb is None else cell.bucket_mb


def _bucket_label(cell: CellSummary) -> str:
    return "default" if cell.bucket_mb is None else f"{cell.bucket_mb:g}"


def _time(cell: CellSummary, variant: str) -> str:
    return brief(cell.lines[variant].seconds.median) if variant in cell.lines else "–"
