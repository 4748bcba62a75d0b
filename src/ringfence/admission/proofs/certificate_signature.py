"""What a certificate's key signs: statements, the messages that stand for them, and the encoding of a proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.binding import Binding
from ringfence.admission.entry import Entry
from ringfence.errors import ProtocolError

CHAIN_LIMIT: Final = 4  # certificates, with the worker's own and without the authority's
CERTIFICATE_BYTES: Final = 4096

PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | rsa.RSAPublicKey
PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey

_CURVES: Final[dict[str, hashes.HashAlgorithm]] = {
    "secp256r1": hashes.SHA256(),
    "secp384r1": hashes.SHA384(),
    "secp521r1": hashes.SHA512(),
}
_PSS: Final = padding.PSS(padding.MGF1(hashes.SHA256()), hashes.SHA256.digest_size)
# TLS 1.3 puts the same prefix before its signed contexts, and it is longer than the random values that TLS 1.2 signs. So a
# key that is also used for TLS never signs the same bytes there and here.
_SPACES: Final = b" " * 64


@dataclass(frozen=True)
class Statement:
    """What a certificate's key signs: a proof for one connection, an endorsement of an entry, or the roster."""

    label: bytes
    covered: tuple[bytes, ...]

    @classmethod
    def proof(cls, binding: Binding) -> Statement:
        return cls(keys.CERTIFICATE_PROOF, (binding.digest,))

    @classmethod
    def endorsement(cls, entry: Entry, proof_digest: bytes) -> Statement:
        return cls(keys.CERTIFICATE_ENDORSEMENT, (entry.encode(), proof_digest))

    @classmethod
    def acknowledgement(cls, rank: int, roster_digest: bytes) -> Statement:
        return cls(keys.CERTIFICATE_ACKNOWLEDGEMENT, (encoding.number(rank, 4), roster_digest))

    def message(self, chain: tuple[bytes, ...]) -> bytes:
        """Return the message to sign. It covers the certificates too: some of their bits are not covered by their signature."""
        return _SPACES + self.label + keys.digest(self.label, _encode_chain(chain), *self.covered)


def encode(chain: tuple[bytes, ...], signature: bytes) -> bytes:
    """Encode a proof: u8 count, that many certificates as blobs, the signature as a blob."""
    return _encode_chain(chain) + encoding.blob(signature)


def _encode_chain(chain: tuple[bytes, ...]) -> bytes:
    return encoding.number(len(chain), 1) + b"".join(map(encoding.blob, chain))


def decode(data: bytes) -> tuple[tuple[bytes, ...], bytes]:
    """Decode a proof to its certificates and its signature. Raises ProtocolError."""
    reader = encoding.Reader(data)
    count = reader.number(1)
    if not 1 <= count <= CHAIN_LIMIT:
        raise ProtocolError(f"{count} certificates, where 1 to {CHAIN_LIMIT} are allowed")
    chain = tuple(reader.blob(CERTIFICATE_BYTES) for _ in range(count))
    signature = reader.blob(keys.SIGNATURE_BYTES)
    reader.end()
    return chain, signature


def sign(key: PrivateKey, message: bytes) -> bytes:
    """Sign with the algorithm of the key's type. Messages name no algorithm, so an attacker cannot choose one."""
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(message, ec.ECDSA(_CURVES[key.curve.name]))
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(message, _PSS, hashes.SHA256())
    return key.sign(message)


def is_signed(key: PublicKey, signature: bytes, message: bytes) -> bool:
    """Return whether `sign` made a signature with the private half of a key."""
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, message, ec.ECDSA(_CURVES[key.curve.name]))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, message, _PSS, hashes.SHA256())
        else:
            key.verify(signature, message)
    except InvalidSignature:
        return False
    return True
