"""Children that refuse this worker: when all that are missing have refused it for good, waiting is of no use.

Only a child that has proved which worker it is counts. One that this worker refuses has not: whoever reaches the port could end
a join by pretending to be the one that is missing.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from ringfence.errors import AdmissionError
from ringfence.join.parent import PATIENCE_SECONDS

_RETRIES_SECONDS: Final = (
    PATIENCE_SECONDS - 0.5
)  # a child that is refused, or refuses, tries again for this long; then it ends
_SILENCE_SECONDS: Final = 3.0  # a child that has not ended tries again sooner


class Refusals:
    """By rank: the first and the last time that it refused, and its words."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float, str]] = {}

    def add(self, rank: int, now: float, text: str) -> None:
        """An authenticated child has refused this worker, for a reason that will not change."""
        first = self._known[rank][0] if rank in self._known else now
        self._known[rank] = (first, now, text)

    def end(self, rank: int) -> None:
        """It has admitted this worker after all."""
        self._known.pop(rank, None)

    def check(self, own: int, missing: Set[int], now: float) -> None:
        """Raises AdmissionError once every missing child has refused for as long as it tries, and tries no more."""
        found = [self._known.get(rank) for rank in sorted(missing)]
        final = [each for each in found if each and _ended(each[0], each[1], now)]
        if final and len(final) == len(missing):
            ranks = ", ".join(map(str, sorted(missing)))
            raise AdmissionError(f"rank {own} was not admitted by its children, rank {ranks}: {final[0][2]}")


def _ended(first: float, last: float, now: float) -> bool:
    return last - first >= _RETRIES_SECONDS and now - last >= _SILENCE_SECONDS
