"""`scripts/plan-tables`: every table of the planner's guide and results; or, with --check, whether they are fresh."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from ringfence_lab.cli.plan import read_study
from ringfence_lab.cli.plan_checks import calibrated_rows, copies_rows, lee_rows, tee_rows, tee_summary, verified
from ringfence_lab.cli.plan_views import seconds_text, share_text
from ringfence_lab.plan import gpu_tee, hardware, models, published
from ringfence_lab.plan.calibrate import calibrate
from ringfence_lab.plan.hardware import FIGURES, Hardware
from ringfence_lab.plan.recommend import best_for, in_the_clear, plan
from ringfence_lab.plan.selection_table import DEFAULT, differences, table
from ringfence_lab.plan.steps import Question, replayed, step
from ringfence_lab.plan.traces import trace
from ringfence_lab.plan.validate import Line, Validation, validate
from ringfence_lab.plan.work import VARIANTS
from scripts import generated, machine_tables
from scripts.plan_samples import bench_rows

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = (ROOT / "docs" / "guides" / "plan.md", ROOT / "docs" / "benchmarks" / "planner-results.md")
STUDY: Final = ROOT / "docs" / "results" / "study"
TEES: Final = ROOT / "docs" / "results" / "gpu-tee"
TEE_PRESET: Final = "h100"
EIGHT: Final = ROOT / "docs" / "results" / "eight-workers"
TRACES: Final = ROOT / "docs" / "results" / "traces.json"
EIGHT_SCHEDULES: Final = ("ring", "tree", "doubling")
WHOSE: Final = {
    "gloo": "plaintext Gloo",
    "ringfence": "ringfence",
    "ringfence-unsealed": "ringfence, unsealed",
    "hop-by-hop": "sealed hop by hop",
}
SCALES: Final = (64, 1024, 16_384)
SCALE_MODELS: Final = ("bert-large", "gpt2-xl", "llama-7b")

Cells = Sequence[Sequence[str]]


def markdown(rows: Cells) -> str:
    head, *others = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *others))


# -- the model against measurement ------------------------------------------------------------------------------------


@cache
def measured() -> tuple[list[dict[str, Any]], int, str]:
    """Summary rows, cores, and where they are from."""
    if (STUDY / "summary" / "cells.json").exists():
        rows, cores, _ = read_study(STUDY, None)
        return rows, cores, "`ringfence plan validate --study docs/results/study`"
    return (
        bench_rows(),
        2,
        "the samples of `ringfence bench` in `docs/results`: collectives only, since no step was timed alone",
    )


@cache
def validation() -> Validation:
    rows, cores, _ = measured()
    return validate(rows, 0, cores)


def validation_table() -> str:
    by_cell: dict[str, dict[str, Line]] = {}
    for line in validation().lines:
        by_cell.setdefault(line.cell, {})[line.variant] = line
    rows = [
        [
            "cell",
            "scored",
            "Gloo",
            "predicted",
            "ringfence / Gloo",
            "predicted",
            "unsealed / Gloo",
            "predicted",
            "hop by hop / Gloo",
            "predicted",
        ]
    ]
    for cell, lines in by_cell.items():
        gloo = lines["gloo"]
        row = [f"`{cell}`", "yes" if gloo.scored else "no", seconds_text(gloo.measured)]
        row.append(f"{seconds_text(gloo.predicted)} ({gloo.predicted / gloo.measured - 1:+.0%})")
        for name in ("ringfence", "ringfence-unsealed", "hop-by-hop"):
            line = lines.get(name)  # type: ignore[assignment]
            off = line and line.predicted_ratio / line.measured_ratio - 1
            row += (
                ["", ""] if line is None else [f"{line.measured_ratio:.2f}", f"{line.predicted_ratio:.2f} ({off:+.0%})"]
            )
        rows.append(row)
    return markdown(rows)


def validation_summary() -> str:
    found = validation()
    rows = [["predicted", "scored cells", "of", "median error", "worst error", "at most 10% and 30%"]]
    for name, count, ratio, seconds in verified(found):
        for what, (median, worst) in (("the ratio to Gloo", ratio), ("seconds", seconds)):
            met = "yes" if median <= 0.10 and worst <= 0.30 else "**no**"
            rows.append([name, str(count), what, share_text(median), share_text(worst), met])
    whose = [["seconds of", "scored cells", "median error", "worst error"]]
    for variant, title in WHOSE.items():
        errors = sorted(line.error for line in found.lines if line.scored and line.variant == variant)
        whose.append([title, str(len(errors)), share_text(statistics.median(errors)), share_text(errors[-1])])
    others = [validate(measured()[0], seed, measured()[1]) for seed in (1, 2)]
    dealt = [
        f"{share_text(ratio[0])} and {share_text(ratio[1])} of all ratios, "
        f"{share_text(seconds[0])} and {share_text(seconds[1])} of all seconds"
        for ratio, seconds in ((other.errors(True), other.errors(False)) for other in (found, *others))
    ]
    return (
        f"Over {found.scored_cells} scored cells of {found.cells}, from {measured()[2]}:\n\n{markdown(rows)}\n\n"
        f"{markdown(whose)}\n\n"
        f"Median and worst error, collectives and steps together: {dealt[0]}. Dealt into halves in two other variants: "
        f"{dealt[1]} (seed 1); {dealt[2]} (seed 2)."
    )


# -- predictions ------------------------------------------------------------------------------------------------------


def profiles_table() -> str:
    rows = [["profile", "what it is", "figures assumed"]]
    for name in hardware.names():
        profile = hardware.load(name)
        rows.append([f"`{name}`", profile.title, f"{len(profile.assumed())} of {len(FIGURES)}"])
    return markdown(rows)


def scale_table() -> str:
    """Sealing's overhead with the recommended settings: today's, and with all levers."""
    rows = [
        [
            "model",
            "network",
            "workers",
            "plaintext",
            "ringfence",
            "sealing",
            "recommended today",
            "then",
            "sealing then",
            "and not available yet",
            "then",
            "and seldom",
            "then",
        ]
    ]
    for name in SCALE_MODELS:
        for rate in (100, 400):
            profile = hardware.load(f"tdx-{rate}g")
            for workers in SCALES:
                found = plan(profile, Question(models.load(name), workers))
                today = [f"{each.lever} {each.value}" for each in found.advice if each.built]
                later = [each for each in found.advice if not each.built and each.lever != "every"]
                seldom = [f"every {each.value}" for each in found.advice if each.lever == "every"]
                rows.append(
                    [
                        name,
                        f"{rate} Gbit/s",
                        f"{workers:,}",
                        seconds_text(found.variants["plaintext"].seconds),
                        seconds_text(found.variants["ringfence"].seconds),
                        f"{found.overhead - 1:+.0%}",
                        ", ".join(today) or "nothing",
                        seconds_text(found.tuned["ringfence"].seconds),
                        f"{found.tuned_overhead - 1:+.0%}",
                        ", ".join(f"{each.lever} {each.value}" for each in later) or "nothing",
                        seconds_text(found.synchronous.seconds),
                        *(seldom or [""]),
                        seconds_text(found.all_levers.seconds) if seldom else "",
                    ]
                )
    return markdown(rows)


def overhead_table() -> str:
    """What sealing costs when each variant has what is best for it, channels included, and synchronises in each step."""
    rows = [["model", "network", *(f"{workers:,} workers" for workers in SCALES)]]
    for name in SCALE_MODELS:
        for rate in (100, 400):
            profile = hardware.load(f"tdx-{rate}g")
            shares = []
            for workers in SCALES:
                question = Question(models.load(name), workers)
                best = best_for(profile, question, "ringfence")
                sealed, plain = step(profile, VARIANTS["ringfence"], best), in_the_clear(profile, question, best)
                shares.append(f"{sealed.seconds / plain.seconds - 1:+.1%}")
            rows.append([name, f"{rate} Gbit/s", *shares])
    return markdown(rows)


def published_table() -> str:
    return markdown(lee_rows())


def calibrated_table() -> str:
    return markdown(calibrated_rows())


def tee_table() -> str:
    """The gpu-tee cells, each predicted from the other half, and what all of them calibrate to."""
    rows = read_study(TEES, None)[0]
    head, *lines = tee_rows(found := gpu_tee.validate(rows, TEE_PRESET))
    profile = gpu_tee.calibrate(rows, TEE_PRESET)
    rate, overhead, computing = (profile.figures["device", key].value for key in gpu_tee.CALIBRATED)
    errors = "\n".join(f"- {text}" for text in tee_summary(found)[1:])
    return (
        f"{markdown([head, *([f'`{row[0]}`', *row[1:]] for row in lines)])}\n\n{errors}\n\nAll cells together calibrate to "
        f"{rate:.4g} GB/s, {overhead:.4g} µs and `computing = {computing:g}`, the figures of `{published.NODE}`."
    )


def copies_table() -> str:
    return markdown(copies_rows())


def fastrack_table() -> str:
    rows = [["switched on", "seconds a GB", "times the plain copy", "time saved", "published"]]
    says = ["12.69 to 33.53 times", "", "", "up to 84.6 % less run time, of whole applications"]
    for stage, words in zip(published.fastrack(), says, strict=True):
        rows.append(
            [stage.name, f"{stage.seconds_per_gb:.3f}", f"{stage.slowdown:.1f}", share_text(stage.reduction), words]
        )
    return markdown(rows)


def thresholds_table() -> str:
    chosen = ("tdx-10g", "tdx-100g", "tdx-400g")
    tables = {name: table(hardware.load(name)) for name in chosen}
    rows = [["threshold", "default", *(f"`{name}`" for name in chosen)]]
    for field in DEFAULT.__dataclass_fields__:
        rows.append(
            [f"`{field}`", f"{getattr(DEFAULT, field):,}", *(f"{getattr(tables[name], field):,}" for name in chosen)]
        )
    lines = []
    for name in chosen:
        found = differences(hardware.load(name), proposed=tables[name])
        gains = [each.gain for each in found]
        better = sum(gain > 0 for gain in gains)
        lines.append(
            f"- `{name}`: another choice for {len(found)} of 504 combinations of collective, group and size; the model expects "
            f"{better} of them to be faster (median of all {share_text(statistics.median(gains)) if gains else '0%'})."
        )
    return markdown(rows) + "\n\n" + "\n".join(lines)


@cache
def here() -> Hardware:
    rows, cores, _ = measured()
    return calibrate(rows, cores)


def eight_table() -> str:
    """Eight workers on the calibrated machine: what each schedule and bucket size is predicted to cost, and what it took."""
    tried = {(row["bucket_mb"], row["variant"]): row for row in read_study(EIGHT, None)[0]}
    found: dict[tuple[float | None, str], tuple[float, float]] = {}
    rows = [["bucket", *EIGHT_SCHEDULES, "the runtime's choice"]]
    for cap in sorted({cap for cap, _ in tried}, key=lambda cap: cap or 0.0):
        alone = tried[cap, "alone"]["seconds"]
        row = ["DDP's default" if cap is None else f"{cap:g} MiB"]
        for strategy in EIGHT_SCHEDULES:
            made = trace(models.load("resnet50"), cap, 4, alone, busy=False)
            asked = Question(models.load("resnet50"), 8, cap, schedule=strategy)
            took = tried[cap, f"ringfence-{strategy}"]
            said = replayed(here(), VARIANTS["ringfence"], made, asked).seconds
            found[cap, strategy] = said, took["seconds"]
            row.append(f"{seconds_text(said)}; took {_interval(took)}")
        rows.append([*row, f"took {_interval(tried[cap, 'ringfence'])}"])
    advised, best = (min(found, key=lambda each: found[each][index]) for index in (0, 1))
    distance = found[advised][1] / found[best][1] - 1
    return (
        f"{markdown(rows)}\n\nPredicted to be best: {_setting(advised)}, which took {seconds_text(found[advised][1])}. "
        f"Measured to be best: {_setting(best)}, with {seconds_text(found[best][1])}. "
        f"What the plan recommends is {f'{share_text(distance)} slower than the best' if distance else 'the best'} of these."
    )


def _interval(row: dict[str, Any]) -> str:
    return f"{seconds_text(row['seconds'])} [{seconds_text(row['seconds_low'])}, {seconds_text(row['seconds_high'])}]"


def _setting(choice: tuple[float | None, str]) -> str:
    cap, strategy = choice
    return f"{strategy} with {'the default bucket' if cap is None else f'buckets of {cap:g} MiB'}"


_TRACE_TIMES: Final = ("recorded", "gloo", "predicted", "low", "high", "sealed", "by_step")


def traces_table() -> str:
    """Sealed steps predicted from traces beside what was measured, as `ringfence plan traces --json` wrote them."""
    found = json.loads(TRACES.read_text())
    heads = ["job", "recorded, Gloo", "without profiler", "predicted", "interval", "measured", "error", "within"]
    rows = [[*heads, "predicted with `--step`", "error"]]
    for case in found["cases"]:
        size = "default buckets" if case["bucket_mib"] is None else f"{case['bucket_mib']:g} MiB"
        times = {name: seconds_text(case[name]) for name in _TRACE_TIMES}
        rows.append(
            [
                f"{case['model']}, {size}, {case['workers']} workers",
                *(times[name] for name in ("recorded", "gloo", "predicted")),
                f"{times['low']} to {times['high']}",
                times["sealed"],
                f"{case['ratio'] - 1:+.0%}",
                "yes" if case["within"] else "no",
                times["by_step"],
                f"{case['ratio_by_step'] - 1:+.0%}",
            ]
        )
    said = {
        "": found,
        "With `--step`: ": found["by_step"],
        "Were the sealed step as long as the recorded one: ": found["unchanged"],
    }
    errors = [
        f"{what}median error {share_text(each['median_error'])}, worst {share_text(each['worst_error'])}."
        for what, each in said.items()
    ]
    summary = f"Over {len(found['cases'])} jobs: {' '.join(errors)}"
    return f"{markdown(rows)}\n\n{summary}"


TABLES: Final[dict[str, Callable[[], str]]] = {
    "validation": validation_table,
    "validation-summary": validation_summary,
    "profiles": profiles_table,
    "scale": scale_table,
    "overhead": overhead_table,
    "published": published_table,
    "copies": copies_table,
    "calibrated": calibrated_table,
    "gpu-tee": tee_table,
    "fastrack": fastrack_table,
    "thresholds": thresholds_table,
    "eight": eight_table,
    "traces": traces_table,
    **machine_tables.tables(markdown),
}


@cache
def once(name: str) -> str:
    """A fresh table; one that stands on several pages is made once."""
    return TABLES[name]()


def filled(text: str) -> str:
    """The text with a fresh table at each marker; a marker that names no table is a mistake."""
    return generated.filled(text, "plan", once)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/plan-tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if anything is stale")
    options = parser.parse_args()
    stale = {page: fresh for page in PAGES if (fresh := filled(text := page.read_text())) != text}
    for page, fresh in stale.items():
        if not options.check:
            page.write_text(fresh)
        print(f"{page.name} is stale: run scripts/plan-tables" if options.check else f"wrote {page.name}")
    if not stale:
        print("all is fresh")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
