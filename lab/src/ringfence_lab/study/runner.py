"""Measures what is missing from the cells of a study, round by round; rounds are kept as soon as they are measured."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from ringfence_lab.bench import machine, names
from ringfence_lab.bench.measure import placements_for, rounds_of
from ringfence_lab.bench.samples import Case, Round, Samples
from ringfence_lab.bench.worker_pool import WorkerPool
from ringfence_lab.study import selection
from ringfence_lab.study.cells import Cell, Pool, Step, label
from ringfence_lab.study.folder import Folder
from ringfence_lab.study.tee_runner import machines_for
from ringfence_lab.tables import Progress

# Packages that run before anything is timed, or that only read samples: samples stay valid when these change.
UNMEASURED: Final = (
    *(f"ringfence/{room}" for room in ("admission", "cli", "evidence", "join", "policy")),
    *(f"ringfence_lab/{room}" for room in ("cli", "plan", "report", "study", "tables.py")),
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
    """Measure the missing rounds. Cells with the same number of workers and hosts share their processes."""
    progress = Progress(sum(each.rounds for each in missing))
    try:
        together = sorted(missing, key=lambda each: each.cell.worker_pool)
        for pool, group in itertools.groupby(together, key=lambda each: each.cell.worker_pool):
            progress.say(f"starting {pool.workers} {'simulated devices' if pool.devices else 'workers'}")
            each_of_them = list(group)
            with _processes(pool, each_of_them) as processes:
                for each in each_of_them:
                    selection.hold(each.samples.path, each.samples.run, each.case)
                    each.samples.begin({**here, **processes.facts}, command, machine.now())
                    _measure(processes, each, progress)
                    show([each])
    finally:
        progress.end()


class _Processes(Protocol):
    """What measures the cells of a pool."""

    @property
    def facts(self) -> dict[str, Any]: ...
    def rounds_of(self, case: Case, trace: Sequence[Step]) -> Callable[[int], Round]: ...


class _Workers:
    """A worker pool as it measures cells of all kinds but gpu-tee."""

    def __init__(self, worker_pool: WorkerPool) -> None:
        self._worker_pool = worker_pool
        self.facts: dict[str, Any] = worker_pool.facts

    def rounds_of(self, case: Case, trace: Sequence[Step]) -> Callable[[int], Round]:
        return rounds_of(self._worker_pool, case, trace)


@contextlib.contextmanager
def _processes(pool: Pool, group: Sequence[CellRounds]) -> Iterator[_Processes]:
    if pool.devices:
        with machines_for(pool) as machines:
            yield machines
        return
    with (
        placements_for(pool.workers, pool.hosts, pool.rate or None) as placements,
        WorkerPool(placements, _variants(group)) as worker_pool,
    ):
        yield _Workers(worker_pool)


def _variants(group: Sequence[CellRounds]) -> list[str]:
    """All variants that any of the cells has, in one order."""
    named = {name for each in group for name in each.case["variants"]}
    return [name for name in (*names.VARIANTS, names.ALONE) if name in named]


def _measure(processes: _Processes, missing: CellRounds, progress: Progress) -> None:
    what = f"{label(missing.case)}, {missing.case['workers']} workers"
    progress.say(what)
    one = processes.rounds_of(missing.case, missing.cell.trace)
    for _ in range(missing.rounds):
        missing.samples.add(missing.case, one(len(missing.samples.rounds(missing.case))))
        progress.step(what)
