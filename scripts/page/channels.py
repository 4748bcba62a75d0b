"""What several channels of a link gain: docs/results/channel-rate.json, by a script that has been removed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, Final

from scripts.generated import table
from scripts.page import ROOT

KIND: Final = "channels"
PAGES: Final = (ROOT / "docs" / "guides" / "channels.md",)
NAMES: Final = ("1 channel", "2 channels")


def read(results: Path) -> dict[str, Any]:
    return dict(json.loads((results / "channel-rate.json").read_text()))


def _rates(found: dict[str, Any]) -> str:
    machine, rates, costs = found["machine"], found["GB/s"], found["ns of CPU per byte"]
    rows, lost = [], []
    for title, more in (("waits", ""), ("busy in Python", ", busy")):
        one, two = (rates[name + more] for name in NAMES)
        ratio = statistics.median(b / a for a, b in zip(one, two, strict=True))
        cpu = [f"{statistics.median(costs[name + more]):.2f}" for name in NAMES]
        rows.append((title, _spread(one), _spread(two), f"**{ratio:.2f}**", *cpu))
    for name in NAMES:
        lost.append(1 - statistics.median(rates[f"{name}, busy"]) / statistics.median(rates[name]))
    header = ("caller", "1 channel, GB/s", "2 channels, GB/s", "ratio", "CPU of 1, ns/B", "of 2")
    return (
        f"One worker seals and sends {found['mebibytes']} MiB over the loopback interface to a process that discards it, "
        f"on {machine['cores']} cores of an {machine['cpu']} ({machine['kernel']}, Python {machine['python']}), on "
        f"{found['date']}. Medians of {found['rounds']} rounds, with quartiles:\n\n{table(header, rows, left=1)}\n\n"
        "A caller that runs Python code meanwhile holds the interpreter's lock in turns: one channel loses "
        f"{lost[0]:.0%} of its rate, two lose {lost[1]:.0%}."
    )


def _spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


TABLES: Final = {"rate": _rates}
