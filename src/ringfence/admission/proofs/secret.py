"""Proof by shared secret: the worker knows the 32 random bytes of the run's secret file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ringfence import keys
from ringfence.admission.binding import Binding
from ringfence.admission.entry import Entry, Listing
from ringfence.admission.policy import Evidence, Prover, Verifier
from ringfence.admission.policy_file.toml_table import TomlTable
from ringfence.errors import AdmissionError

NAME: Final = "shared secret"


@dataclass(frozen=True)
class Rules:
    """The table `[admit.secret]`, which has no keys: the secret itself comes from RINGFENCE_SECRET_FILE."""

    def content(self) -> bytes:
        # Nothing of the secret: policy digests are sent to unauthenticated peers.
        return NAME.encode()

    def explain(self) -> list[str]:
        return ["has the run's shared secret (RINGFENCE_SECRET_FILE)"]


def read_rules(table: TomlTable) -> Rules:
    table.done()
    return Rules()


class SharedSecret(Verifier, Prover):
    """Prover and verifier in one, because both sides have the same key."""

    kind = 1
    name = NAME

    def __init__(self, secret: keys.Secret, run_id: str) -> None:
        self._key = keys.admission_key(secret, run_id)

    def forget(self) -> None:
        """Wipe the key, even if references to this object remain."""
        self._key.forget()

    def content(self) -> bytes:
        return Rules().content()

    def prove(self, binding: Binding) -> bytes:
        return keys.mac(self._key, keys.SECRET_PROOF, binding.digest)

    def endorse(self, entry: Entry, proof_digest: bytes) -> bytes:
        return keys.mac(self._key, keys.ENTRY_PROOF, entry.encode(), proof_digest)

    def verify(self, evidence: Evidence) -> None:
        if not keys.same(evidence.proof, self.prove(evidence.binding)):
            raise AdmissionError(
                f"rank {evidence.entry.rank} does not have the shared secret of this worker: "
                "give every worker the same secret file"
            )

    def verify_listing(self, listing: Listing) -> None:
        if not keys.same(listing.endorsement, self.endorse(listing.entry, listing.proof_digest)):
            raise AdmissionError(f"the entry of rank {listing.entry.rank} is not endorsed under the shared secret")

    def without_key(self) -> Verifier:
        return EndorsedSecretVerifier(self.kind)


@dataclass(frozen=True)
class EndorsedSecretVerifier(Verifier):
    """Verifies the shared secret at peer verification, after its key was wiped.

    The prover endorsed the entry and the digest of the proof with the same key, and that was verified with the roster. So a
    worker that presents the listed proof has proved all that the HMAC could prove.
    """

    kind: int
    name: str = NAME

    def content(self) -> bytes:
        return Rules().content()

    def verify(self, evidence: Evidence) -> None:
        if len(evidence.proof) != keys.DIGEST_BYTES:
            raise AdmissionError(f"rank {evidence.entry.rank} presents {len(evidence.proof)} bytes instead of an HMAC")

    def verify_listing(self, listing: Listing) -> None:
        raise AdmissionError(f"rank {listing.entry.rank} cannot be listed after the roster was verified")
