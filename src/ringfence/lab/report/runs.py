"""Who measured, when and with which command: what the raw files and the summary say of a study's runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ringfence.errors import ConfigurationError


@dataclass(frozen=True)
class Run:
    """Who measured: one start of the study."""

    command: str
    date: str
    machine: Mapping[str, Any]


class Told(NamedTuple):
    """What a raw file says of the rounds that a cell shows."""

    runs: tuple[Run, ...] = ()  # that measured any of them
    asked: str = ""  # when a study last asked for these in the place of others


def machines_of(path: Path) -> dict[str, Run]:
    """The first run on each machine."""
    found = json_of(path) or {}
    try:
        return {
            name: _run(
                {**facts, "machine": {key: fact for key, fact in facts.items() if key not in ("command", "date")}}
            )
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


def told_by(path: Path, machine: str) -> Told:
    """Who measured the rounds of this machine. A raw file may hold those of others, whose runs are not ours to name."""
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
    return Told(tuple(run for name, run in begun.items() if name in used), asked)


def _run(record: Mapping[str, Any]) -> Run:
    command, date, machine = record["command"], record["date"], record["machine"]
    if not (isinstance(command, str) and isinstance(date, str) and isinstance(machine, dict)):
        raise TypeError("command and date are text, and machine is a table of facts")
    return Run(command, date, machine)
