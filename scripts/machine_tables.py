"""The planner against the study of machines x workers: tables of `scripts/plan-tables`."""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path
from typing import Any, Final

from ringfence_lab.cli.plan import read_study
from ringfence_lab.cli.plan_views import seconds_text, share_text
from ringfence_lab.plan import models
from ringfence_lab.plan.calibrate import calibrate
from ringfence_lab.plan.predict import workers_per_machine
from ringfence_lab.plan.steps import Question, replayed
from ringfence_lab.plan.traces import as_replayed
from ringfence_lab.plan.validate import Line, Validation, validate
from ringfence_lab.plan.work import VARIANTS

STUDY: Final = Path(__file__).parents[1] / "docs" / "results" / "machines"
SCHEDULES: Final = {"ringfence-ring": "two-levels", "ringfence-tree": "tree", "ringfence-doubling": "doubling"}
GOAL: Final = (0.10, 0.30)  # median and worst error
NEAR: Final = 0.05  # of the best: how good the recommendation has to be

Cells = list[list[str]]


@cache
def measured() -> tuple[list[dict[str, Any]], int]:
    rows, cores, _ = read_study(STUDY, None)
    return rows, cores


@cache
def validation() -> Validation:
    rows, cores = measured()
    return validate(rows, 0, cores)


def cells() -> Cells:
    """Each cell, predicted by a profile that has not seen it."""
    rows = [["cell", "scored", "Gloo", "predicted", "ringfence", "predicted", "ringfence / Gloo", "predicted"]]
    by_cell: dict[str, dict[str, Line]] = {}
    for line in validation().lines:
        by_cell.setdefault(line.cell, {})[line.variant] = line
    for cell, lines in by_cell.items():
        gloo, ours = lines["gloo"], lines["ringfence"]
        rows.append([f"`{cell}`", "yes" if gloo.scored else "no"])
        for line in (gloo, ours):
            rows[-1] += [
                seconds_text(line.measured),
                f"{seconds_text(line.predicted)} ({line.predicted / line.measured - 1:+.0%})",
            ]
        off = ours.predicted_ratio / ours.measured_ratio - 1
        rows[-1] += [f"{ours.measured_ratio:.2f}", f"{ours.predicted_ratio:.2f} ({off:+.0%})"]
    return rows


def summary() -> Cells:
    """The errors over the scored cells, with and scored, without up to 1 MiB on shared cores on shared cores, and over all."""
    found = validation()
    scored = [line for line in found.lines if line.scored]
    scheduled = _measure_the_scheduler()
    groups = {
        "scored cells": scored,
        "scored, without up to 1 MiB on shared cores": [line for line in scored if line.cell not in scheduled],
        "all cells": found.lines,
    }
    rows = [["predicted", "cells", "median error", "worst error", "at most 10% and 30%"]]
    for title, lines in groups.items():
        ours = [line for line in lines if line.variant == "ringfence"]
        for what, errors in (
            ("seconds of Gloo", [line.error for line in lines if line.variant == "gloo"]),
            ("seconds of ringfence", [line.error for line in ours]),
            ("the ratio", [line.ratio_error for line in ours]),
        ):
            median, worst = statistics.median(errors), max(errors)
            met = "yes" if median <= GOAL[0] and worst <= GOAL[1] else "**no**"
            rows.append([f"{title}: {what}", str(len(errors)), share_text(median), share_text(worst), met])
    return rows


def _measure_the_scheduler() -> set[str]:
    """The cells of at most 1 MiB whose workers share cores."""
    rows, cores = measured()
    return {
        row["cell"] for row in rows if row["kind"] == "collective" and row["size"] <= 1 << 20 and row["workers"] > cores
    }


def inside() -> str:
    """What all cells calibrate to."""
    profile = calibrate(*measured())
    copy, message = (profile.figures["inside", key].value for key in ("copy", "message"))
    return f"All cells together calibrate to `inside.copy` {copy:.3g} ns/B and `inside.message` {message:.3g} µs."


def choices() -> tuple[Cells, str]:
    """Two machines of four workers: what each schedule and bucket size is predicted to cost, and what it took."""
    rows, cores = measured()
    profile = calibrate(rows, cores)
    tried = {(row["bucket_mb"], row["variant"]): row for row in rows if row["kind"] == "trace"}
    found: dict[tuple[float | None, str], tuple[float, float]] = {}
    shown = [["bucket", *SCHEDULES.values(), "the runtime's choice"]]
    for cap in sorted({cap for cap, _ in tried}, key=lambda cap: cap or 0.0):
        alone = tried[cap, "alone"]
        made = as_replayed(models.load(alone["model"]), cap, 4, alone["seconds"], False, alone["scaled"] or 1.0)
        row = ["DDP's default" if cap is None else f"{cap:g} MiB"]
        for variant, schedule in {**SCHEDULES, "ringfence": "table"}.items():
            took = tried[cap, variant]
            asked = Question(
                models.load(alone["model"]),
                took["workers"],
                cap,
                schedule=schedule,
                per_machine=workers_per_machine(took),
            )
            said = replayed(profile, VARIANTS["ringfence"], made, asked).seconds
            found[cap, schedule] = said, took["seconds"]
            row.append(f"{seconds_text(said)}; took {_interval(took)}")
        shown.append(row)
    advised = min((each for each in found if each[1] == "table"), key=lambda each: found[each][0])
    best = min(found, key=lambda each: found[each][1])
    distance = found[advised][1] / found[best][1] - 1
    where = f"{share_text(distance)} slower than the best" if distance else "the best"
    return shown, (
        f"The plan recommends, of what can be set, {_setting(advised)}, which took {seconds_text(found[advised][1])}. Measured "
        f"to be best: {_setting(best)}, with {seconds_text(found[best][1])}. The recommendation is {where} of these: "
        f"{'within' if distance <= NEAR else '**not** within'} {NEAR:.0%}."
    )


def _setting(choice: tuple[float | None, str]) -> str:
    cap, schedule = choice
    name = {"table": "the runtime's own schedules", "two-levels": "two levels for everything"}.get(schedule, schedule)
    return f"{name} with {'the default buckets' if cap is None else f'buckets of {cap:g} MiB'}"


def _interval(row: dict[str, Any]) -> str:
    return f"{seconds_text(row['seconds'])} [{seconds_text(row['seconds_low'])}, {seconds_text(row['seconds_high'])}]"


def tables(markdown: Any) -> dict[str, Any]:
    """The tables by name; `markdown` lays out rows."""

    def chosen() -> str:
        rows, said = choices()
        return f"{markdown(rows)}\n\n{said}"

    return {
        "machines": lambda: markdown(cells()),
        "machines-summary": lambda: f"{markdown(summary())}\n\n{inside()}",
        "machines-choice": chosen,
    }
