"""The guide of the planner: its profiles, how far it is from the studies in docs/results, and what it predicts at scale.

And of the guide about GPUs the table that says when to stage.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ringfence_lab.cli import plan_counts
from ringfence_lab.cli.plan import read_study
from ringfence_lab.cli.plan_checks import slowdown_rows, verified
from ringfence_lab.cli.plan_views import seconds_text, share_text
from ringfence_lab.plan import hardware, models
from ringfence_lab.plan.calibrate import calibrate
from ringfence_lab.plan.recommend import plan
from ringfence_lab.plan.steps import Question
from ringfence_lab.plan.validate import validate
from ringfence_lab.report.figure import Picture
from scripts.generated import table
from scripts.page import ROOT

KIND: Final = "plan"
PAGES: Final = (ROOT / "docs" / "guides" / "plan.md", ROOT / "docs" / "guides" / "gpus.md")


def read(results: Path) -> Path:
    return results


def markdown(rows: Sequence[Sequence[str]]) -> str:
    return table(rows[0], rows[1:])


def profiles(_: Path) -> str:
    """The profiles; those that differ in the rate of the network only share a row."""
    found: dict[tuple[str, str], list[str]] = {}
    for profile in map(hardware.load, hardware.names()):
        title = re.sub(r"\d+ Gbit/s", "as many Gbit/s", profile.title)
        assumed = f"{len(profile.assumed())} of {len(hardware.FIGURES)}"
        found.setdefault((title, assumed), []).append(f"`{profile.name}`")
    rows = [[", ".join(names), title, assumed] for (title, assumed), names in found.items()]
    return markdown([["profile", "what it is", "figures assumed"], *rows])


def validation(results: Path) -> str:
    """The errors in the study of one machine."""
    rows, cores, _ = read_study(results / "study")
    found = validate(rows, 0, cores)
    shown = [["predicted", "scored cells", "of", "median error", "worst error"]]
    for name, count, *errors in verified(found):
        for what, pair in zip(("the ratio to Gloo", "seconds"), errors, strict=True):
            shown.append([name, str(count), what, *map(share_text, pair)])
    return f"Over {found.scored_cells} scored cells of {found.cells}:\n\n{markdown(shown)}"


def machines(results: Path) -> str:
    """The errors in the study of machines with several workers, and what it calibrates to."""
    rows, cores, _ = read_study(results / "machines")
    lines = validate(rows, 0, cores).lines
    shown = [["predicted", "cells", "median error", "worst error"]]
    for title, chosen in (("scored cells", [line for line in lines if line.scored]), ("all cells", lines)):
        ours = [line for line in chosen if line.variant == "ringfence"]
        for what, errors in (
            ("seconds of Gloo", [line.error for line in chosen if line.variant == "gloo"]),
            ("seconds of ringfence", [line.error for line in ours]),
            ("the ratio", [line.ratio_error for line in ours]),
        ):
            worst = share_text(max(errors))
            shown.append([f"{title}: {what}", str(len(errors)), share_text(statistics.median(errors)), worst])
    copy, message = (calibrate(rows, cores).figures["inside", key].value for key in ("copy", "message"))
    inside = f"All cells together calibrate to `inside.copy` {copy:.3g} ns/B and `inside.message` {message:.3g} µs."
    return f"{markdown(shown)}\n\n{inside}"


def scale(_: Path) -> str:
    """Sealing's overhead on 100 Gbit/s."""
    rows = [["model", "workers", "plaintext", "ringfence", "sealing", "hop by hop"]]
    for name in ("gpt2-xl", "llama-7b"):
        for workers in (64, 1024, 16_384):
            found = plan(hardware.load("tdx-100g"), Question(models.load(name), workers))
            plain, ours, hops = (
                seconds_text(found.variants[each].seconds) for each in ("plaintext", "ringfence", "hop-by-hop")
            )
            rows.append([name, f"{workers:,}", plain, ours, f"{found.overhead - 1:+.0%}", hops])
    return markdown(rows)


def staging(_: Path) -> str:
    """ringfence as recommended beside NCCL in the clear, by the network of a machine."""
    scales = (16, 1024)
    rows = [["profile", "Gbit/s a machine"]]
    for workers in scales:
        rows[0] += [f"NCCL, {workers:,} workers", f"ringfence, {workers:,}"]
    for name, rates in (("h100-cc", (10, 25, 100, 400)), ("h100-ppcie", (100, 3200))):
        for rate in rates:
            profile = hardware.load(name).with_values(network_rate=rate)
            found = [plan(profile, Question(models.load("llama-7b"), workers)) for workers in scales]
            pairs = [(each.variants["nccl"], each.tuned["ringfence"]) for each in found]
            rows.append([f"`{name}`", f"{rate:,}", *(seconds_text(each.seconds) for pair in pairs for each in pair)])
    return markdown(rows)


_COUNTED: Final = ("all_reduce", "reduce_scatter", "all_gather")
_SIZE: Final = 25 << 20


def counts(_: Path) -> str:
    """What one worker does in a collective of 25 MiB, by the number of workers."""
    shown: list[Sequence[str]] = [("collective", *plan_counts.HEADER)]
    for name in _COUNTED:
        found = plan_counts.counted(name, _SIZE, 1, (8, 1024, 16_384))
        shown += [(name.replace("_", "-"), *row) for row in plan_counts.rows(name, _SIZE, 1, found)]
    return markdown(shown)


def pictures(_: Path) -> list[Picture]:
    numbers: dict[str, dict[str, list[dict[str, object]]]] = {"seals and opens": {}, "rounds": {}}
    for name in _COUNTED:
        for workers, each in plan_counts.counted(name, _SIZE, 1, tuple(4**power for power in range(1, 8))):
            for title, figure in (("seals and opens", each.seals + each.opens), ("rounds", each.rounds)):
                point = {"label": f"{workers:,}", "figure": [figure] * 3, "scored": True}
                numbers[title].setdefault(name.replace("_", "-"), []).append(point)
    options = {"what": "figure", "left": "of one worker", "log": False, "under": "workers"}
    return [Picture("counts", "panels", "A collective of 25 MiB", "", "", numbers, (), options=options)]


TABLES: Final[dict[str, Callable[[Path], str]]] = {
    "counts": counts,
    "profiles": profiles,
    "validation": validation,
    "machines": machines,
    "scale": scale,
    "staging": staging,
    "published": lambda _: markdown(slowdown_rows()),
}
