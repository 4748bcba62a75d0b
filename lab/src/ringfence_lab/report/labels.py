"""Cells and variants in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ringfence_lab.bench.intervals import Interval
from ringfence_lab.bench.units import bucket_text, size_text
from ringfence_lab.report.study import CellSummary

SEALED: Final = "ringfence"
UNSEALED: Final = "ringfence-unsealed"
NAIVE: Final = "hop-by-hop"
PROFILED: Final = "ringfence-profiled"
ALONE: Final = "alone"
VARIANTS: Final = {
    "gloo-a": "plaintext Gloo",
    "gloo-b": "plaintext Gloo, again",
    SEALED: "ringfence",
    UNSEALED: "ringfence, unsealed",
    NAIVE: "sealed hop by hop",
    "tls": "TLS 1.3 ring",
    "plain-ring": "plain ring",
    ALONE: "no communication",
    PROFILED: "ringfence with clocks",
}
_KINDS: Final = ("training", "trace", "collective")


def variant_text(name: str) -> str:
    return VARIANTS.get(name, name)


def what(cell: CellSummary) -> str:
    """What was run, without how many workers ran it or under which settings."""
    if cell.kind == "collective":
        return f"{(cell.operation or '').replace('_', '-')}, {size_text(cell.size or 0)}"
    if cell.kind == "trace":
        return f"{cell.model} trace, {'GPU' if cell.device == 'gpu' else 'CPU'}"
    return f"{cell.model}, {cell.strategy.upper()}" if cell.strategy == "fsdp2" else f"{cell.model}"


def settings_text(cell: CellSummary) -> str:
    """All that differs from the plain case."""
    parts = []
    if cell.bucket_mb and cell.strategy != "fsdp2":
        parts.append(bucket_text(cell.bucket_mb))
    if cell.wire != "float32":
        parts.append(cell.wire)
    if cell.busy:
        parts.append("caller busy")
    if cell.hosts:
        parts.append(f"{cell.hosts} hosts" + (f" at {rate_text(cell.rate_bits)}" if cell.rate_bits else ""))
    if cell.scaled != 1:
        parts.append(cut_text(cell))
    return ", ".join(parts)


def cut_text(cell: CellSummary) -> str:
    """How much of a step was replayed."""
    return f"1/{cell.scaled:.{0 if cell.scaled >= 10 else 1}f} of the step"


def fully(cell: CellSummary) -> str:
    """A cell's whole name."""
    return ", ".join(part for part in (what(cell), workers_text(cell), settings_text(cell)) if part)


def brief(seconds: float) -> str:
    """A time with three figures."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit * 0.9995:
            return f"{float(f'{seconds / unit:.3g}'):g} {name}"
    return "0"


def brief_interval(interval: Interval) -> str:
    """A time and its interval in one unit: "45.6 ms [44.9, 47.2]"."""
    unit = next((unit for unit in (1.0, 1e-3, 1e-6) if interval.median >= unit * 0.9995), 1e-6)
    low, high = (f"{float(f'{end / unit:.3g}'):g}" for end in (interval.low, interval.high))
    return f"{brief(interval.median)} [{low}, {high}]"


def ratio_text(ratio: float) -> str:
    """A ratio with about three figures."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def interval_text(ratio: Interval | None) -> str:
    """A ratio with its interval: "1.10 [1.05, 1.21]"."""
    return str(ratio) if ratio else "–"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def named(cell: CellSummary) -> str:
    """A cell's name on two lines, for the side of a chart; how much of its step was replayed is said elsewhere."""
    settings = settings_text(replace(cell, scaled=1.0))
    return f"{what(cell)}\n{workers_text(cell)}{', ' if settings else ''}{settings}"


def workers_text(cell: CellSummary) -> str:
    return f"{cell.workers} workers"


def rate_text(bits: int) -> str:
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"


def plain(cell: CellSummary) -> bool:
    """Default buckets, float32, on the loopback, with nothing else to do."""
    return not settings_text(replace(cell, scaled=1.0))


def is_step(cell: CellSummary) -> bool:
    return cell.kind in ("training", "trace")


def is_all_reduce(cell: CellSummary) -> bool:
    return cell.kind == "collective" and cell.operation == "all_reduce"


def order(cell: CellSummary) -> tuple[object, ...]:
    """Models before traces before collectives; small before large."""
    kind = _KINDS.index(cell.kind) if cell.kind in _KINDS else len(_KINDS)
    what_ran = (cell.strategy == "fsdp2", cell.operation or "", cell.model or "", cell.device or "", cell.size or 0)
    settings = (cell.hosts, cell.rate_bits or 0, cell.busy, cell.wire != "float32", cell.bucket_mb or 0.0)
    return kind, *what_ran, cell.workers, settings
