"""Measures what is missing from the cells of a study, round by round; whatever ends it, the rounds measured so far are kept."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ringfence.lab.bench import machine, names
from ringfence.lab.bench.measure import rounds_of, seats_for
from ringfence.lab.bench.samples import Samples
from ringfence.lab.bench.worker_pool import WorkerPool
from ringfence.lab.study import selection
from ringfence.lab.study.cells import Cell, label
from ringfence.lab.study.folder import Folder
from ringfence.lab.tables import Progress

# Rooms that are done before anything is timed, or only read what was: samples outlive a change in them.
UNMEASURED: Final = (
    *("admission", "cli", "evidence", "join", "policy"),
    *("lab/plan", "lab/report", "lab/study"),
)


class Wanted(NamedTuple):
    """A cell as it is wanted here, its samples, and how many rounds they lack."""

    cell: Cell
    case: Mapping[str, Any]
    samples: Samples
    rounds: int

    @property
    def others(self) -> bool:
        """Whether the layers show rounds of another machine or of other code in its place."""
        return selection.others(self.samples.path, self.case)


def facts() -> dict[str, Any]:
    """This machine, and the code that is measured."""
    return {**machine.facts(), "source": machine.source_digest(without=UNMEASURED)}


def wanted(folder: Folder, cells: Sequence[Cell], here: Mapping[str, Any]) -> list[Wanted]:
    """All cells, each with the rounds that it lacks on this machine with this code."""
    found = []
    for cell in cells:
        case = {**cell.settings, "machine": machine.digest(here)}
        samples = Samples(folder.raw, f"{cell.name}.jsonl")
        found.append(Wanted(cell, case, samples, max(0, cell.rounds - len(samples.rounds(case)))))
    return found


def show(complete: Sequence[Wanted]) -> int:
    """Let the layers show the rounds of this machine and code; for how many cells they showed others."""
    return sum(selection.show(each.samples.path, each.samples.run, each.case, machine.now()) for each in complete)


def measure(missing: Sequence[Wanted], here: Mapping[str, Any], command: str) -> None:
    """Measure what is missing. Cells with the same workers on the same hosts share them: starting workers takes seconds."""
    progress = Progress(sum(each.rounds for each in missing))
    try:
        together = sorted(missing, key=lambda each: each.cell.worker_pool)
        for (hosts, rate, workers), group in itertools.groupby(together, key=lambda each: each.cell.worker_pool):
            progress.say(f"starting {workers} workers")
            each_of_them = list(group)
            with (
                seats_for(workers, hosts, rate or None) as seats,
                WorkerPool(seats, _everyone(each_of_them)) as worker_pool,
            ):
                for each in each_of_them:
                    selection.hold(each.samples.path, each.samples.run, each.case)
                    each.samples.begin({**here, **worker_pool.facts}, command, machine.now())
                    _measure(worker_pool, each, progress)
                    show([each])
    finally:
        progress.end()


def _everyone(group: Sequence[Wanted]) -> list[str]:
    """All variants that any of the cells has, in one order."""
    named = {name for each in group for name in each.case["variants"]}
    return [name for name in (*names.VARIANTS, names.ALONE) if name in named]


def _measure(worker_pool: WorkerPool, wanted: Wanted, progress: Progress) -> None:
    what = f"{label(wanted.case)}, {worker_pool.size} workers"
    progress.say(what)
    one = rounds_of(worker_pool, wanted.case, wanted.cell.trace)
    for _ in range(wanted.rounds):
        wanted.samples.add(wanted.case, one(len(wanted.samples.rounds(wanted.case))))
        progress.step(what)
