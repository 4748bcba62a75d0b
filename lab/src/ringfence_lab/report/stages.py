"""Figures of the inside: where the time of a step goes, and how far the data plane is from what its stages allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ringfence_lab.bench.byte_counts import stage_bytes
from ringfence_lab.bench.names import necessary_bytes
from ringfence_lab.bench.units import size_text
from ringfence_lab.report.figure import DIGITS, Figure, Missing, Table, distinct, ends, grouped, having
from ringfence_lab.report.labels import (
    ALONE,
    NAIVE,
    PROFILED,
    SEALED,
    UNSEALED,
    brief,
    fully,
    is_all_reduce,
    is_step,
    named,
    order,
    percent,
    plain,
    variant_text,
    workers_text,
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
    return [Figure("stages", "stacked", title, says, _STAGES_READING, numbers, found, table, options)]


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
    found = having((cell for cell in study.cells if is_all_reduce(cell) and plain(cell)), SEALED)
    found = distinct(found, lambda cell: (cell.size, cell.workers))
    costs, cores = cheapest(study), study.facts.get("cores")
    if len({cell.size for cell in found}) < 2:
        return [Missing("roofline", title, "all-reduce was measured with fewer than two sizes")]
    if not costs or not cores:
        return [Missing("roofline", title, "clocks around the stages, or the number of cores, are not in this study")]
    numbers: dict[str, Any] = {}
    reached = []
    for name, cells in grouped(sorted(found, key=lambda cell: cell.workers), workers_text).items():
        roofs = {
            "roof, sealed": _roof(costs, cells[0].workers, cores),
            "roof, without seal and open": _roof(costs, cells[0].workers, cores, ("seal", "open")),
        }
        numbers[name] = {
            variant_text(each): [_speed(cell, each) for cell in cells if each in cell.lines]
            for each in ("gloo-a", SEALED, UNSEALED, NAIVE)
            if any(each in cell.lines for cell in cells)
        }
        for roof, height in roofs.items():
            numbers[name][roof] = [{"label": size_text(cell.size or 0), "speed": [height] * 3} for cell in cells]
        speed = _speed(cells[-1], SEALED)["speed"][1]
        reached.append(
            f"with {name} {size_text(cells[-1].size or 0)} at {speed:.2f} GB/s, "
            f"{percent(speed / roofs['roof, sealed'])} of the roof"
        )
    through = [stage_bytes("all_reduce", _SIZE, workers) for workers in (2, 4)]
    rows = [
        (stage, f"{cost:.3f}", *(f"{each[stage] / each['send']:.2f}" for each in through))
        for stage, cost in costs.items()
    ]
    table = Table(("stage", "cheapest, ns per byte", "bytes per byte sent, 2 workers", "4 workers"), {"": rows})
    options = {"what": "speed", "left": "GB/s, all workers", "under": "size of the tensor"}
    says = f"ringfence moves {'; '.join(reached)}."
    return [Figure("roofline", "panels", title, says, _ROOF_READING, numbers, found, table, options)]


def _roof(costs: dict[str, float], workers: int, cores: int, without: Sequence[str] = ()) -> float:
    """GB/s that all workers together could send."""
    through = stage_bytes("all_reduce", _SIZE, workers)
    per_byte = sum(cost * through[stage] / through["send"] for stage, cost in costs.items() if stage not in without)
    return round(min(cores, workers) / per_byte, DIGITS)


def _speed(cell: Cell, variant: str) -> dict[str, Any]:
    must = necessary_bytes("all_reduce", cell.size or 0, cell.workers) / 1e9
    speed = [round(must / each, DIGITS + 2) for each in reversed(ends(cell.lines[variant].seconds))]
    return {"label": size_text(cell.size or 0), "speed": speed}


def lower_bound_sentence(study: Study) -> str:
    """Return the share of sealing in the lower bound of the CPU time."""
    costs = cheapest(study)
    if not {"seal", "open"} <= costs.keys():
        return ""
    crypto = (costs["seal"] + costs["open"]) / 2
    return f"One core seals or opens a byte in {crypto:.3f} ns where it was cheapest: {1 / crypto:.1f} GB/s."
