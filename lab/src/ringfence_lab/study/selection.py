"""The selection of rounds that the layers use, if a raw file has those of several machines or versions of the measured code.

The selection is recorded in the raw file, so that the layers follow from raw samples alone:

    {"run": id, "shown": case}                    the rounds of this case, whatever rounds come after
    {"run": id, "shown": case, "date": "…"}       the same, because a study under these circumstances was complete then

The last record is valid; without one, the last round is. A study records the current selection before it adds the first round
of other circumstances, and its own when all its rounds exist: if it is stopped in between, the selection stays.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from ringfence_lab.bench.samples import Case, append, key

NOTE: Final = "shown"
_TAIL: Final = 1 << 16


def case_of(file: Path) -> Case | None:
    """Return the settings of the selected rounds, or None if there is no round."""
    if not file.exists():
        return None
    noted = _noted(file)
    return _last_case(file) if noted is None else noted


def others(file: Path, case: Case) -> bool:
    """Return whether rounds with other settings than `case` are selected."""
    now = case_of(file)
    return now is not None and key(now) != key(case)


def hold(file: Path, run: str, case: Case) -> None:
    """Keep the current selection while rounds of `case` are added."""
    if others(file, case):
        append(file, {"run": run, NOTE: case_of(file)})


def show(file: Path, run: str, case: Case, date: str) -> bool:
    """Select the rounds of `case`; return whether that is a change."""
    changes = others(file, case)
    if changes:
        append(file, {"run": run, NOTE: case, "date": date})
    return changes


def _noted(file: Path) -> Case | None:
    found: Case | None = None
    mark = f'"{NOTE}"'.encode()
    with file.open("rb") as lines:
        for line in lines:
            if mark in line and line.endswith(b"\n"):
                found = _field(line, NOTE) or found
    return found


def _last_case(file: Path) -> Case | None:
    """Return the settings of the last round in a file without reading all of it."""
    size, length = file.stat().st_size, _TAIL
    while True:
        with file.open("rb") as lines:
            start = max(0, size - length)
            lines.seek(start)
            found = lines.read(size - start).split(b"\n")[:-1]
        for line in reversed(found if start == 0 else found[1:]):
            case = _field(line, "case")
            if case is not None:
                return case
        if start == 0:
            return None
        length *= 4


def _field(line: bytes, name: str) -> Case | None:
    """Return the value of a field of a line, or None if the line is invalid: reading the whole file reports it."""
    try:
        found: Case | None = json.loads(line).get(name)
    except (ValueError, AttributeError):
        return None
    return found
