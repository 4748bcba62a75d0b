"""The certificate authorities of a policy: PEM files, or SPIFFE trust bundles."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding

from ringfence.admission.proofs.certificate_path import UNREADABLE
from ringfence.admission.proofs.jose import read_json

AUTHORITIES: Final = 64  # in one file

_BLOCK: Final = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----")


def read(content: bytes, *, spiffe: bool) -> list[bytes]:
    """Return the certificates of a file, in DER. Raises ValueError, which says what is wrong."""
    found = _from_json(content) if spiffe and content.lstrip()[:1] == b"{" else from_pem(content)
    if not 1 <= len(found) <= AUTHORITIES:
        raise ValueError(f"{len(found)} certificates, where 1 to {AUTHORITIES} are allowed")
    for certificate in found:
        _check(certificate)
    return [certificate.public_bytes(Encoding.DER) for certificate in found]


def from_pem(content: bytes) -> list[x509.Certificate]:
    """Return the certificates of a PEM file with nothing else in it, such as a private key. Raises ValueError."""
    kinds = set(_BLOCK.findall(content))
    if kinds != {b"CERTIFICATE"}:
        raise ValueError("not a PEM file with certificates (BEGIN CERTIFICATE) only")
    try:
        return x509.load_pem_x509_certificates(content)
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion):
        raise ValueError("a certificate that cannot be read") from None


def describe(authority: bytes) -> str:
    """Describe an authority: its subject, its expiry and its fingerprint."""
    certificate = x509.load_der_x509_certificate(authority)
    subject = certificate.subject.rfc4514_string() or "an authority without a name"
    end = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
    return f"{subject!a} until {end}, SHA-256 {hashlib.sha256(authority).hexdigest()}"


def describe_issued(certificate: bytes) -> str:
    """Describe a certificate of this worker: whom it names, who issued it, and until when it is valid."""
    found = x509.load_der_x509_certificate(certificate)
    issuer, end = found.issuer.rfc4514_string(), f"{found.not_valid_after_utc:%Y-%m-%d %H:%M}"
    return f"{found.subject.rfc4514_string()!a}, issued by {issuer!a} and valid until {end} UTC"


def expiry(authority: bytes) -> float:
    """Return when an authority expires, in seconds since 1970."""
    return x509.load_der_x509_certificate(authority).not_valid_after_utc.timestamp()


def _from_json(content: bytes) -> list[x509.Certificate]:
    """Read a SPIFFE trust bundle: a JWK set whose keys for X.509 have one certificate each."""
    try:
        bundle: Any = read_json(content)
        entries = [each for each in bundle["keys"] if each.get("use") == "x509-svid"]
        chains = [each["x5c"] for each in entries]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("not a SPIFFE trust bundle") from None
    if not all(isinstance(chain, list) and len(chain) == 1 and isinstance(chain[0], str) for chain in chains):
        raise ValueError("a SPIFFE trust bundle whose keys do not have one certificate each")
    try:
        return [x509.load_der_x509_certificate(base64.b64decode(chain[0], validate=True)) for chain in chains]
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion):
        raise ValueError("a certificate in the SPIFFE trust bundle that cannot be read") from None


def _check(certificate: x509.Certificate) -> None:
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    except x509.ExtensionNotFound as error:
        raise ValueError(f"{certificate.subject.rfc4514_string()!a} is not an authority: {error}") from None
    except UNREADABLE:
        raise ValueError("a certificate whose extensions cannot be read") from None
    if not constraints.ca or not usage.key_cert_sign:
        raise ValueError(f"{certificate.subject.rfc4514_string()!a} is not a CA certificate")
