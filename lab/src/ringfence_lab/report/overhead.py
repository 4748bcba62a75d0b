"""Figures of what sealing costs over plaintext Gloo: by model, by size, by rate, and against other variants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ringfence_lab.bench.units import size_text
from ringfence_lab.report.figure import (
    QUIET,
    Missing,
    Picture,
    counted,
    counting,
    distinct,
    grouped,
    having,
    over,
    point,
    ranged,
    ratio_of,
    spread,
    uncounted,
    verdict,
)
from ringfence_lab.report.labels import (
    NAIVE,
    SEALED,
    UNSEALED,
    is_all_reduce,
    is_step,
    plain,
    rate_text,
    variant_text,
    what,
    workers_text,
)
from ringfence_lab.report.study import CellSummary, Study

_READING: Final = (
    "Points: median of the time over plaintext Gloo's. Whiskers: 95 % interval. Grey: Gloo against itself."
)
_LARGE: Final = 25 << 20


def models(study: Study) -> Sequence[Picture | Missing]:
    title = "Overhead by model"
    cells = having((cell for cell in study.cells if plain(cell) and is_step(cell)), SEALED)
    cells = distinct(cells, lambda cell: (what(cell), cell.workers))
    if not cells:
        return [Missing("models", title, "no training step or trace was measured with default buckets")]
    some, note = counting(cells)
    says = f"A sealed step took {spread(some)}{note}. {_verdicts(cells)}"
    numbers = {name: [point(what(cell), cell) for cell in some] for name, some in _by_workers(cells).items()}
    return [Picture("models", "across", title, says, _READING, numbers, cells)]


def sizes(study: Study) -> Sequence[Picture | Missing]:
    title = "All-reduce by size"
    found = having((cell for cell in study.cells if plain(cell) and is_all_reduce(cell)), SEALED)
    found = distinct(found, lambda cell: (cell.size, cell.workers))
    if len({cell.size for cell in found}) < 2:
        return [Missing("sizes", title, "all-reduce was measured with fewer than two sizes")]
    numbers = {
        name: {"ringfence": [point(size_text(cell.size or 0), cell) for cell in some]}
        for name, some in _by_workers(found).items()
    }
    some, note = counting(found)
    says = f"A sealed all-reduce took {spread(some)}{note}. {_verdicts(found)}"
    return [Picture("sizes", "panels", title, says, _READING, numbers, found)]


def variants(study: Study) -> Sequence[Picture | Missing]:
    """One figure for each number of workers."""
    title = "Naive against pipelined"
    found = [cell for cell in study.cells if plain(cell) and (is_step(cell) or (cell.size or 0) >= _LARGE)]
    found = distinct(having(found, SEALED, NAIVE), lambda cell: (what(cell), cell.workers))
    if not found:
        return [Missing("variants", title, "no cell has both ringfence and the ring that seals hop by hop")]
    return [_variants(title, cells) for cells in _by_workers(found).values()]


def _variants(title: str, cells: list[CellSummary]) -> Picture:
    count = cells[0].workers
    some, note = counting(cells)
    says = (
        f"With {count} workers, sealing each whole message for each hop, with nothing overlapped and nothing "
        f"forwarded, took {ranged([over(cell, NAIVE, SEALED) for cell in some])} times as long as ringfence{note}."
    )
    if cost := [over(cell, SEALED, UNSEALED) for cell in some if UNSEALED in cell.lines]:
        says += (
            f" ringfence itself took {ranged(cost)} times as long as its own transport with a copy in place of "
            "encryption: the cost of sealing alone."
        )
    names = [name for name in (SEALED, UNSEALED, NAIVE, "tls") if any(name in cell.lines for cell in cells)]
    numbers = {variant_text(name): [point(what(cell), cell, name) for cell in having(cells, name)] for name in names}
    return Picture(f"variants-{count}", "across", f"{title}, {count} workers", says, _READING, numbers, cells)


def rates(study: Study) -> Sequence[Picture | Missing]:
    title = "Networks slower than the cores"
    found = [cell for cell in study.cells if cell.rate_bits and cell.wire == "float32" and not cell.busy]
    found = distinct(having(found, SEALED), lambda cell: (_rated(cell), cell.workers))
    found = sorted(found, key=lambda cell: cell.rate_bits or 0)
    if not found:
        return [Missing("rates", title, "nothing was measured between hosts with a limited rate (network namespaces)")]
    parts = []
    for rate, cells in grouped(found, lambda cell: cell.rate_bits or 0).items():
        some, note = counting(cells)
        parts.append(f"{ranged([ratio_of(cell).median for cell in some])} at {rate_text(rate)}{note}")
    says = f"Between hosts whose links are limited, sealed over plaintext: {'; '.join(parts)}."
    numbers = {name: [point(_rated(cell), cell) for cell in some] for name, some in _by_workers(found).items()}
    return [Picture("rates", "across", title, says, _READING, numbers, found)]


def _rated(cell: CellSummary) -> str:
    hosts = f", {cell.hosts} hosts" if cell.hosts != cell.workers else ""
    return f"{rate_text(cell.rate_bits or 0)}, {what(cell)}{hosts}"


def _by_workers(cells: Sequence[CellSummary]) -> dict[str, list[CellSummary]]:
    return grouped(sorted(cells, key=lambda cell: cell.workers), workers_text)


def _verdicts(cells: Sequence[CellSummary]) -> str:
    """How many differ from Gloo by more than Gloo does."""
    scored = [cell for cell in cells if cell.scored]
    if not scored:
        return f"No difference is claimed: in none of these cells does Gloo read {QUIET}."
    found = [verdict(cell) for cell in scored]
    where = {"slower": "slower in", "faster": "faster in", "the same": "not distinguishable in"}
    parts = [f"{words} {found.count(each)}" for each, words in where.items() if each in found]
    counts = counted(len(scored), "cell")
    return f"Where Gloo reads {QUIET} ({counts}), it is {', '.join(parts)}.{uncounted(cells)}"
