"""`scripts/channels`: write the table of what channels gain into docs/guides/channels.md, or --check it.

It comes from docs/results/channel-rate.json, which `scripts.channel_rate` of commit 569d0fa printed. Nobody types a figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, Final

from scripts import generated

ROOT: Final = Path(__file__).parents[1]
RESULT: Final = ROOT / "docs" / "results" / "channel-rate.json"
PAGE: Final = ROOT / "docs" / "guides" / "channels.md"


def filled(page: str, found: dict[str, Any]) -> str:
    """The page with a fresh table at its marker."""
    return generated.filled(page, "channels", lambda _: table(found))


def table(found: dict[str, Any]) -> str:
    machine, rates, costs = found["machine"], found["GB/s"], found["ns of CPU per byte"]

    def row(name: str, one: str, two: str) -> str:
        ratio = statistics.median(b / a for a, b in zip(rates[one], rates[two], strict=True))
        cells = [_spread(rates[one]), _spread(rates[two]), f"**{ratio:.2f}**"]
        cells += [f"{statistics.median(costs[each]):.2f}" for each in (one, two)]
        return f"| {name} | {' | '.join(cells)} |"

    lost = [1 - statistics.median(rates[f"{each}, busy"]) / statistics.median(rates[each]) for each in _NAMES]
    return "\n".join(
        [
            f"One worker seals and sends {found['mebibytes']} MiB over the loopback interface to a process that discards it, "
            f"on {machine['cores']} cores of an {machine['cpu']} ({machine['kernel']}, Python {machine['python']}), on "
            f"{found['date']}. Medians of {found['rounds']} rounds, with quartiles:",
            "",
            "| caller | 1 channel, GB/s | 2 channels, GB/s | ratio | CPU of 1, ns/B | of 2 |",
            "|---|---:|---:|---:|---:|---:|",
            row("waits", *_NAMES),
            row("busy in Python", *(f"{each}, busy" for each in _NAMES)),
            "",
            "A caller that runs Python code meanwhile holds the interpreter's lock in turns: one channel loses "
            f"{lost[0]:.0%} of its rate, two lose {lost[1]:.0%}.",
        ]
    )


_NAMES: Final = ("1 channel", "2 channels")


def _spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/channels", description="Write the table of what channels gain.")
    parser.add_argument("--check", action="store_true", help="report whether it is stale, and write nothing")
    check = parser.parse_args().check
    page = PAGE.read_text()
    fresh = filled(page, json.loads(RESULT.read_text()))
    if check:
        sys.exit("docs/guides/channels.md is stale: run scripts/channels" if fresh != page else 0)
    PAGE.write_text(fresh)


if __name__ == "__main__":
    main()
