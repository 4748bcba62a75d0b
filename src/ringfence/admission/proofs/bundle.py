"""A bundle of proofs, for rules that ask for several, such as a certificate and a quote.

All parts cover the same binding, so each of them comes from the worker at the other end of this connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.binding import Binding
from ringfence.admission.entry import ENDORSEMENT_BYTES, Entry, Listing
from ringfence.admission.policy import Evidence, Prover, Verifier
from ringfence.errors import AdmissionError, ConfigurationError, ProtocolError

KIND: Final = 7
LAST_KIND: Final = 9

Parts = Sequence[tuple[int, bytes]]


def encode(parts: Parts) -> bytes:
    """Encode a bundle: u8 count, then for each part: u8 kind, blob. Kinds ascend, so that the encoding is unique."""
    encoded = [encoding.number(kind, 1) + encoding.blob(data) for kind, data in parts]
    return encoding.number(len(parts), 1) + b"".join(encoded)


def decode(data: bytes, limit: int) -> tuple[tuple[int, bytes], ...]:
    """Decode a bundle of two or more parts of different kinds, none of them a bundle. Raises ProtocolError."""
    reader = encoding.Reader(data)
    parts = tuple((reader.number(1), reader.blob(limit)) for _ in range(reader.number(1)))
    reader.end()
    kinds = [kind for kind, _ in parts]
    if len(kinds) < 2 or kinds != sorted(set(kinds)) or not 1 <= kinds[0] <= kinds[-1] <= LAST_KIND or KIND in kinds:
        raise ProtocolError(f"a bundle of kinds {kinds}")
    return parts


class BundleVerifier(Verifier):
    """Admits a worker that every part admits."""

    kind = KIND

    def __init__(self, parts: Sequence[Verifier]) -> None:
        self._parts = tuple(sorted(parts, key=lambda part: part.kind))
        _check_kinds([part.kind for part in self._parts])
        self.name = " and ".join(part.name for part in self._parts)

    def content(self) -> bytes:
        return encode([(part.kind, part.content()) for part in self._parts])

    def verify(self, evidence: Evidence) -> str | None:
        parts = self._split(evidence.entry, evidence.proof, keys.PROOF_LIMIT_BYTES)
        names = [
            part.verify(replace(evidence, kind=kind, proof=proof))
            for part, (kind, proof) in zip(self._parts, parts, strict=True)
        ]
        return next(filter(None, names), None)

    def verify_listing(self, listing: Listing) -> str | None:
        parts = self._split(listing.entry, listing.endorsement, ENDORSEMENT_BYTES)
        names = [
            part.verify_listing(replace(listing, kind=kind, endorsement=endorsement))
            for part, (kind, endorsement) in zip(self._parts, parts, strict=True)
        ]
        return next(filter(None, names), None)

    def without_key(self) -> Verifier:
        return BundleVerifier([part.without_key() for part in self._parts])

    def for_agents(self) -> Verifier:
        return BundleVerifier([part.for_agents() for part in self._parts])

    def _split(self, entry: Entry, data: bytes, limit: int) -> tuple[tuple[int, bytes], ...]:
        try:
            parts = decode(data, limit)
        except ProtocolError as error:
            raise AdmissionError(f"rank {entry.rank} presents a malformed bundle of proofs: {error}") from error
        wanted, found = [part.kind for part in self._parts], [kind for kind, _ in parts]
        if wanted != found:
            to_peer = f"rank {entry.rank} presents proofs of kinds {found}"
            raise AdmissionError(
                f"{to_peer}; this rule asks for {self.name}, kinds {wanted}",
                to_peer=f"{to_peer}, which no rule of the policy asks for",
            )
        return parts


class BundleProver(Prover):
    """Makes one proof of each kind that a rule asks for."""

    kind = KIND

    def __init__(self, provers: Sequence[Prover]) -> None:
        self._provers = tuple(sorted(provers, key=lambda prover: prover.kind))
        _check_kinds([prover.kind for prover in self._provers])

    def prove(self, binding: Binding) -> bytes:
        return encode([(prover.kind, prover.prove(binding)) for prover in self._provers])

    def endorse(self, entry: Entry, proof_digest: bytes) -> bytes:
        return encode([(prover.kind, prover.endorse(entry, proof_digest)) for prover in self._provers])

    def sign_roster(self, rank: int, roster_digest: bytes) -> bytes:
        """Sign with the one part that has a key to sign with, if there is one."""
        return b"".join(prover.sign_roster(rank, roster_digest) for prover in self._provers)


def verifier_for(parts: Sequence[Verifier]) -> Verifier:
    """Return the verifier of one rule; a single proof is not bundled."""
    return parts[0] if len(parts) == 1 else BundleVerifier(parts)


def prover_for(provers: Sequence[Prover]) -> Prover:
    """Return the prover for one rule; a single proof is not bundled."""
    return provers[0] if len(provers) == 1 else BundleProver(provers)


def _check_kinds(kinds: list[int]) -> None:
    if len(kinds) < 2 or len(set(kinds)) != len(kinds) or KIND in kinds:
        raise ConfigurationError(f"a rule must ask for different proofs, not for kinds {kinds}")
