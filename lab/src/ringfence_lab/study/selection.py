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


def case_of(file: Path) -> Case | None:
    """Return the settings of the selected rounds, or None if there is no round.

    An invalid line selects nothing: reading the whole file reports it.
    """
    found: dict[str, bytes] = {}  # the last line that names each
    if file.exists():
        with file.open("rb") as lines:
            for line in lines:
                field = NOTE if f'"{NOTE}"'.encode() in line else "case"
                if line.endswith(b"\n") and f'"{field}"'.encode() in line:
                    found[field] = line
    for field, line in sorted(found.items(), reverse=True):  # "shown" before "case"
        try:
            case: Case | None = json.loads(line).get(field)
        except (ValueError, AttributeError):
            return None
        return case
    return None


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
