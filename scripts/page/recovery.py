"""How runs recover: docs/results/recovery.jsonl and recovery-stock.jsonl, what `scripts/chaos --json` wrote with each mode."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from scripts.generated import table
from scripts.page import ROOT

KIND: Final = "recovery"
PAGES: Final = (ROOT / "docs" / "benchmarks" / "recovery.md",)
MODES: Final = {
    "plain": "`ringfence run`",
    "spares": "with `--spares`",
    "rejoin": "with `--spares --rejoin`, and a script that calls `ringfence.rejoin()`",
    "stock": "stock torchrun with Gloo",
}
CASES: Final = {
    "worker": "a worker",
    "agent": "an agent",
    "node": "an agent and its workers",
    "host": "the store's host",
}
PHASES: Final = {"training": ("training",), "starting": ("start", "restart")}

Rows = Sequence[dict[str, Any]]


def read(results: Path) -> list[dict[str, Any]]:
    """Return the runs in which something was killed, and the undisturbed ones before them."""
    files = (results / name for name in ("recovery.jsonl", "recovery-stock.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [row for row in rows if row.get("hits") or "undisturbed" in row]


def _outcomes(rows: Rows) -> str:
    lines = []
    for mode, title in MODES.items():
        for case, victim in CASES.items():
            found = [row for row in rows if (row["mode"], row.get("case")) == (mode, case)]
            if found:
                counts = [
                    sum(bool(row[name]) for row in found) for name in ("finished", "identical", "orphaned", "never")
                ]
                lines.append((title, victim, len(found), *counts))
                title = ""
    ours = [row for row in rows if row["mode"] != "stock" and "case" in row]
    good = sum(row["finished"] and row["identical"] for row in ours)
    said = ("runs", "finished", "weights bit-identical", "workers that outlived their agent", "never went on")
    return (
        f"{table(('', 'killed', *said), lines, left=2)}\n\nringfence: {good} of {len(ours)} runs finished with the weights of "
        "an undisturbed run."
    )


def _times(rows: Rows) -> str:
    lines = []
    for mode, title in MODES.items():
        for case, victim in CASES.items():
            struck = [hit for row in rows if row["mode"] == mode for hit in row.get("hits", ()) if hit["case"] == case]
            for when, phases in PHASES.items():
                if hits := [hit for hit in struck if hit["phase"] in phases]:
                    lines.append((title, victim, when, len(hits), *_pair([hit["next_step"] for hit in hits])))
                    title = victim = ""
    return table(("", "killed", "while", "kills", "to the next step, median", "worst"), lines, left=3)


def _pair(seconds: list[float | None]) -> tuple[str, str]:
    """Median and worst of those that are known."""
    known = [each for each in seconds if each is not None]
    return (f"{statistics.median(known):.1f} s", f"{max(known):.1f} s") if known else ("", "")


def _undisturbed(rows: Rows) -> str:
    lines = []
    for title, stock in (("ringfence, all modes", False), (MODES["stock"], True)):
        some = [row for row in rows if "undisturbed" in row and (row["mode"] == "stock") == stock]
        found = [row["undisturbed"]["first_step"] for row in some]
        lines.append((title, len(found), f"{min(found):.1f} s", *_pair(found)))
    return table(("", "undisturbed runs", "first step after, least", "median", "most"), lines, left=1)


TABLES: Final[dict[str, Callable[[Rows], str]]] = {"outcomes": _outcomes, "undisturbed": _undisturbed, "times": _times}
