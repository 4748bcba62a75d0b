"""Children that refuse this worker: the join ends once every missing child has refused it for good.

Only a child that has proved its identity counts. A child that this worker refuses has not: any peer that reaches the port
could otherwise end a join by claiming to be the missing rank.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Final

from ringfence.errors import AdmissionError
from ringfence.join.parent import REFUSAL_RETRY_SECONDS

_RETRIES_SECONDS: Final = REFUSAL_RETRY_SECONDS - 0.5  # a child that refuses, or is refused, retries for this long
_SILENCE_SECONDS: Final = 3.0  # a child that still runs retries sooner than this


@dataclass(frozen=True)
class _Refusals:
    """The refusals of one child."""

    first: float
    last: float
    text: str

    def is_final(self, now: float) -> bool:
        """Whether the child has retried for as long as it does, and has stopped."""
        return self.last - self.first >= _RETRIES_SECONDS and now - self.last >= _SILENCE_SECONDS


class Refusals:
    """The authenticated children that refuse this worker, by rank."""

    def __init__(self) -> None:
        self._by_rank: dict[int, _Refusals] = {}

    def add(self, rank: int, now: float, text: str) -> None:
        """Record that an authenticated child has refused this worker, for a reason that will not change."""
        known = self._by_rank.get(rank, _Refusals(first=now, last=now, text=text))
        self._by_rank[rank] = replace(known, last=now, text=text)

    def remove(self, rank: int) -> None:
        """Record that the child has admitted this worker after all."""
        self._by_rank.pop(rank, None)

    def check(self, own: int, missing: Set[int], now: float) -> None:
        """Raise AdmissionError once every missing child has refused this worker and stopped retrying."""
        found = [self._by_rank.get(rank) for rank in sorted(missing)]
        final = [each for each in found if each is not None and each.is_final(now)]
        if final and len(final) == len(missing):
            ranks = ", ".join(map(str, sorted(missing)))
            raise AdmissionError(f"rank {own} was not admitted by its children, rank {ranks}: {final[0].text}")
