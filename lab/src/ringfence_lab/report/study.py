"""The results of a study as the report reads them: cells with their variants, and the runs that measured them.

The summary layer holds the numbers, and one run for each machine. The raw files name every run with its command and date;
without them the report lacks this. The files may come from another machine or another user, so the type of every value is
checked before it is used in the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from ringfence.errors import ConfigurationError
from ringfence_lab.bench.intervals import MIN_ROUNDS, Interval
from ringfence_lab.bench.names import STAGES
from ringfence_lab.report.runs import Run, json_of, machines_of, runs_in

_SIMULATED: Final = ("dilation", "wall_seconds", "late_seconds")  # columns of simulated variants only


@dataclass(frozen=True)
class Line:
    """One variant in one cell."""

    variant: str
    rounds: int
    seconds: Interval
    cpu_seconds: float
    sent_bytes: float
    ratio: Interval | None  # to the mean of the two Gloo runs of the same round
    stages: Mapping[str, float]  # seconds of one operation or step, mean of the workers; empty where no clock ran
    dilation: float = 1.0  # of simulated time: `seconds` are wall_seconds without it
    wall_seconds: float = 0.0  # 0 where nothing was simulated
    late_seconds: float = 0.0

    @property
    def cores(self) -> float:
        """Cores of the machine that were in use, of a simulated variant."""
        return self.cpu_seconds / self.wall_seconds if self.wall_seconds else 0.0


@dataclass(frozen=True)
class Cell:
    """One point of the grid: the same settings for all its variants. Fields are columns of the summary."""

    name: str
    kind: str
    operation: str | None
    size: int | None
    model: str | None
    strategy: str | None
    device: str | None
    bucket_mb: float | None
    wire: str
    workers: int
    hosts: int
    rate_bits: int | None
    busy: bool
    resolution: float
    scored: bool
    machine: str | None
    source: str | None
    scaled: float = 1.0  # how many times the whole step is as long as what was replayed
    preset: str | None = None  # this and what follows: of simulated GPU TEEs
    changed: str | None = None
    samples: int | None = None
    all_reduces: int | None = None
    load: float | None = None
    host_cores: float | None = None
    lines: dict[str, Line] = field(default_factory=dict)

    @property
    def few(self) -> bool:
        """Whether a variant has too few rounds for the cell to be scored."""
        return any(line.rounds < MIN_ROUNDS for line in self.lines.values())


_TYPES: Final = get_type_hints(Cell)


@dataclass(frozen=True)
class Study:
    """All cells of one machine and one version of the code."""

    cells: tuple[Cell, ...]
    runs: Mapping[str, tuple[Run, ...]]  # by cell
    rows: tuple[Mapping[str, Any], ...]  # the summary rows that the cells were made from
    left_out: int = 0  # cells of other machines or other code

    def runs_of(self, cells: Iterable[Cell]) -> list[Run]:
        """Those that measured any of these cells, in the order of their dates."""
        found = {(run.date, run.command): run for cell in cells for run in self.runs.get(cell.name, ())}
        return [found[key] for key in sorted(found)]

    def dates_of(self, cells: Iterable[Cell]) -> str:
        """The first and the last day on which any of these cells was measured; "" where that is not known."""
        dates = [run.date[:10] for run in self.runs_of(cells)]
        return " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""

    def part(self, keep: Callable[[str], bool]) -> Study:
        """Return the study of the cells of some kinds only."""
        cells = tuple(cell for cell in self.cells if keep(cell.kind))
        rows = tuple(row for row in self.rows if keep(row["kind"]))
        return replace(self, cells=cells, rows=rows)

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of the machine; not every run knows everything."""
        return {name: fact for run in self.runs_of(self.cells) for name, fact in run.machine.items()}


def read(folder: Path) -> Study:
    """The study in a folder; of several machines or versions, the one that was measured or asked for last."""
    rows, machines = _rows(folder / "summary" / "cells.json"), machines_of(folder / "summary" / "machines.json")
    raw = {path.stem: path for path in sorted((folder / "raw").glob("*.jsonl"))}
    cells = _cells(rows)
    found = {name: runs_in(raw[name], cell.machine or "") for name, cell in cells.items() if name in raw}
    known = {name: (machines[cell.machine],) for name, cell in cells.items() if cell.machine in machines}
    measured = {name: each.runs for name, each in found.items() if each.runs}
    return study(rows, {**known, **measured}, {name: each.asked for name, each in found.items()})


