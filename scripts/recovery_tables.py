"""`scripts/recovery`: write the tables of docs/benchmarks/recovery.md, or --check them.

They come from docs/results/recovery.jsonl and recovery-stock.jsonl: what `scripts/chaos --json` wrote, and each run's mode.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from scripts import generated

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "docs" / "results"
PAGE: Final = ROOT / "docs" / "benchmarks" / "recovery.md"
MODES: Final = {
    "plain": "`ringfence run`",
    "spares": "with `--spares`",
    "rejoin": "with `--spares --rejoin`, and a script that calls `ringfence.rejoin()`",
    "stock": "stock torchrun with Gloo",
}
FILES: Final = ("recovery.jsonl", "recovery-stock.jsonl")
CASES: Final = {
    "worker": "a worker",
    "agent": "an agent",
    "node": "an agent and its workers",
    "host": "the store's host",
}
PHASES: Final = {"training": ("training",), "starting, or starting again": ("start", "restart")}


Rows = Sequence[dict[str, Any]]


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the runs in which something was killed, and the undisturbed ones before them."""
    lines = [line for name in FILES for line in (folder / name).read_text().splitlines()]
    rows = [{"mode": "stock", **json.loads(line)} for line in lines]
    return [row for row in rows if row.get("hits") or "undisturbed" in row]


def filled(page: str, rows: Rows) -> str:
    """The page with fresh tables at its markers; a marker that names no table is a mistake."""
    return generated.filled(page, "recovery", lambda name: TABLES[name](rows))


def _outcomes(rows: Rows) -> str:
    lines = [
        "| | killed | runs | finished | weights bit-identical | workers that outlived their agent | never went on |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for mode, title in MODES.items():
        for case, victim in CASES.items():
            of_case = [row for row in rows if (row["mode"], row.get("case")) == (mode, case)]
            if not of_case:
                continue
            counts = [
                sum(bool(row[name]) for row in of_case) for name in ("finished", "identical", "orphaned", "never")
            ]
            lines.append(f"| {title} | {victim} | {len(of_case)} | {' | '.join(map(str, counts))} |")
            title = ""
    ours = [row for row in rows if row["mode"] != "stock" and "case" in row]
    good = sum(row["finished"] and row["identical"] for row in ours)
    return "\n".join(
        [*lines, "", f"ringfence: {good} of {len(ours)} runs finished with the weights of an undisturbed run."]
    )


def _times(rows: Rows) -> str:
    lines = [
        "| | killed | while | kills | to the next step, median | worst | after it is back, median | worst |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for mode, title in MODES.items():
        for case, victim in CASES.items():
            struck = [hit for row in rows if row["mode"] == mode for hit in row.get("hits", ()) if hit["case"] == case]
            for when, phases in PHASES.items():
                hits = [hit for hit in struck if hit["phase"] in phases]
                if not hits:
                    continue
                times, back = (_pair([hit[name] for hit in hits]) for name in ("next_step", "since_restart"))
                lines.append(f"| {title} | {victim} | {when} | {len(hits)} | {times} | {back} |")
                title = victim = ""
    return "\n".join(lines)


def _pair(seconds: list[float | None]) -> str:
    """Median and worst of those that are known."""
    known = [each for each in seconds if each is not None]
    return f"{statistics.median(known):.1f} s | {max(known):.1f} s" if known else " | "


def _undisturbed(rows: Rows) -> str:
    lines = ["| | undisturbed runs | first step after, least | median | most |", "|---|---:|---:|---:|---:|"]
    for title, stock in (("ringfence, all modes", False), (MODES["stock"], True)):
        found = [
            row["undisturbed"]["first_step"]
            for row in rows
            if "undisturbed" in row and (row["mode"] == "stock") == stock
        ]
        lines.append(f"| {title} | {len(found)} | {min(found):.1f} s | {_pair(found)} |")
    return "\n".join(lines)


TABLES: Final[dict[str, Callable[[Rows], str]]] = {
    "outcomes": _outcomes,
    "undisturbed": _undisturbed,
    "times": _times,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/recovery", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="fail if the page is not what the results say")
    options = parser.parse_args()
    page = PAGE.read_text()
    fresh = filled(page, read(RESULTS))
    if options.check:
        return int(page != fresh)
    PAGE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
