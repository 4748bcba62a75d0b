"""Certificate paths, verified from an authority down: no key is used before an authority of the policy has certified it.

An unauthenticated peer can send any certificates, and some take a library a second: RSA keys with exponents as long as the
modulus, several issuers with one name, long lists of names under long lists of constraints. So the form is checked first,
without cryptography; then the signatures of issuers are verified from the authority down. A peer without a certificate of an
authority costs one or two signature checks with the authority's own key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from ringfence.admission.proofs import der

RSA_BITS: Final = range(2048, 8193)
RSA_EXPONENTS: Final = range(3, 1 << 32, 2)
KEYS: Final = "P-256, P-384, P-521, Ed25519 or RSA from 2048 to 8192 bits with an odd exponent below 2^32"
_KEPT: Final = 64  # verified intermediates that are cached

_RSA: Final = bytes.fromhex("300d06092a864886f70d0101010500")
_P384: Final = bytes.fromhex("301006072a8648ce3d020106052b81040022")
_CURVE_KEYS: Final = {  # the algorithm of a public key: the length of the key
    bytes.fromhex("301306072a8648ce3d020106082a8648ce3d030107"): 65,  # P-256
    _P384: 97,
    bytes.fromhex("301006072a8648ce3d020106052b81040023"): 133,  #      P-521
    bytes.fromhex("300506032b6570"): 32,  #                             Ed25519
}
_PSS: Final = bytes.fromhex("2a864886f70d01010a")
_PKCS1: Final = bytes.fromhex("2a864886f70d0101")  # one more byte names the hash
_ECDSA: Final = bytes.fromhex("2a8648ce3d0403")
_ED25519: Final = bytes.fromhex("2b6570")
_SIGNATURES: Final = {  # with SHA-256, SHA-384 and SHA-512
    *(_PKCS1 + bytes([last]) for last in (11, 12, 13)),
    *(_ECDSA + bytes([last]) for last in (2, 3, 4)),
    _ED25519,
    _PSS,
}

UNREADABLE: Final = (  # what the library raises for certificates, lists and responses that it cannot parse
    ValueError,
    TypeError,  # strange names
    KeyError,  # a TLS feature that the library does not know
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)

E = TypeVar("E", bound=x509.ExtensionType)


class PathError(Exception):
    """There is no valid path from an authority to the leaf; the text says why."""


@dataclass(frozen=True)
class CertificateFields:
    """The fields of a certificate that are read before its signature is verified."""

    issuer: bytes  # names in DER
    subject: bytes
    key: bytes  # SubjectPublicKeyInfo


def parse_fields(certificate: bytes) -> CertificateFields:
    """Parse a certificate of version 3. Raises ValueError if it is malformed or its signature algorithm is not accepted."""
    whole = der.open_only(certificate, der.SEQUENCE)
    inner = whole.open(der.SEQUENCE)
    algorithm = whole.element(der.SEQUENCE)
    whole.content(der.BIT_STRING)
    whole.end()
    if inner.content(0xA0) != b"\x02\x01\x02":
        raise ValueError("not an X.509 certificate of version 3")
    inner.content(der.INTEGER)
    if inner.element(der.SEQUENCE) != algorithm:
        raise ValueError("it names two signature algorithms")
    if der.DerReader(algorithm).open(der.SEQUENCE).content(der.OBJECT_IDENTIFIER) not in _SIGNATURES:
        raise ValueError("its signature algorithm is not accepted")
    issuer = inner.element(der.SEQUENCE)
    inner.content(der.SEQUENCE)  # validity
    return CertificateFields(issuer, inner.element(der.SEQUENCE), inner.element(der.SEQUENCE))


def is_accepted_key(key: bytes) -> bool:
    """Whether a SubjectPublicKeyInfo has a key of `KEYS`, without computing with it. Raises ValueError if malformed."""
    algorithm, bits = _parts(key)
    if algorithm in _CURVE_KEYS:
        return len(bits) == 1 + _CURVE_KEYS[algorithm] and bits[0] == 0
    if algorithm != _RSA or bits[:1] != b"\0":
        return False
    numbers = der.DerReader(bits[1:]).open(der.SEQUENCE)
    modulus, exponent = (int.from_bytes(numbers.content(der.INTEGER), "big", signed=True) for _ in range(2))
    numbers.end()
    return modulus > 0 and modulus.bit_length() in RSA_BITS and exponent in RSA_EXPONENTS


def is_p384_key(key: bytes) -> bool:
    """Whether a SubjectPublicKeyInfo has a key on P-384. Raises ValueError if malformed."""
    algorithm, bits = _parts(key)
    return algorithm == _P384 and len(bits) == 1 + _CURVE_KEYS[_P384]


def _parts(key: bytes) -> tuple[bytes, bytes]:
    reader = der.DerReader(key).open(der.SEQUENCE)
    algorithm = reader.element(der.SEQUENCE)
    bits = reader.content(der.BIT_STRING)
    reader.end()
    return algorithm, bits


def extension_of(found: x509.Certificate | x509.CertificateRevocationList, kind: type[E]) -> E | None:
    """Return the extension of this type, if there is one. Raises one of UNREADABLE."""
    try:
        return found.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


def check_order(fields: Sequence[CertificateFields]) -> None:
    """Check that every certificate is followed by its issuer's, and that subjects are distinct. Raises PathError."""
    for lower, upper in pairwise(fields):
        if lower.issuer != upper.subject:
            raise PathError("the certificates are not in order: each must be followed by that of its issuer")
    if len({each.subject for each in fields}) != len(fields):
        raise PathError("two of its certificates are for the same subject")


