"""Figures of the inside: where the time of a step goes, and how far the data plane is from what its stages allow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from ringfence_lab.bench.byte_counts import stage_bytes
from ringfence_lab.bench.names import necessary_bytes
from ringfence_lab.bench.units import size_text
from ringfence_lab.report.figure import DIGITS, Figure, Missing, Table, distinct, ends, having
from ringfence_lab.report.labels import (
    ALONE,
    NAIVE,
    PROFILED,
    SEALED,
    UNSEALED,
    brief,
    fully,
    is_step,
    named,
    order,
    percent,
    plain,
    variant_text,
)
from ringfence_lab.report.study import Cell, Study

PIECES: Final = ("compute", "seal", "open", "lock", "reduce", "wire", "wait", "rest")
_MOST_BARS: Final = 20
_SIZE: Final = 25 << 20  # of the all-reduce whose schedule stands for DDP's buckets
_STAGES_READING: Final = (
    "Each bar is what one worker did in one step, laid end to end and divided by the time the step took; pieces "
    "beyond the dashed line at 100 % were done at the same time as others. Compute is the same step without any "
    "communication. Seal and open are AES-256-GCM; lock is waiting in the middle of them for the interpreter's "
    "lock or for a core; wire is system calls on sockets; wait is waiting for other workers; rest is all else. "
    "Means over workers and rounds, with clocks around each stage."
)
_ROOF_READING: Final = (
    "Bytes that any all-reduce must send, over the time it took, all workers together, by the size of the tensor; "
    "whiskers are 95 % intervals. The dashed roof is what the cores could move if they did nothing but the stages "
    "of the sealed schedule, each at the cheapest it was seen anywhere in this study; the dotted roof leaves out "
    "seal and open. Under the slope on the left, fixed costs per message are the limit."
)


def pieces(cell: Cell) -> dict[str, float]:
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


def stages(study: Study) -> Sequence[Figure | Missing]:
    title = "Where the time goes"
    found = [cell for cell in study.cells if PROFILED in cell.lines and cell.lines[PROFILED].stages and not cell.busy]
    found = [cell for cell in found if not is_step(cell) or ALONE in cell.lines]  # compute must be known
    found = distinct(sorted(found, key=order), fully)
    if not found:
        return [
            Missing("stages", title, "no cell was measured with clocks around the stages (variant ringfence-profiled)")
        ]
    found = sorted(found, key=lambda cell: not plain(cell))[:_MOST_BARS]
    found = sorted(found, key=order)
    shares = {named(cell): _shares(cell) for cell in found}
    crypto = {name: each["seal"] + each["open"] for name, each in shares.items()}
    least, most = min(crypto, key=crypto.__getitem__), max(crypto, key=crypto.__getitem__)
    lowest, highest = (f"{percent(crypto[name])} ({_one_line(name)})" for name in (least, most))
    says = f"Sealing and opening take {lowest} to {highest} of the time of a worker."
    hidden = [name for name, each in shares.items() if sum(each.values()) > 1.01]
    if hidden:
        says += f" In {len(hidden)} of {len(shares)} cells part of the work is hidden behind other work."
    used = [piece for piece in PIECES if any(each[piece] > 0 for each in shares.values())]
    numbers = {name: {piece: each[piece] for piece in used} for name, each in shares.items()}
    rows = [
        (
            fully(cell),
            *(brief(pieces(cell)[piece]) for piece in used),
            brief(cell.lines[PROFILED].seconds.median),
        )
        for cell in found
    ]
    return [
        Figure(
            "stages", "stacked", title, says, _STAGES_READING, numbers, found, Table(("", *used, "took"), {"": rows})
        )
    ]


def _one_line(label: str) -> str:
    return label.replace("\n", ", ")


def _shares(cell: Cell) -> dict[str, float]:
    took = cell.lines[PROFILED].seconds.median
    return {piece: round(seconds / took, DIGITS) for piece, seconds in pieces(cell).items()}


def cheapest(study: Study) -> dict[str, float]:
    """Nanoseconds per byte of each stage, where it was cheapest: a lower bound that was reached."""
    costs: dict[str, float] = {}
    for cell in study.cells:
        line = cell.lines.get(PROFILED)
        known = cell.strategy in (None, "ddp") and cell.wire == "float32" and cell.operation in (None, "all_reduce")
        if line is None or not known or not line.stages or (cell.size or _SIZE) < 1 << 20:
            continue
        through = stage_bytes("all_reduce", cell.size or _SIZE, cell.workers)
        for stage, count in through.items():
            moved = line.sent_bytes / cell.workers * count / through["send"]  # by one worker
            if line.stages.get(stage) and moved:
                costs[stage] = min(costs.get(stage, float("inf")), line.stages[stage] * 1e9 / moved)
    return costs


def roofline(study: Study) -> Sequence[Figure | Missing]:
    title = "Roofline of the data plane"
    found = [
        cell for cell in study.cells if cell.kind == "collective" and cell.operation == "all_reduce" and plain(cell)
    ]
    found = distinct(sorted(having(found, SEALED), key=order), lambda cell: (cell.size, cell.workers))
    costs, cores = cheapest(study), study.facts.get("cores")
    if len({cell.size for cell in found}) < 2:
        return [Missing("roofline", title, "all-reduce was measured with fewer than two sizes")]
    if not costs or not cores:
        why = (
            "no cell has clocks around the stages" if not costs else "the raw files do not say how many cores there are"
        )
        return [Missing("roofline", title, why)]
    numbers: dict[str, Any] = {}
    rows, reached = [], []
    for workers in sorted({cell.workers for cell in found}):
        cells = [cell for cell in found if cell.workers == workers]
        roofs = {"sealed": _roof(costs, workers, cores), "unsealed": _roof(costs, workers, cores, ("seal", "open"))}
        lines = {
            variant_text(name): [_speed(cell, name) for cell in cells if name in cell.lines]
            for name in ("gloo-a", SEALED, UNSEALED, NAIVE)
        }
        numbers[f"{workers} workers"] = {"roofs": roofs, "lines": {name: some for name, some in lines.items() if some}}
        largest = cells[-1]
        speed = _speed(largest, SEALED)["speed"][1]
        reached.append(
            f"with {workers} workers {size_text(largest.size or 0)} at {speed:.2f} GB/s, "
            f"{percent(speed / roofs['sealed'])} of the roof"
        )
    for stage, cost in costs.items():
        shares = stage_bytes("all_reduce", _SIZE, 2), stage_bytes("all_reduce", _SIZE, 4)
        rows.append((stage, f"{cost:.3f}", *(f"{each[stage] / each['send']:.2f}" for each in shares)))
    says = f"ringfence moves {'; '.join(reached)}."
    table = Table(("stage", "cheapest, ns per byte", "bytes per byte sent, 2 workers", "4 workers"), {"": rows})
    return [Figure("roofline", "roofline", title, says, _ROOF_READING, numbers, found, table)]


def _roof(costs: dict[str, float], workers: int, cores: int, without: Sequence[str] = ()) -> float:
    """GB/s that all workers together could send."""
    through = stage_bytes("all_reduce", _SIZE, workers)
    per_byte = sum(cost * through[stage] / through["send"] for stage, cost in costs.items() if stage not in without)
    return round(min(cores, workers) / per_byte, DIGITS)


def _speed(cell: Cell, variant: str) -> dict[str, Any]:
    must = necessary_bytes("all_reduce", cell.size or 0, cell.workers) / 1e9
    low, middle, high = ends(cell.lines[variant].seconds)
    return {"size": cell.size, "speed": [round(must / each, DIGITS + 2) for each in (high, middle, low)]}


def lower_bound_sentence(study: Study) -> str:
    """Return the share of sealing in the lower bound of the CPU time."""
    costs = cheapest(study)
    if not {"seal", "open"} <= costs.keys():
        return ""
    crypto = statistics.fmean((costs["seal"], costs["open"]))
    return f"One core seals or opens a byte in {crypto:.3f} ns where it was cheapest: {1 / crypto:.1f} GB/s."
