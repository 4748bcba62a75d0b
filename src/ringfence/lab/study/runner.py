"""Measures what is missing from the cells of a study, round by round; rounds are kept as soon as they are measured."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ringfence.lab.bench import machine, names
from ringfence.lab.bench.measure import placements_for, rounds_of
from ringfence.lab.bench.samples import Samples
from ringfence.lab.bench.worker_pool import WorkerPool
from ringfence.lab.study import selection
from ringfence.lab.study.cells import Cell, label
from ringfence.lab.study.folder import Folder
from ringfence.lab.tables import Progress

# Packages that run before anything is timed, or that only read samples: samples stay valid when these change.
UNMEASURED: Final = (
    *("admission", "cli", "evidence", "join", "policy"),
    *("lab/plan", "lab/report", "lab/study", "lab/tables.py"),
)


class CellRounds(NamedTuple):
    """A cell, its samples, and the number of rounds that are missing."""

    cell: Cell
    case: Mapping[str, Any]
    samples: Samples
    rounds: int

    @property
    def others(self) -> bool:
        """Whether the layers use rounds of another machine or of other code for this cell."""
        return selection.others(self.samples.path, self.case)


def facts() -> dict[str, Any]:
    """Return the facts of this machine and the digest of the measured code."""
    return {**machine.facts(), "source": machine.source_digest(without=UNMEASURED)}


def missing_rounds(folder: Folder, cells: Sequence[Cell], here: Mapping[str, Any]) -> list[CellRounds]:
    """Return all cells, each with the number of rounds that are missing on this machine with this code."""
    found = []
    for cell in cells:
        case = {**cell.settings, "machine": machine.digest(here)}
        samples = Samples(folder.raw, f"{cell.name}.jsonl")
        found.append(CellRounds(cell, case, samples, max(0, cell.rounds - len(samples.rounds(case)))))
    return found


def show(complete: Sequence[CellRounds]) -> int:
    """Select the rounds of this machine and code for the layers; return for how many cells that is a change."""
    return sum(selection.show(each.samples.path, each.samples.run, each.case, machine.now()) for each in complete)


def measure(missing: Sequence[CellRounds], here: Mapping[str, Any], command: str) -> None:
    """Measure the missing rounds. Cells with the same number of workers and hosts share a worker pool."""
    progress = Progress(sum(each.rounds for each in missing))
    try:
        together = sorted(missing, key=lambda each: each.cell.worker_pool)
        for (hosts, rate, workers), group in itertools.groupby(together, key=lambda each: each.cell.worker_pool):
            progress.say(f"starting {workers} workers")
            each_of_them = list(group)
            with (
                placements_for(workers, hosts, rate or None) as placements,
                WorkerPool(placements, _variants(each_of_them)) as worker_pool,
            ):
                for each in each_of_them:
                    selection.hold(each.samples.path, each.samples.run, each.case)
                    each.samples.begin({**here, **worker_pool.facts}, command, machine.now())
                    _measure(worker_pool, each, progress)
                    show([each])
    finally:
        progress.end()


def _variants(group: Sequence[CellRounds]) -> list[str]:
    """All variants that any of the cells has, in one order."""
    named = {name for each in group for name in each.case["variants"]}
    return [name for name in (*names.VARIANTS, names.ALONE) if name in named]


def _measure(worker_pool: WorkerPool, missing: CellRounds, progress: Progress) -> None:
    what = f"{label(missing.case)}, {worker_pool.size} workers"
    progress.say(what)
    one = rounds_of(worker_pool, missing.case, missing.cell.trace)
    for _ in range(missing.rounds):
        missing.samples.add(missing.case, one(len(missing.samples.rounds(missing.case))))
        progress.step(what)
