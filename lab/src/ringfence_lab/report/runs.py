"""The runs of a study: the machine, date and command of each, read from the raw files and the summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ringfence.errors import ConfigurationError


@dataclass(frozen=True)
class Run:
    """One start of the study."""

    command: str
    date: str
    machine: Mapping[str, Any]


class RawRuns(NamedTuple):
    """The runs of one raw file."""

    runs: tuple[Run, ...] = ()  # that measured any round of the cell
    asked: str = ""  # when a study last selected these rounds instead of others


def machines_of(path: Path) -> dict[str, Run]:
    """Return the first run on each machine."""
    found = json_of(path) or {}
    try:
        return {
            name: _run({**facts, "machine": {key: facts[key] for key in facts if key not in ("command", "date")}})
            for name, facts in found.items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigurationError(
            f"{path} describes no machines ({why}): `ringfence study rebuild` makes it anew"
        ) from error


def json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path} ({error}): `ringfence study rebuild` makes it anew") from error


def runs_in(path: Path, machine: str) -> RawRuns:
    """Return the runs that measured rounds on this machine; a raw file may also contain rounds of other machines."""
    begun: dict[str, Run] = {}
    used: set[str] = set()
    asked = ""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break  # it was being written when its study was killed
            try:
                record = json.loads(line)
                if "case" in record:
                    if record["case"]["machine"] == machine:
                        used.add(record["run"])
                elif "shown" in record:
                    if record["shown"]["machine"] == machine:
                        asked = max(asked, record.get("date", ""))
                else:
                    begun[record["run"]] = _run(record)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"{path}, line {number}: no line of a study ({type(error).__name__}: {error}); move the file away"
                ) from error
    return RawRuns(tuple(run for name, run in begun.items() if name in used), asked)


def _run(record: Mapping[str, Any]) -> Run:
    command, date, machine = record["command"], record["date"], record["machine"]
    if not (isinstance(command, str) and isinstance(date, str) and isinstance(machine, dict)):
        raise TypeError("command and date are text, and machine is a table of facts")
    return Run(command, date, machine)
