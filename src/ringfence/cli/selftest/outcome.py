"""What a worker answers for one check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

RIGHT: Final = "right"
WRONG: Final = "wrong"  # the check ran and its result is not right
ERROR: Final = "error"  # the check raised, so the group may be gone
LOST: Final = "lost"  #   no answer in time, or the process has ended


@dataclass(frozen=True)
class Outcome:
    """The result on one worker: a text for people, values for the tables."""

    state: str
    text: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def right(text: str = "", **values: Any) -> Outcome:
    return Outcome(RIGHT, text, values)


def wrong(text: str, **values: Any) -> Outcome:
    return Outcome(WRONG, text, values)
