"""Cells and their summary as text for a terminal."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ringfence.cli.terminal import columns, table, wrap
from ringfence_lab.bench.intervals import MIN_ROUNDS
from ringfence_lab.bench.units import time_text
from ringfence_lab.study.cells import TEE, Cell, label
from ringfence_lab.study.estimate import seconds, total


def listing(cells: Sequence[Cell], cores: int) -> str:
    """Return the cells of a grid with an estimate of the time to measure them."""
    rows = []
    for cell in cells:
        counts = (cell.settings["workers"], len(cell.settings["variants"]), cell.rounds)
        what = (label(cell.settings), _network(cell.settings, cell.settings["rate"]))
        rows.append((*what, *map(str, counts), f"{seconds(cell, cores):.0f} s"))
    header = ("cell", "network", "workers", "variants", "rounds", "time")
    estimate = f"{len(cells)} cells, {minutes(total(cells, cores))} on {cores} cores like those of a recent Xeon"
    return "\n".join([table([header, *rows]), wrap(estimate)])


def minutes(duration: float) -> str:
    """Return a duration rounded to minutes, or to seconds below 90."""
    return f"about {duration / 60:.0f} min" if duration >= 90 else f"about {duration:.0f} s"


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table for each cell: the time of each variant and its ratio to Gloo's."""
    blocks = []
    for _, group in itertools.groupby(rows, key=lambda row: row["cell"]):
        found = list(group)
        tee = found[0]["kind"] == TEE
        header = ["variant", "simulated" if tee else "median", f"ratio to {_baseline(found[0])}", "CPU"]
        lines = []
        for row in found:
            ratio = f"{row['ratio']:.2f} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]"
            line = [row["variant"], time_text(row["seconds"]), ratio, f"{row['cpu_seconds']:.3f} s"]
            if tee:  # cores in use, and the dilation at which they were
                line += [f"{row['cpu_seconds'] / row['wall_seconds']:.2f}", f"{row['dilation']:g}"]
            lines.append(line)
        text = table([[*header, *(["cores", "dilation"] if tee else [])], *lines], columns() - 2)
        blocks.append("\n".join([*_heading(found[0]), textwrap.indent(text, "  ")]))
    return "\n\n".join(blocks)


def _baseline(row: Mapping[str, Any]) -> str:
    return "plain" if row["kind"] == TEE else "Gloo"


def _heading(row: Mapping[str, Any]) -> list[str]:
    rate = f"{row['rate_bits'] / 1e9:g}gbit" if row["rate_bits"] else None
    cut = f", 1/{row['scaled']:.3g} of a step" if row["scaled"] != 1 else ""
    unscored = "" if row["scored"] else f"; not scored: {_why_unscored(row)}"
    return [
        wrap(f"{label(row)}{cut}, {row['workers']} workers, {_network(row, rate)}", rest="    "),
        wrap(
            f"  {row['rounds']} rounds, {_baseline(row)} / {_baseline(row)} ±{row['resolution']:.2f}{unscored}",
            rest="    ",
        ),
    ]


def _why_unscored(row: Mapping[str, Any]) -> str:
    if row["rounds"] < MIN_ROUNDS:
        return f"fewer than {MIN_ROUNDS} rounds"
    return f"the two runs of {_baseline(row)} differ too much"


def _network(settings: Mapping[str, Any], rate: str | None) -> str:
    if not settings["hosts"]:
        return "loopback"
    return f"{settings['hosts']} host{'s' * (settings['hosts'] > 1)}{f', {rate}' if rate else ''}"
