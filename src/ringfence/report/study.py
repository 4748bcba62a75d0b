"""What a study found, as the report reads it: cells with their contenders, and who measured them, when and how.

The summary layer holds the numbers, and one run for each machine. The raw files name every run with its command and date;
without them the report is made all the same, and says less.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ringfence.bench.intervals import Interval
from ringfence.bench.names import BASELINE
from ringfence.errors import ConfigurationError

STAGES: Final = ("seal", "open", "lock", "reduce", "send", "receive", "wait")
SETTINGS: Final = (
    "kind", "operation", "size", "model", "strategy", "device", "bucket_mb", "wire", "workers", "hosts", "rate_bits", "busy",
)  # fmt: skip
_NUMBERS: Final = ("seconds", "seconds_low", "seconds_high", "cpu_seconds", "sent_bytes", "resolution")


@dataclass(frozen=True)
class Line:
    """One contender in one cell."""

    contender: str
    rounds: int
    seconds: Interval
    cpu_seconds: float
    sent_bytes: float
    ratio: Interval | None  # to the mean of the two Gloo runs of the same round
    stages: Mapping[str, float]  # seconds of one operation or step, mean of the workers; empty where no clock ran


@dataclass(frozen=True)
class Cell:
    """One point of the grid: the same settings for all its contenders."""

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
    machine: str
    source: str
    scaled: float = 1.0
    lines: dict[str, Line] = field(default_factory=dict)

    @property
    def gloo(self) -> Interval | None:
        """Plaintext Gloo's time: the mean of its two runs."""
        both = [self.lines[name].seconds for name in BASELINE if name in self.lines]
        if not both:
            return None
        low, median, high = (sum(getattr(one, end) for one in both) / len(both) for end in ("low", "median", "high"))
        return Interval(median, low, high)


@dataclass(frozen=True)
class Run:
    """Who measured: one start of the study."""

    command: str
    date: str
    machine: Mapping[str, Any]


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

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of the machine; not every run knows everything."""
        return {name: fact for run in self.runs_of(self.cells) for name, fact in run.machine.items()}


def read(folder: Path) -> Study:
    """The study in a folder; of several machines or versions, the one that was measured last."""
    rows, machines = _rows(folder / "summary" / "cells.json"), _machines(folder / "summary" / "machines.json")
    known = {row["cell"]: (machines[row["machine"]],) for row in rows if row.get("machine") in machines}
    runs = {path.stem: tuple(_runs(path)) for path in sorted((folder / "raw").glob("*.jsonl"))}
    return study(rows, {**known, **runs})


def study(rows: Iterable[Mapping[str, Any]], runs: Mapping[str, tuple[Run, ...]]) -> Study:
    """Cells from summary rows."""
    rows = tuple(rows)
    cells: dict[str, Cell] = {}
    for number, row in enumerate(rows):
        try:
            cell = cells.setdefault(row["cell"], _cell(row))
            cell.lines[row["contender"]] = _line(row)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"row {number + 1} of the summary is not of a study ({type(error).__name__}: {error}); "
                "make it anew from the raw samples with `ringfence study`"
            ) from error
    chosen = _latest(list(cells.values()), runs)
    kept = {cell.name for cell in chosen}
    return Study(tuple(chosen), runs, tuple(row for row in rows if row["cell"] in kept), len(cells) - len(chosen))


def _latest(cells: list[Cell], runs: Mapping[str, tuple[Run, ...]]) -> list[Cell]:
    """Cells of different machines, or of different code, are never put together."""
    editions: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        editions.setdefault((cell.machine, cell.source), []).append(cell)

    def age(edition: list[Cell]) -> tuple[str, int]:
        return max((run.date for cell in edition for run in runs.get(cell.name, ())), default=""), len(edition)

    return max(editions.values(), key=age, default=[])


def _cell(row: Mapping[str, Any]) -> Cell:
    settings = {name: row[name] for name in SETTINGS}
    return Cell(
        name=row["cell"],
        **settings,
        resolution=_number(row["resolution"]),
        scored=bool(row["scored"]),
        machine=row["machine"] or "",
        source=row["source"] or "",
        scaled=float(row.get("scaled") or 1.0),
    )


def _line(row: Mapping[str, Any]) -> Line:
    stages = {stage: row[f"stage_{stage}"] for stage in STAGES if row.get(f"stage_{stage}") is not None}
    numbers = {name: _number(row[name]) for name in _NUMBERS}
    return Line(
        contender=row["contender"],
        rounds=int(row["rounds"]),
        seconds=Interval(numbers["seconds"], numbers["seconds_low"], numbers["seconds_high"]),
        cpu_seconds=numbers["cpu_seconds"],
        sent_bytes=numbers["sent_bytes"],
        ratio=None if row["ratio"] is None else Interval(row["ratio"], row["ratio_low"], row["ratio_high"]),
        stages={stage: spent / 1e9 for stage, spent in stages.items()},
    )


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or value != value:
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _rows(path: Path) -> list[Mapping[str, Any]]:
    """The summary as JSON: it needs no other package to read."""
    found = _json(path)
    if found is None:
        raise ConfigurationError(f"{path} is not there: `ringfence study` makes it")
    if not isinstance(found, list) or not found or not all(isinstance(row, dict) for row in found):
        raise ConfigurationError(f"{path} holds no rows: `ringfence study` makes them")
    return found


def _machines(path: Path) -> dict[str, Run]:
    """The first run on each machine."""
    found = _json(path) or {}
    return {name: Run(facts.pop("command"), facts.pop("date"), facts) for name, facts in found.items()}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path} ({error}): `ringfence study` makes it anew") from error


def _runs(path: Path) -> Iterator[Run]:
    """The lines of a raw file that say who measured. Samples are passed over unread: they are many."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if '"case"' in line[:64] or not line.endswith("\n"):
                continue
            record = json.loads(line)
            if "machine" in record:
                yield Run(record["command"], record["date"], record["machine"])
