"""Renewal: during a session, neighbours in the admission tree verify each other again (spec/admission.md, Verification again).

    verifier   Challenge (fresh) ──────────►  prover
               ◄───────────────────  Renewal   a fresh proof over this challenge, connection and roster

A worker that the shared secret alone admitted is not asked: a secret cannot be revoked.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar, Final

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.binding import Binding, Role
from ringfence.admission.entry import Entry
from ringfence.admission.messages import Proof
from ringfence.admission.policy import INSTANT_KINDS, Evidence, Policy, verify
from ringfence.admission.roster import Roster
from ringfence.admission.tree import parent_of
from ringfence.errors import AdmissionError

RENEWAL_BYTES: Final = 1 + 4 + keys.PROOF_LIMIT_BYTES


@dataclass(frozen=True)
class Challenge:
    """Asks a neighbour to prove itself again."""

    TYPE: ClassVar[int] = 34

    nonce: bytes

    def body(self) -> bytes:
        return self.nonce

    @classmethod
    def read(cls, reader: encoding.Reader) -> Challenge:
        return cls(reader.take(keys.NONCE_BYTES))


@dataclass(frozen=True)
class Renewal(Proof):
    """The sender's fresh proof, over the binding of the receiver's last challenge."""

    TYPE: ClassVar[int] = 35


def bind_renewal(prover: Entry, verifier: Entry, roster_digest: bytes, exporter: bytes, nonce: bytes) -> Binding:
    """Return what a renewal's proof covers: one challenge on one connection of the tree, in one direction, in one session."""
    role = Role.CHILD if parent_of(prover.rank) == verifier.rank else Role.PARENT
    return Binding(
        b"".join(
            (
                keys.RENEWAL_BINDING,
                encoding.number(role, 1),
                encoding.number(prover.rank, 4),
                encoding.number(verifier.rank, 4),
                prover.digest,
                prover.tls_key_digest,
                verifier.tls_key_digest,
                roster_digest,
                hashlib.sha256(exporter).digest(),
                nonce,
            )
        )
    )


class Renewals:
    """What a worker's renewals are bound to: its roster, and the connection and the challenge of each."""

    def __init__(self, roster: Roster, own: int) -> None:
        self._roster = roster
        self.own = own

    def due(self, rank: int) -> bool:
        """Whether a worker was admitted by something that can be revoked or expire."""
        return self._roster.proofs[rank][0] not in INSTANT_KINDS

    def own_binding(self, verifier: int, exporter: bytes, nonce: bytes) -> Binding:
        """Return what this worker's proof must cover. `exporter` is that of its connection to the verifier."""
        entries = self._roster.entries
        return bind_renewal(entries[self.own], entries[verifier], self._roster.digest, exporter, nonce)

    def verify(self, policy: Policy, rank: int, exporter: bytes, nonce: bytes, renewal: Renewal) -> None:
        """Verify a neighbour's answer to a challenge by the policy of now. Raises AdmissionError."""
        kind, before = self._roster.proofs[rank][0], self._roster.admitted[rank]
        if renewal.kind != kind:
            raise AdmissionError(f"it presents a proof of kind {renewal.kind}, and was admitted by one of kind {kind}")
        own = self._roster.entries[self.own]
        binding = bind_renewal(before.entry, own, self._roster.digest, exporter, nonce)
        admitted = verify(policy, Evidence(before.entry, kind, renewal.proof, binding))
        if admitted.identity != before.identity:
            raise AdmissionError(f"it proves to be {admitted.identity!r}, and was admitted as {before.identity!r}")