def study(
    rows: Iterable[Mapping[str, Any]], runs: Mapping[str, tuple[Run, ...]], asked: Mapping[str, str] | None = None
) -> Study:
    """Cells from summary rows."""
    rows = tuple(rows)
    cells = _cells(rows)
    chosen = _latest(list(cells.values()), runs, asked or {})
    kept = {cell.name for cell in chosen}
    return Study(tuple(chosen), runs, tuple(row for row in rows if row["cell"] in kept), len(cells) - len(chosen))


def _cells(rows: Iterable[Mapping[str, Any]]) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    doubtful: set[str] = set()
    for number, row in enumerate(rows, 1):
        try:
            cells.setdefault(row["cell"], _cell(row)).lines[row["variant"]] = _line(row)
            if not row["scored"] or row["rounds"] < MIN_ROUNDS:
                doubtful.add(row["cell"])
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"row {number} of the summary is not of a study ({type(error).__name__}: {error}); "
                "make it anew from the raw samples with `ringfence study rebuild`"
            ) from error
    return {name: replace(cell, scored=name not in doubtful) for name, cell in cells.items()}


def _latest(cells: list[Cell], runs: Mapping[str, tuple[Run, ...]], asked: Mapping[str, str]) -> list[Cell]:
    """Cells of different machines, or of different code, are never put together."""
    editions: dict[tuple[str | None, str | None], list[Cell]] = {}
    for cell in cells:
        editions.setdefault((cell.machine, cell.source), []).append(cell)

    def age(edition: list[Cell]) -> tuple[str, int]:
        dates = [run.date for cell in edition for run in runs.get(cell.name, ())]
        return max([*dates, *(asked.get(cell.name, "") for cell in edition)]), len(edition)

    return max(editions.values(), key=age, default=[])


def _cell(row: Mapping[str, Any]) -> Cell:
    """No text where a number is due: what stands in a page, or names a file, is what it seems to be."""
    found = {"name": _typed(row["cell"], "cell", str)}
    for column in fields(Cell)[1:-1]:
        value = row[column.name] if column.default is MISSING else row.get(column.name)
        if value is not None or column.default is MISSING:
            found[column.name] = _typed(value, column.name, _TYPES[column.name])
    return Cell(**found)


def _typed(value: Any, name: str, hint: Any) -> Any:
    types = get_args(hint) or (hint,)
    if float in types and value is not None:
        return _number(value)
    if type(value) not in types:
        raise TypeError(f"{name} is {value!r}, not {getattr(hint, '__name__', hint)}")
    return value


def _line(row: Mapping[str, Any]) -> Line:
    spent = {stage: row[f"stage_{stage}"] for stage in STAGES if row.get(f"stage_{stage}") is not None}
    return Line(
        variant=_typed(row["variant"], "variant", str),
        rounds=_typed(row["rounds"], "rounds", int),
        seconds=_interval(row, "seconds"),
        cpu_seconds=_number(row["cpu_seconds"]),
        sent_bytes=_number(row["sent_bytes"]),
        ratio=None if row["ratio"] is None else _interval(row, "ratio"),
        stages={stage: _number(nanoseconds) / 1e9 for stage, nanoseconds in spent.items()},
        **{name: _number(row[name]) for name in _SIMULATED if row.get(name) is not None},
    )


def _interval(row: Mapping[str, Any], name: str) -> Interval:
    return Interval(*(_number(row[column]) for column in (name, f"{name}_low", f"{name}_high")))


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _rows(path: Path) -> list[Mapping[str, Any]]:
    """The summary as JSON: it needs no other package to read."""
    found = json_of(path)
    if found is None:
        raise ConfigurationError(f"{path} is not there: `ringfence study` makes it")
    if not isinstance(found, list) or not found or not all(isinstance(row, dict) for row in found):
        raise ConfigurationError(f"{path} holds no rows: `ringfence study` makes them")
    return found
