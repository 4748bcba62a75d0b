"""The results of a study as the report reads them: cells with their variants, and the machine that measured them.

The files may come from another machine or another user, so the type of every value is checked before it is used in the page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from ringfence.errors import ConfigurationError
from ringfence_lab.bench.intervals import MIN_ROUNDS, Interval
from ringfence_lab.bench.names import STAGES

_SIMULATED: Final = ("dilation", "wall_seconds", "late_seconds")  # columns of simulated variants only


@dataclass(frozen=True)
class CellVariant:
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
class CellSummary:
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
    lines: dict[str, CellVariant] = field(default_factory=dict)

    @property
    def few(self) -> bool:
        """Whether a variant has too few rounds for the cell to be scored."""
        return any(line.rounds < MIN_ROUNDS for line in self.lines.values())


_TYPES: Final = get_type_hints(CellSummary)


@dataclass(frozen=True)
class Study:
    """All cells of one machine and one version of the code."""

    cells: tuple[CellSummary, ...]
    facts: Mapping[str, Any]  # what is known of the machine
    rows: tuple[Mapping[str, Any], ...]  # the summary rows that the cells were made from
    command: str = ""  # that measured first, and the first and the last day; "" where that is not known
    dates: tuple[str, str] = ("", "")
    left_out: int = 0  # cells of other machines or other code

    @property
    def days(self) -> str:
        """The first and the last day on which anything was measured; "" where that is not known."""
        return " to ".join(dict.fromkeys(date[:10] for date in self.dates if date))

    def part(self, keep: Callable[[str], bool]) -> Study:
        """Return the study of the cells of some kinds only."""
        cells = tuple(cell for cell in self.cells if keep(cell.kind))
        rows = tuple(row for row in self.rows if keep(row["kind"]))
        return replace(self, cells=cells, rows=rows)


def read(folder: Path) -> Study:
    """The study in a folder; of several machines or versions, the one that was measured or asked for last."""
    return study(_rows(folder / "summary" / "cells.json"), _machines(folder / "summary" / "machines.json"))


def study(rows: Iterable[Mapping[str, Any]], machines: Mapping[str, Mapping[str, Any]]) -> Study:
    """Cells from summary rows. `machines`: the facts of each machine, with the `command` and the dates of its runs."""
    rows = tuple(rows)
    cells = _cells(rows)
    chosen = _latest(list(cells.values()), machines)
    kept = {cell.name for cell in chosen}
    about = machines.get(chosen[0].machine or "", {}) if chosen else {}
    return Study(
        cells=tuple(chosen),
        facts={name: fact for name, fact in about.items() if name not in ("command", "date", "last_date")},
        rows=tuple(row for row in rows if row["cell"] in kept),
        command=about.get("command", ""),
        dates=(about.get("date", ""), about.get("last_date", about.get("date", ""))),
        left_out=len(cells) - len(chosen),
    )


def _cells(rows: Iterable[Mapping[str, Any]]) -> dict[str, CellSummary]:
    cells: dict[str, CellSummary] = {}
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


def _latest(cells: list[CellSummary], machines: Mapping[str, Mapping[str, Any]]) -> list[CellSummary]:
    """Cells of different machines, or of different code, are never put together."""
    editions: dict[tuple[str | None, str | None], list[CellSummary]] = {}
    for cell in cells:
        editions.setdefault((cell.machine, cell.source), []).append(cell)

    def age(edition: list[CellSummary]) -> tuple[str, int]:
        about = machines.get(edition[0].machine or "", {})
        return about.get("last_date", about.get("date", "")), len(edition)

    return max(editions.values(), key=age, default=[])


def _cell(row: Mapping[str, Any]) -> CellSummary:
    """No text where a number is due: what stands in a page, or names a file, is what it seems to be."""
    found = {"name": _typed(row["cell"], "cell", str)}
    for column in fields(CellSummary)[1:-1]:
        value = row[column.name] if column.default is MISSING else row.get(column.name)
        if value is not None or column.default is MISSING:
            found[column.name] = _typed(value, column.name, _TYPES[column.name])
    return CellSummary(**found)


def _typed(value: Any, name: str, hint: Any) -> Any:
    types = get_args(hint) or (hint,)
    if float in types and value is not None:
        return _number(value)
    if type(value) not in types:
        raise TypeError(f"{name} is {value!r}, not {getattr(hint, '__name__', hint)}")
    return value


def _line(row: Mapping[str, Any]) -> CellVariant:
    spent = {stage: row[f"stage_{stage}"] for stage in STAGES if row.get(f"stage_{stage}") is not None}
    return CellVariant(
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
    found = _json_of(path)
    if found is None:
        raise ConfigurationError(f"{path} is not there: `ringfence study` makes it")
    if not isinstance(found, list) or not found or not all(isinstance(row, dict) for row in found):
        raise ConfigurationError(f"{path} holds no rows: `ringfence study` makes them")
    return found


def _machines(path: Path) -> dict[str, dict[str, Any]]:
    """Return the facts of each machine; nothing where the file is not there."""
    found = _json_of(path) or {}
    texts = ("command", "date")
    if not isinstance(found, dict) or not all(
        isinstance(facts, dict) and all(isinstance(facts.get(name), str) for name in texts) for facts in found.values()
    ):
        raise ConfigurationError(
            f"{path} describes no machines, each with the text of a command and a date: `ringfence study rebuild` makes it anew"
        )
    return found


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path} ({error}): `ringfence study rebuild` makes it anew") from error
