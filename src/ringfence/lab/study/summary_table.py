"""Cells and their summary as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringfence.lab.bench.intervals import MIN_ROUNDS
from ringfence.lab.bench.units import time_text
from ringfence.lab.study.cells import Cell, label
from ringfence.lab.study.estimate import seconds, total

_WIDTH = 46


def listing(cells: Sequence[Cell], cores: int) -> str:
    """The cells of a grid and how long they take."""
    lines = [f"{'cell':{_WIDTH}} {'workers':>7}  {'network':14} {'variants':>10} {'rounds':>6} {'seconds':>8}"]
    for cell in cells:
        settings = cell.settings
        lines.append(
            f"{label(settings):{_WIDTH}} {settings['workers']:>7}  {_network(settings, settings['rate']):14} "
            f"{len(settings['variants']):>10} {cell.rounds:>6} {seconds(cell, cores):>8.0f}"
        )
    lines.append(f"{len(cells)} cells, {minutes(total(cells, cores))} on {cores} cores like those of a recent Xeon")
    return "\n".join(lines)


def minutes(duration: float) -> str:
    """About how long."""
    return f"about {duration / 60:.0f} min" if duration >= 90 else f"about {duration:.0f} s"


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """A block for each cell: who took how long, and how that compares with Gloo."""
    lines: list[str] = []
    cell = None
    for row in rows:
        if row["cell"] != cell:
            cell = row["cell"]
            lines += ([""] if lines else []) + _heading(row)
        ratio = f"{row['ratio']:.2f} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]"
        lines.append(
            f"  {row['variant']:20} {time_text(row['seconds']):>11}   {ratio:22} {row['cpu_seconds']:>8.3f} s CPU"
        )
    return "\n".join(lines)


def samples(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each sample."""
    lines = [f"{'cell':{_WIDTH}} {'variant':20} {'round':>5} {'seconds':>11} {'CPU':>10}"]
    for row in rows:
        cpu = f"{row['cpu_seconds']:.3f} s"
        lines.append(
            f"{row['cell']:{_WIDTH}} {row['variant']:20} {row['round']:>5} {time_text(row['seconds']):>11} {cpu:>10}"
        )
    return "\n".join(lines)


def _heading(row: Mapping[str, Any]) -> list[str]:
    rate = f"{row['rate_bits'] / 1e9:g}gbit" if row["rate_bits"] else None
    trust = "" if row["scored"] else f"; {_doubt(row)} to score this cell"
    cut = f", 1/{row['scaled']:.3g} of a step" if row["scaled"] != 1 else ""
    return [
        f"{label(row)}{cut}, {row['workers']} workers, {_network(row, rate)}",
        f"  {row['rounds']} rounds, Gloo / Gloo ±{row['resolution']:.2f}{trust}",
    ]


def _doubt(row: Mapping[str, Any]) -> str:
    return "too few rounds" if row["rounds"] < MIN_ROUNDS else "Gloo differs too much from itself"


def _network(settings: Mapping[str, Any], rate: str | None) -> str:
    if not settings["hosts"]:
        return "loopback"
    return f"{settings['hosts']} hosts{f', {rate}' if rate else ''}"
