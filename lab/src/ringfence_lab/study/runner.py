"""Measures what is missing from the cells of a study, round by round; rounds are kept as soon as they are measured.

Cells on simulated GPU TEEs are measured by rings between the devices of one process, and by ringfence between workers with one
device each.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from ringfence_lab.bench import machine, names
from ringfence_lab.bench.measure import placements_for, rounds_of, shuffled
from ringfence_lab.bench.samples import Case, Round, Samples
from ringfence_lab.bench.tee_variants import tee_of
from ringfence_lab.bench.worker_pool import RINGS, Placement, WorkerPool
from ringfence_lab.progress import Progress
from ringfence_lab.study import selection
from ringfence_lab.study.cells import Cell, Pool, Step, label
from ringfence_lab.study.folder import Folder

# Packages that run before anything is timed, or that only read samples: samples stay valid when these change.
UNMEASURED: Final = (
    *(f"ringfence/{room}" for room in ("admission", "cli", "evidence", "session/join")),
    *(f"ringfence_lab/{room}" for room in ("cli", "plan", "report", "study", "progress.py")),
)

Prepare = Callable[[Case, Sequence[Step]], Callable[[int], Round]]  # returns what measures one round of the case


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
    with Progress(sum(each.rounds for each in missing)) as progress:
        together = sorted(missing, key=lambda each: each.cell.worker_pool)
        for pool, group in itertools.groupby(together, key=lambda each: each.cell.worker_pool):
            progress.say(f"starting {pool.workers} {'simulated devices' if pool.devices else 'workers'}")
            cells = list(group)
            with _processes(pool, cells) as (about, prepare):
                for each in cells:
                    selection.hold(each.samples.path, each.samples.run, each.case)
                    each.samples.begin({**here, **about}, command, machine.now())
                    _measure(prepare, each, progress)
                    show([each])


def _measure(prepare: Prepare, missing: CellRounds, progress: Progress) -> None:
    what = f"{label(missing.case)}, {missing.case['workers']} workers"
    progress.say(what)
    one = prepare(missing.case, missing.cell.trace)
    for _ in range(missing.rounds):
        missing.samples.add(missing.case, one(len(missing.samples.rounds(missing.case))))
        progress.step(what)


@contextlib.contextmanager
def _processes(pool: Pool, cells: Sequence[CellRounds]) -> Iterator[tuple[dict[str, Any], Prepare]]:
    """Start the processes that measure these cells; yield facts about them and the function that prepares a case."""
    with contextlib.ExitStack() as stack:
        placements = stack.enter_context(placements_for(pool.workers, pool.hosts, pool.rate or None))
        if not pool.devices:
            named = {name for each in cells for name in each.case["variants"]}
            variants = [name for name in (*names.VARIANTS, names.ALONE) if name in named]
            workers = stack.enter_context(WorkerPool(placements, variants))
            yield workers.facts, partial(rounds_of, workers)
            return
        rings = stack.enter_context(WorkerPool([Placement()], module=RINGS, devices=pool.workers))
        sealed = None
        if pool.hosts:
            sealed = stack.enter_context(WorkerPool(placements, [names.TEE_SEALED], names.SIMULATED))
        yield rings.facts, partial(_tee_rounds_of, rings, sealed)


def _tee_rounds_of(
    rings: WorkerPool, sealed: WorkerPool | None, case: Case, trace: Sequence[Step]
) -> Callable[[int], Round]:
    """Prepare a gpu-tee case, which checks every result, and return a function that measures one round of it."""
    tees = {name: tee_of(name, case["tee"], dilation).settings() for name, dilation in case["dilations"].items()}
    by_ringfence = {name: tees.pop(name) for name in (names.TEE_SEALED,) if name in tees}
    rings.tell("prepare_tee", steps=list(trace), tees=tees, operation=case["operation"])
    if sealed is not None and by_ringfence:
        sealed.tell("prepare_tee", steps=list(trace), tees=by_ringfence)

    def measure(number: int) -> Round:
        found = rings.measure("train", turns=shuffled(dict.fromkeys(tees, 1), number))
        if sealed is not None and by_ringfence:
            found |= sealed.measure("train", turns=[(names.TEE_SEALED, 1)])
        return {name: _undilated(sample, case["dilations"][name]) for name, sample in found.items()}

    return measure


def _undilated(sample: Mapping[str, Any], dilation: float) -> dict[str, Any]:
    """Return a sample in simulated seconds, with what passed on this machine beside them."""
    actual = sample.get("dilation", dilation)  # a ring raises it where the machine is too slow
    return {**sample, "seconds": sample["seconds"] / actual, "dilation": actual}
