"""The figure of the inside: where the time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ringfence_lab.report.figure import DIGITS, Figure, Missing, Table, distinct
from ringfence_lab.report.labels import ALONE, PROFILED, brief, fully, is_step, named, order, percent, plain
from ringfence_lab.report.study import Cell, Study

PIECES: Final = ("compute", "seal", "open", "lock", "reduce", "wire", "wait", "rest")
_MOST_BARS: Final = 20
_STAGES_READING: Final = (
    "Each bar is what one worker did in one step, laid end to end and divided by the time the step took; pieces "
    "beyond the dashed line at 100 % were done at the same time as others. Compute is the same step without any "
    "communication. Seal and open are AES-256-GCM; lock is waiting in the middle of them for the interpreter's "
    "lock or for a core; wire is system calls on sockets; wait is waiting for other workers; rest is all else. "
    "Means over workers and rounds, with clocks around each stage."
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
