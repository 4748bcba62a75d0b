"""Describes what a join waits for: in warnings while it waits, and in the error at its deadline."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.entry import Entry, format_address
from ringfence.admission.tree import Tree
from ringfence.session.join.parent import ParentSearch

_log = logging.getLogger(__name__)

FIRST_WARNING: Final = 15.0  # seconds; longer than any attempt of an unauthenticated peer without evidence
NEXT_WARNING: Final = 60.0
_RANKS_NAMED: Final = 16


@dataclass(frozen=True)
class Deadline:
    """When a join must have finished."""

    timeout: float  # seconds, as configured
    at: float  #       on the clock of time.monotonic()

    def elapsed(self, now: float) -> float:
        return self.timeout - (self.at - now)


class Diagnostics:
    """Collects why workers were refused, and describes the state of a join."""

    def __init__(self, entry: Entry, tree: Tree, deadline: Deadline, now: float) -> None:
        self.address = (entry.host, entry.port)  # where others dial this worker
        self.warn_at = now + FIRST_WARNING
        self._entry = entry
        self._tree = tree
        self._deadline = deadline
        self._refused: dict[int, str] = {}  # by claimed rank; under this worker's own rank: why it has no proof

    def record_refusal(self, rank: int, text: str) -> None:
        """Record why a worker that claims `rank` was refused, or refused this one. Logs it once for each rank.

        An unauthenticated peer must not be able to fill the log.
        """
        if rank not in self._refused:
            _log.warning("rank %d, joining, %s", self._entry.rank, text)
        self._refused[rank] = text

    def record_no_proof(self, error: Exception) -> None:
        """Record why this worker could not collect a proof. Logs it once."""
        text = f"could not collect a proof: {encoding.escape(str(error), keys.REFUSAL_TEXT_BYTES)}"
        if self._entry.rank not in self._refused:
            _log.warning("rank %d, joining, %s; it will try again", self._entry.rank, text)
        self._refused[self._entry.rank] = text

    def warn_if_due(self, now: float, search: ParentSearch | None, *, complete: bool) -> None:
        """Log what the join waits for. With all neighbours (`complete`), only rank 0 does: a thousand workers need not."""
        if now < self.warn_at:
            return
        self.warn_at = now + NEXT_WARNING
        if self._entry.rank == 0 or not complete:
            state = f"has not formed after {self._deadline.elapsed(now):.0f} of {self._deadline.timeout:g} s"
            _log.warning("%s", self._describe(now, search, state))

    def timeout_message(self, now: float, search: ParentSearch | None) -> str:
        """The text of the error at the deadline."""
        limit = "the shorter of RINGFENCE_JOIN_TIMEOUT and torch's timeout"
        return self._describe(now, search, f"did not form within {self._deadline.timeout:g} s ({limit})")

    def _describe(self, now: float, search: ParentSearch | None, state: str) -> str:
        reasons = _reasons(self._entry, self._tree, search, self._refused, now)
        parts = [*reasons, f"rank {self._entry.rank} itself is at {format_address(self.address)}"]
        if not self._cause_is_known(search):
            parts.append(
                "check that all workers run, have the same RINGFENCE_RUN_ID and RINGFENCE_GENERATION, hold the same secret or "
                "policy and can reach each other (RINGFENCE_INTERFACE)"
            )
        return f"{run_name(self._entry.run_id, self._entry.generation)}, {state}; {'; '.join(parts)}"

    def _cause_is_known(self, search: ParentSearch | None) -> bool:
        ranks, count = _missing(self._tree)
        awaited = [search.parent] if search is not None else ranks if len(ranks) == count else []
        return self._entry.rank in self._refused or bool(awaited and self._refused.keys() >= set(awaited))


def run_name(run_id: str, generation: str) -> str:
    return f"run '{run_id}', generation {generation}"


def _missing(tree: Tree) -> tuple[list[int], int]:
    """The missing ranks as far as they are known, and how many are missing."""
    waiting = tree.waiting
    ranks = list(waiting.ranks) if waiting else tree.missing()
    return ranks, waiting.missing if waiting else len(ranks)


def _reasons(
    entry: Entry, tree: Tree, search: ParentSearch | None, refused: Mapping[int, str], now: float
) -> list[str]:
    """Which workers are missing, and why, as far as this worker knows."""
    ranks, count = _missing(tree)
    parts = []
    if search is not None:
        parts.append(f"rank {entry.rank} did not reach its parent, rank {search.parent}: {search.problem(now)}")
    if count:
        named = ", ".join(map(str, ranks[:_RANKS_NAMED])) + (", ..." if count > _RANKS_NAMED else "")
        parts.append(f"{count} of {entry.world_size} workers are missing: rank {named}")
    elif search is None:
        parts.append(tree.awaited())
    return parts + [f"rank {entry.rank} {text}" for _, text in sorted(refused.items())]