@dataclass(frozen=True)
class CertificatePath:
    """A leaf that is not verified yet, and the verified issuers above it."""

    leaf: x509.Certificate
    between: list[x509.Certificate]
    issuers: tuple[bytes, ...]  # candidates for the leaf's issuer, with the same name

    def check_leaf(self) -> None:
        """Check the leaf's signature. Raises PathError."""
        for issuer in self.issuers:
            try:
                self.leaf.verify_directly_issued_by(_loaded(issuer))
                return
            except InvalidSignature:
                continue
        raise PathError("its signature was not made with its issuer's key")


def build_path(authorities: tuple[bytes, ...], chain: tuple[bytes, ...]) -> CertificatePath:
    """Return the path from an authority to a leaf, with the signatures of all intermediates verified.

    `chain` begins with the leaf; its last certificate may be the authority's own. Raises PathError, or one of UNREADABLE.
    """
    fields = [parse_fields(each) for each in chain]
    if len(chain) > 1 and chain[-1] in authorities:
        chain, fields = chain[:-1], fields[:-1]
    check_order(fields)
    known = _by_subject(authorities).get(fields[-1].issuer)
    if known is None:
        raise PathError("its issuer is not one of them, and no intermediate certificate was presented")
    if not all(is_accepted_key(each.key) for each in fields):
        raise PathError(f"a key in its chain is not {KEYS}")
    issuers = known
    between: list[x509.Certificate] = []
    for each in reversed(chain[1:]):
        between.insert(0, _first_issued(each, issuers))
        issuers = (each,)
    return CertificatePath(x509.load_der_x509_certificate(chain[0]), between, issuers)


def _first_issued(certificate: bytes, issuers: tuple[bytes, ...]) -> x509.Certificate:
    for issuer in issuers:
        try:
            return _issued(certificate, issuer)
        except InvalidSignature:
            continue
    raise PathError("a signature in its chain was not made with the issuer's key")


@lru_cache(maxsize=_KEPT)
def _issued(certificate: bytes, issuer: bytes) -> x509.Certificate:
    """Load a CA certificate that `issuer` signed. Raises InvalidSignature or PathError; only valid ones are cached."""
    found = x509.load_der_x509_certificate(certificate)
    found.verify_directly_issued_by(_loaded(issuer))
    constraints = extension_of(found, x509.BasicConstraints)
    if constraints is None or not constraints.ca:
        raise PathError("an issuer certificate in its chain is not a CA")
    return found


@lru_cache(maxsize=_KEPT)
def _loaded(certificate: bytes) -> x509.Certificate:
    """Load an authority, or a verified intermediate."""
    return x509.load_der_x509_certificate(certificate)


@lru_cache(maxsize=16)
def _by_subject(authorities: tuple[bytes, ...]) -> dict[bytes, tuple[bytes, ...]]:
    found: dict[bytes, tuple[bytes, ...]] = {}
    for each in authorities:
        subject = _loaded(each).subject.public_bytes()
        found[subject] = (*found.get(subject, ()), each)
    return found
