"""Peer verification: two workers that did not meet in the admission tree verify each other's proofs when they first connect.

A prover with a key endorses its own entry, and every worker has verified that endorsement with the roster. Hardware and
services cannot endorse an entry, so a worker admitted by them is listed because its parent says so. Here each worker presents
the proof that it presented to its parent. The proof covers the entry, and with it the key that the link was opened with. Only
the parent could check the connection on which the proof was first presented.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.binding import PREIMAGE_BYTES, Binding, BindingFields, Role, parse_preimage, proof_digest
from ringfence.admission.entry import Entry
from ringfence.admission.messages import Proof
from ringfence.admission.policy import SIGNING_KINDS, Evidence, Policy, verify
from ringfence.admission.roster import Roster
from ringfence.admission.tree import children_of, parent_of
from ringfence.errors import AdmissionError, ProtocolError

CLOCKS_DIFFER: Final = 300  # seconds between workers' clocks; an expired credential gains at most that much


@dataclass(frozen=True)
class Presentation:
    """A worker's own proof as presented to its parent (rank 0: to a child), with its binding and time."""

    kind: int
    at: int  # seconds since 1970, by the prover's clock
    binding: Binding
    proof: bytes = field(repr=False)

    @classmethod
    def of(cls, presented: tuple[Proof, Binding], at: float) -> Presentation:
        proof, binding = presented
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
    """Whether every worker of the roster has endorsed its own entry, so that no peer verification is needed."""
    return all(kind in SIGNING_KINDS for kind, _ in roster.proofs)


class PeerVerifier:
    """Verifies the proofs of other workers at their first connection, and holds this worker's own presentation.

    It lives as long as the session, so it keeps no key of the policy.

    Credentials are verified once in a session, as of the time when the proof was presented, which was while the run formed.
    `formed` is when that ended, in seconds since 1970, and `join_timeout` how many seconds it may have taken.
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
        self._begin, self._end = formed - join_timeout - CLOCKS_DIFFER, formed + CLOCKS_DIFFER
        self._verified: dict[int, bytes] = {}  # rank: the digest of its presentation
        self.presentation = b"" if presentation is None else presentation.encode()

    def due(self, rank: int) -> bool:
        """Whether this worker and `rank` must verify each other. Both decide from the same roster, so they agree."""
        if rank == self._own or self._own == parent_of(rank) or rank == parent_of(self._own):
            return False
        return not {self._roster.proofs[self._own][0], self._roster.proofs[rank][0]} <= SIGNING_KINDS

    def verified(self, rank: int) -> bool:
        return rank in self._verified

    def verify(self, rank: int, presented: bytes) -> None:
        """Verify what `rank` presents on a link opened with its key in the roster. Raises AdmissionError."""
        digest = hashlib.sha256(presented).digest()
        if self._verified.get(rank) == digest:
            return  # verified already, on a link that the other side opened
        try:
            self._verify(rank, Presentation.decode(presented))
        except ProtocolError as error:
            raise self._refusal(rank, AdmissionError(f"its proof is malformed: {error}")) from error
        except AdmissionError as error:
            raise self._refusal(rank, error) from error
        self._verified[rank] = digest

    def _refusal(self, rank: int, error: AdmissionError) -> AdmissionError:
        parent = parent_of(rank)
        name = "worker 0" if parent is None else f"worker {rank}, which worker {parent} admitted,"
        return error.with_prefix(f"{name} failed peer verification by worker {self._own}: ")

    def _verify(self, rank: int, presentation: Presentation) -> None:
        entry, (kind, digest) = self._roster.entries[rank], self._roster.proofs[rank]
        if presentation.kind != kind:
            raise AdmissionError(f"its proof is of kind {presentation.kind}, where the roster says {kind}")
        if rank and proof_digest(kind, presentation.binding, presentation.proof) != digest:
            raise AdmissionError("its proof is not the one in the roster")
        check_binding(presentation.binding, rank, self._roster.entries)
        if not self._begin <= presentation.at <= self._end:
            raise AdmissionError("its proof was not presented while this run formed: compare the clocks")
        verify(self._policy, Evidence(entry, kind, presentation.proof, presentation.binding, at=presentation.at))


def check_binding(binding: Binding, rank: int, entries: Sequence[Entry]) -> BindingFields:
    """Check that a proof with this binding was made by a worker of the roster, for its parent; by rank 0, for a child.

    It covers the entry, and with it the key that the worker was admitted with. Raises AdmissionError or ProtocolError.
    """
    fields, entry, parent = parse_preimage(binding.preimage), entries[rank], parent_of(rank)
    if parent is not None:
        right = (fields.role, fields.prover, fields.verifier) == (Role.CHILD, rank, parent)
    else:
        right = (fields.role, fields.prover) == (Role.PARENT, 0) and fields.verifier in children_of(0, len(entries))
    if not right:
        raise AdmissionError(
            f"its proof was made by rank {fields.prover} as a {fields.role.name.lower()}, for rank {fields.verifier}"
        )
    if (fields.entry_digest, fields.prover_key) != (entry.digest, entry.tls_key_digest):
        raise AdmissionError("its proof was made for another entry than the one in the roster")
    if fields.verifier_key != entries[fields.verifier].tls_key_digest:
        raise AdmissionError(f"its proof was presented to another worker than rank {fields.verifier} in the roster")
    return fields
