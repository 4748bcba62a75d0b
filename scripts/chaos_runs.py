"""Many runs of tests/integration/chaos.py. `scripts/figures` makes tables of what they append to docs/results.

    scripts/chaos --runs 200 --seed 1 --launcher ringfence --cases worker,agent,host --json FILE

Seed and index determine what a run kills and when. FILE gets a line for each run as soon as it has ended; runs that it has
already are not repeated. The output of runs that did not pass is kept, in a folder below that for temporary files.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringfence_lab.bench.machine import facts
from tests.integration.chaos import CASES, Case, Outcome, Run, draw, tails, undisturbed
from tests.integration.chaos_nodes import LAUNCHERS, Shape
from tests.integration.rejoins import SCRIPT

KEYS = ("launcher", "nodes", "workers", "seed", "index", "case")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="ringfence")
    parser.add_argument("--cases", default="worker,agent,host", help=f"of {','.join(CASES)}")
    parser.add_argument("--spares", action="store_true", help="with `ringfence run --spares`")
    parser.add_argument(
        "--rejoin", action="store_true", help="with `ringfence run --rejoin`, and a script that rejoins"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="a line for each run; runs in it are not repeated")
    options = parser.parse_args(given)
    options.cases = options.cases.split(",")
    if (options.spares or options.rejoin) and options.launcher != "ringfence":
        parser.error("only ringfence has --spares and --rejoin")
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    return options


def recorded(path: Path | None) -> list[dict[str, Any]]:
    """Return the runs in a file of results."""
    if path is None or not path.exists():
        return []
    return [row for line in path.read_text().splitlines() if "case" in (row := json.loads(line))]


def append(path: Path | None, row: dict[str, Any]) -> None:
    if path is not None:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def progress(outcome: Outcome) -> str:
    """Return the line of a run."""
    parts = []
    for hit in outcome.hits:
        missing = "never" if hit is outcome.hits[-1] else "not before the next kill"
        next_step = missing if hit.next_step is None else f"{hit.next_step:.1f} s"
        parts.append(f"{hit.case} of node {hit.node} at {hit.at:.1f} s ({hit.phase}, step {hit.step}): {next_step}")
    hits = ", ".join(parts)
    word = "passed" if outcome.passed else "FAILED" if outcome.hits or not outcome.finished else "not killed"
    more = [f"{outcome.gave_up} agents gave up"] if outcome.gave_up else []
    more += ["workers outlived their agent"] if outcome.orphaned else []
    more += [outcome.problem] if outcome.problem else []
    return f"run {outcome.index}: {word} in {outcome.seconds:.0f} s ({outcome.stolen:.0f} stolen); {'; '.join([hits, *more])}"


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the processes of a run end with it
    flags: tuple[str, ...] = ("--rejoin",) if options.rejoin else ()
    flags += ("--rdzv-conf", "spares=1") if options.spares else ()
    shape = Shape(options.launcher, flags=flags)
    if options.rejoin:
        shape = replace(shape, script=SCRIPT)
    mode = "rejoin" if options.rejoin else "spares" if options.spares else "plain"
    mode = mode if options.launcher == "ringfence" else "stock"
    cases: list[Case] = options.cases
    keep = Path(tempfile.mkdtemp(prefix="chaos-"))
    rows = recorded(options.json)
    known = {tuple(row[key] for key in KEYS) for row in rows}
    folder = keep / "undisturbed"
    baseline = undisturbed(shape, folder)
    shutil.rmtree(folder)
    print(f"undisturbed: {baseline.seconds:.1f} s, first step after {baseline.first_step:.1f} s", flush=True)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    append(options.json, {"mode": mode, "machine": facts(), "date": now, "undisturbed": vars(baseline)})
    failed = False
    for index in range(options.runs):
        plan = draw(options.seed, index, cases, shape, baseline)
        if (shape.launcher, shape.nodes, shape.workers, plan.seed, index, plan.case) in known:
            continue
        folder = keep / f"{shape.launcher}-{plan.seed}-{index}"
        outcome = Run(shape, plan, baseline, folder).go()
        rows.append({"mode": mode} | outcome.to_json())
        append(options.json, rows[-1])
        print(progress(outcome), flush=True)
        if outcome.passed or (outcome.finished and not outcome.hits):
            shutil.rmtree(folder)
        else:
            failed = failed or shape.launcher == "ringfence"  # stock torchrun's failures are what it is compared by
            (folder / "tails").write_text(tails(folder))
            print(f"  output: {folder}", flush=True)
    hit = [row for row in rows if row["launcher"] == shape.launcher and row["hits"]]
    print(f"{sum(row['finished'] and row['identical'] for row in hit)} of {len(hit)} finished with the same weights")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
