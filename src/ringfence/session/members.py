"""The members of a session that some workers of a run form: their ranks, and the name of the run that they are admitted to.

The name covers the ranks and the group for which the session was opened, so workers of different sets of members refuse
each other at admission (spec/admission.md, "The run of a group").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ringfence import keys

_RUN_ID_CHARACTERS: Final = 88  # of the run id that the name keeps, for messages: the digest covers all of it
_DIGEST_BYTES: Final = 16
_RANKS_NAMED: Final = 16


@dataclass(frozen=True)
class Members:
    """The members of one session, by their ranks in the default group."""

    ranks: tuple[int, ...]  # ascending: worker r of the session is ranks[r]
    group: str  #             the name of the first process group of the session

    def digest(self, run_id: str) -> bytes:
        """Return the digest that identifies the session's set of members within a run."""
        ranks = b"".join(rank.to_bytes(4, "big") for rank in self.ranks)
        return keys.digest(keys.MEMBERS, run_id.encode(), self.group.encode(), ranks)[:_DIGEST_BYTES]

    def run_name(self, run_id: str) -> str:
        """Return the run id for the admission of these members."""
        return f"{run_id[:_RUN_ID_CHARACTERS]} group {self.digest(run_id).hex()}"

    def file_label(self, rank: int, run_id: str) -> str:
        """Return what distinguishes the files of this session on the worker with this rank of the session."""
        return f"{self.ranks[rank]}-{self.digest(run_id)[:4].hex()}"

    def __str__(self) -> str:
        named = ", ".join(map(str, self.ranks[:_RANKS_NAMED]))
        return f"ranks {named}{', ...' if len(self.ranks) > _RANKS_NAMED else ''}"
