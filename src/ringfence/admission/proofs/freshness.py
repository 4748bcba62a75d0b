"""How current a signed statement about revoked certificates must be: lists (CRLs) and OCSP responses from files.

Files can be withheld or put back. A statement is refused if its issuer's own date has passed, if it is older than the policy
allows, or if this process has already used a newer one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from ringfence.admission.policy_file.policy_file import duration_text
from ringfence.errors import AdmissionError

CLOCKS_DIFFER: Final = timedelta(minutes=5)  # between this machine and the issuer
REMEMBERED: Final = 1 << 16  # statements whose time is kept


@dataclass(frozen=True)
class Validity:
    """The times of a statement. `number` is that of a CRL, which counts up."""

    start: datetime  # thisUpdate
    end: datetime | None  # nextUpdate
    number: int | None = None

    @property
    def order(self) -> tuple[datetime, int]:
        """The later of two statements of one issuer is the greater one."""
        return self.start, -1 if self.number is None else self.number

    def contradicts(self, other: Validity) -> bool:
        """Whether one of the two is later and has the smaller number."""
        if self.number is None or other.number is None or self.start == other.start:
            return False
        return (self.start < other.start) != (self.number < other.number)

    def objection(self, max_age: int, now: float, key: str) -> str | None:
        """Return why the statement is not current, or None. `key` is the policy's key for `max_age`, in seconds."""
        moment = datetime.fromtimestamp(now, UTC)
        if moment + CLOCKS_DIFFER < self.start:
            return f"is dated {_text(self.start)}, and it is {_text(moment)}: check the clock of this machine"
        if self.end is not None and moment > self.end:
            return f"expired at {_text(self.end)}"
        if moment > self.start + timedelta(seconds=max_age):
            return f"was issued at {_text(self.start)}, more than {duration_text(max_age)} ago ({key})"
        return None


class Memory:
    """The times of the newest statements that this process has used, by issuer and subject matter.

    Only statements whose signature was verified are recorded.
    """

    def __init__(self) -> None:
        self._newest: dict[Hashable, Validity] = {}

    def check(self, about: Hashable, found: Validity, what: str) -> None:
        """Record a statement. Raises AdmissionError if a newer one was recorded before; `what` names it."""
        known = self._newest.pop(about, None)
        newest = found if known is None or found.order >= known.order else known
        self._newest[about] = newest
        if len(self._newest) > REMEMBERED:
            del self._newest[next(iter(self._newest))]
        if newest is not found:
            raise AdmissionError(
                f"{what} was rolled back: it is of {_text(found.start)}, and this process has used one of "
                f"{_text(newest.start)}. Put the newest one back",
                to_peer=f"{what} on this machine is older than one it has used before",
            )


PROCESS: Final = Memory()


def age_text(validity: Validity, now: float) -> str:
    """Return how long ago a statement was issued, such as "3 h ago"."""
    seconds = max(0, int(now - validity.start.timestamp()))
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"


def _text(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
