"""Measures what is missing from the cells of a study, round by round; whatever ends it, the rounds measured so far are kept."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ringfence.bench import machine, names
from ringfence.bench.crew import Crew
from ringfence.bench.measure import rounds_of, seats_for
from ringfence.bench.progress import Progress
from ringfence.bench.samples import Samples
from ringfence.study.cells import Cell, label
from ringfence.study.folder import Folder

# Rooms that are done before anything is timed, or only read what was: samples outlive a change in them.
UNMEASURED: Final = ("admission", "cli", "evidence", "join", "plan", "policy", "report", "study")


class Missing(NamedTuple):
    """A cell, its samples, and how many rounds they lack."""

    cell: Cell
    case: Mapping[str, Any]
    samples: Samples
    rounds: int


def facts() -> dict[str, Any]:
    """This machine, and the code that is measured."""
    return {**machine.facts(), "source": machine.source_digest(without=UNMEASURED)}


def missing(folder: Folder, cells: Sequence[Cell], here: Mapping[str, Any]) -> list[Missing]:
    """Cells that lack rounds on this machine with this code."""
    digest = hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()[:12]
    found = []
    for cell in cells:
        case = {**cell.settings, "machine": digest}
        samples = Samples(folder.raw, f"{cell.name}.jsonl")
        found.append(Missing(cell, case, samples, max(0, cell.rounds - len(samples.rounds(case)))))
    return [each for each in found if each.rounds]


def measure(wanted: Sequence[Missing], here: Mapping[str, Any], command: str) -> None:
    """Measure what is wanted. Cells with the same workers on the same hosts share them: starting workers takes seconds."""
    progress = Progress(sum(each.rounds for each in wanted))
    try:
        together = sorted(wanted, key=lambda each: each.cell.crew)
        for (hosts, rate, workers), group in itertools.groupby(together, key=lambda each: each.cell.crew):
            progress.say(f"starting {workers} workers")
            each_of_them = list(group)
            with seats_for(workers, hosts, rate or None) as seats, Crew(seats, _everyone(each_of_them)) as crew:
                for each in each_of_them:
                    each.samples.begin({**here, **crew.facts}, command, machine.now())
                    _measure(crew, each, progress)
    finally:
        progress.end()


def _everyone(group: Sequence[Missing]) -> list[str]:
    """All contenders that any of the cells has, in one order."""
    named = {name for each in group for name in each.case["contenders"]}
    return [name for name in (*names.CONTENDERS, names.ALONE) if name in named]


def _measure(crew: Crew, wanted: Missing, progress: Progress) -> None:
    what = f"{label(wanted.case)}, {crew.size} workers"
    progress.say(what)
    one = rounds_of(crew, wanted.case, wanted.cell.trace)
    for _ in range(wanted.rounds):
        wanted.samples.add(wanted.case, one(len(wanted.samples.rounds(wanted.case))))
        progress.step(what)
