"""The result of one check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Value = str | int | bool | list[str] | dict[str, float] | None


@dataclass(frozen=True)
class Check:
    """One finding. `good` is None for a fact that is neither good nor bad; `fix` is the command or change that repairs it."""

    name: str
    text: str
    value: Value
    good: bool | None = None
    fix: str = ""


def bad(checks: Iterable[Check]) -> list[Check]:
    """Return the findings that prevent a run."""
    return [check for check in checks if check.good is False]
