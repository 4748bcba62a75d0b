"""The binding: what a proof covers, so that it is valid for one worker, on one connection, in one direction, once.

See spec/admission.md.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.messages import Hello
from ringfence.errors import ProtocolError


class Role(IntEnum):
    """Which end of an edge a worker is. In the binding it prevents that a proof is reflected to its prover."""

    CHILD = 0  #  dials
    PARENT = 1  # accepts


@dataclass(frozen=True)
class TlsValues:
    """Values that TLS provides for one connection; no message can change them."""

    own_key_digest: bytes  # SHA-256 of the SubjectPublicKeyInfo
    peer_key_digest: bytes
    exporter: bytes


@dataclass(frozen=True)
class Binding:
    """The preimage of a binding. It is kept with the proof, so that third parties can check all but the channel."""

    preimage: bytes

    @property
    def digest(self) -> bytes:
        """64 bytes, the size of a quote's report data."""
        return hashlib.sha512(self.preimage).digest()


@dataclass(frozen=True)
class BindingFields:
    """The fields of a preimage that a third party can check: all but the hellos and the channel."""

    role: Role
    prover: int
    verifier: int
    entry_digest: bytes
    prover_key: bytes
    verifier_key: bytes


def parse_preimage(preimage: bytes) -> BindingFields:
    """Parse a binding's preimage. Raises ProtocolError if it is malformed."""
    reader = encoding.Reader(preimage)
    if reader.take(len(keys.BINDING)) != keys.BINDING:
        raise ProtocolError("not the preimage of a binding")
    role, prover, verifier = reader.number(1), reader.number(4), reader.number(4)
    if role not in tuple(Role):
        raise ProtocolError(f"a binding with unknown role {role}")
    entry, prover_key, verifier_key, _, _, _ = (reader.take(keys.DIGEST_BYTES) for _ in range(6))
    reader.end()
    return BindingFields(
        role=Role(role),
        prover=prover,
        verifier=verifier,
        entry_digest=entry,
        prover_key=prover_key,
        verifier_key=verifier_key,
    )


PREIMAGE_BYTES: Final = len(keys.BINDING) + 1 + 2 * 4 + 6 * keys.DIGEST_BYTES


def bind(
    role: Role, prover: Hello, verifier: Hello, prover_key: bytes, verifier_key: bytes, exporter: bytes
) -> Binding:
    """Return the binding of the proof that `prover`, in `role`, presents to `verifier`.

    The exporter alone exists before the client's certificate has arrived, and the TLS key alone would let a parent replace
    the key that goes into the roster. So the binding covers both, with both hellos and the prover's entry.
    """
    return Binding(
        b"".join(
            (
                keys.BINDING,
                encoding.number(role, 1),
                encoding.number(prover.entry.rank, 4),
                encoding.number(verifier.entry.rank, 4),
                prover.entry.digest,
                prover_key,
                verifier_key,
                prover.digest,
                verifier.digest,
                hashlib.sha256(exporter).digest(),
            )
        )
    )


def proof_digest(kind: int, binding: Binding, proof: bytes) -> bytes:
    """Return the digest that represents a proof in the roster."""
    return keys.digest(keys.PROOF_DIGEST, encoding.number(kind, 1), binding.preimage, proof)
