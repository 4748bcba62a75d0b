"""Peer verification: two workers of one roster that never met in the tree verify each other by what each showed to its parent.

A key that can sign endorses its own entry, and everybody has verified that with the roster. Hardware and services sign
nothing but what they were made for, so an entry by such a proof stood on the word of the parent that passed it on. Here it
stands on the proof itself: it covers the entry, and with it the key that the link was opened with. What nobody but the
parent could check is the connection on which it was first shown.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.binding import PREIMAGE_BYTES, Binding, Bound, Role, proof_digest, read_preimage
from ringfence.admission.messages import Proof
from ringfence.admission.policy import SIGNING_KINDS, Evidence, Policy, verify
from ringfence.admission.roster import Roster
from ringfence.admission.tree import children_of, parent_of
from ringfence.errors import AdmissionError, ProtocolError

_CLOCKS_DIFFER: Final = 300  # seconds; nobody gains more by it than that much of a credential


@dataclass(frozen=True)
class Presentation:
    """A worker's own proof, as it was shown to its parent (rank 0: to a child), what it covers, and when that was."""

    kind: int
    at: int  # seconds since 1970, by its maker's clock
    binding: Binding
    proof: bytes = field(repr=False)

    @classmethod
    def of(cls, shown: tuple[Proof, Binding], at: float) -> Presentation:
        proof, binding = shown
        return cls(proof.kind, int(at), binding, proof.proof)

    def encode(self) -> bytes:
        fixed = encoding.number(self.kind, 1) + encoding.number(self.at, 8) + self.binding.preimage
        return fixed + encoding.blob(self.proof)

    @classmethod
    def decode(cls, data: bytes) -> Presentation:
        reader = encoding.Reader(data)
        kind, at = reader.number(1), reader.number(8)
        binding, proof = Binding(reader.take(PREIMAGE_BYTES)), reader.blob(keys.PROOF_LIMIT_BYTES)
        reader.end()
        return cls(kind, at, binding, proof)


def all_sign(roster: Roster) -> bool:
    """Whether nobody of this roster is to be verified at peer verification."""
    return all(kind in SIGNING_KINDS for kind, _ in roster.proofs)


class PeerVerifier:
    """Whom this worker has yet to verify at peer verification, and what it shows them itself.

    It lives as long as the run, so it keeps no key of the policy.

    Credentials are verified once a session: a proof counts as of when it was shown, and that was while the run formed. So
    `formed` says when that ended, and `join_timeout` how long it may have taken, in seconds.
    """

    def __init__(
        self,
        policy: Policy,
        roster: Roster,
        own: int,
        presentation: Presentation | None,
        formed: float,
        join_timeout: float,
    ) -> None:
        self._policy = policy.without_keys()
        self._roster = roster
        self._own = own
        self._begin, self._end = formed - join_timeout - _CLOCKS_DIFFER, formed + _CLOCKS_DIFFER
        self._verified: dict[int, bytes] = {}  # rank: the digest of what it showed
        self.presentation = b"" if presentation is None else presentation.encode()

    def due(self, rank: int) -> bool:
        """Whether these two must show each other their proofs. Both read it off the same roster, so both say the same."""
        if rank == self._own or self._own == parent_of(rank) or rank == parent_of(self._own):
            return False
        return not {self._roster.proofs[self._own][0], self._roster.proofs[rank][0]} <= SIGNING_KINDS

    def verified(self, rank: int) -> bool:
        return rank in self._verified

    def verify(self, rank: int, shown: bytes) -> None:
        """`rank`, which has opened a link with its rostered key, shows this. AdmissionError: it does not belong here."""
        digest = hashlib.sha256(shown).digest()
        if self._verified.get(rank) == digest:
            return  # each of two workers dials the other one day
        try:
            self._verify(rank, Presentation.decode(shown))
        except ProtocolError as error:
            raise self._refusal(rank, AdmissionError(f"it cannot be read: {error}")) from error
        except AdmissionError as error:
            raise self._refusal(rank, error) from error
        self._verified[rank] = digest

    def _refusal(self, rank: int, error: AdmissionError) -> AdmissionError:
        parent = parent_of(rank)
        who = "worker 0" if parent is None else f"worker {rank}, which worker {parent} let in,"
        return error.within(
            f"{who} does not belong to this run: at peer verification with worker {self._own} it shows a proof, and "
        )

    def _verify(self, rank: int, presentation: Presentation) -> None:
        entry, (kind, digest) = self._roster.entries[rank], self._roster.proofs[rank]
        bound = read_preimage(presentation.binding.preimage)
        if presentation.kind != kind:
            raise AdmissionError(f"it is of kind {presentation.kind}, where the roster says {kind}")
        if rank and proof_digest(kind, presentation.binding, presentation.proof) != digest:
            raise AdmissionError("it is not the one that the roster lists")
        self._check_place(rank, bound)
        if (bound.entry_digest, bound.prover_key) != (entry.digest, entry.tls_key_digest):
            raise AdmissionError("it was made for another entry than the one in the roster")
        if bound.verifier_key != self._roster.entries[bound.verifier].tls_key_digest:
            raise AdmissionError(f"it was shown to another worker than rank {bound.verifier} in the roster")
        if not self._begin <= presentation.at <= self._end:
            raise AdmissionError("it was not shown while this run formed: compare the clocks")
        verify(self._policy, Evidence(entry, kind, presentation.proof, presentation.binding, at=presentation.at))

    def _check_place(self, rank: int, bound: Bound) -> None:
        """Everybody shows what it showed to its parent; rank 0, which has none, what it showed to a child."""
        parent = parent_of(rank)
        if parent is not None:
            right = (bound.role, bound.prover, bound.verifier) == (Role.CHILD, rank, parent)
        else:
            children = children_of(0, len(self._roster.entries))
            right = (bound.role, bound.prover) == (Role.PARENT, 0) and bound.verifier in children
        if not right:
            raise AdmissionError(
                f"it was made by rank {bound.prover} as a {bound.role.name.lower()}, for rank {bound.verifier}"
            )
