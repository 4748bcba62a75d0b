"""The certificates of an NVIDIA device: from its attestation key, through its boot ROM, to the pinned root.

    leaf (attestation key, firmware id) ◄── boot ROM ◄── provisioner ◄── model ◄── NVIDIA Device Identity CA (pinned)

The boot ROM certifies the attestation key together with a digest of the firmware that it started, so the leaf says which
device and which firmware signed a report. Revocation is not asked of anybody: a policy can list serial numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ringfence.admission.proofs import certificate_path
from ringfence.errors import AdmissionError

CERTIFICATE_BYTES: Final = 2048
CHAIN_LENGTHS: Final = range(2, 7)  # without the root
FIRMWARE_ID_BYTES: Final = 48

# DMTF's name for a device in a certificate, and TCG's two ways to say which firmware a key was made for.
_DEVICE_NAME: Final = x509.ObjectIdentifier("1.3.6.1.4.1.412.274.1")
_DEVICE_ID: Final = x509.ObjectIdentifier("2.23.133.5.4.1")
_TCB_INFO: Final = x509.ObjectIdentifier("2.23.133.5.4.1.1")
_SHA384: Final = bytes.fromhex("0609608648016503040202")
_BAD_STATES: Final = 0b0111_0000  # of the first byte of TCG's flags
_NAME: Final = re.compile(rb"NVIDIA:([A-Z0-9_]{1,16}):([0-9A-F]{1,32})")

_BAD: Final = (
    ValueError,
    TypeError,
    KeyError,  # a TLS feature that the library does not know
    InvalidSignature,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)


@dataclass(frozen=True)
class Device:
    """Whom the leaf stands for."""

    model: str  #          "GH100"
    name: str  #           "NVIDIA:GH100:48B02D8642D189C6", one per device
    firmware_id: bytes  #  of the firmware that its boot ROM started
    key: ec.EllipticCurvePublicKey
    serials: tuple[int, ...]  # of every certificate below the root


def load_root(pem: bytes) -> x509.Certificate:
    """A pinned root."""
    return x509.load_pem_x509_certificate(pem)


def chain_of(pem: bytes, root: x509.Certificate) -> tuple[bytes, ...]:
    """The chain as it travels, leaf first and without the root, from the text that a driver hands out."""
    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except _BAD as error:
        raise AdmissionError(f"the GPU's certificate chain cannot be read: {error}") from None
    return tuple(each.public_bytes(Encoding.DER) for each in certificates if each != root)


def verify(chain: tuple[bytes, ...], root: x509.Certificate, now: datetime) -> Device:
    """The device at the end of a chain that holds at `now`."""
    if len(chain) not in CHAIN_LENGTHS:
        raise AdmissionError(f"a GPU's certificate chain of {len(chain)} certificates")
    try:
        return _verify(_issued(chain, root), root, now)
    except _BAD as error:
        raise AdmissionError(
            f"the GPU's certificate chain is not one of NVIDIA's: {type(error).__name__}: {error}"
        ) from None


# -- parts ----------------------------------------------------------------------------------------------------------


def _issued(chain: tuple[bytes, ...], root: x509.Certificate) -> list[x509.Certificate]:
    """The certificates of a chain, verified from the root down: no key is computed with that NVIDIA does not vouch for."""
    for each in chain:
        _check_form(each)
    found: list[x509.Certificate] = []
    issuer = root
    for depth in reversed(range(1, len(chain))):
        issuer = _issuer(chain[depth], issuer, depth - 1)
        found.insert(0, issuer)
    leaf = _load(chain[0])
    leaf.verify_directly_issued_by(issuer)
    return [leaf, *found]


def _check_form(data: bytes) -> None:
    """Before anything is computed: NVIDIA's keys are all of P-384."""
    if len(data) > CERTIFICATE_BYTES:
        raise AdmissionError(f"a GPU's certificate of {len(data)} bytes where {CERTIFICATE_BYTES} are allowed")
    if not certificate_path.is_key_of_p384(certificate_path.outline(data).key):
        raise AdmissionError("a key in the GPU's certificate chain is not of P-384")


@lru_cache(maxsize=256)
def _issuer(data: bytes, above: x509.Certificate, below: int) -> x509.Certificate:
    """A certificate that `above` issued, and that may issue with `below` others under it. Only those that verify are kept:
    all GPUs of a model share some, and each is shown to several workers."""
    found = _load(data)
    found.verify_directly_issued_by(above)
    _check_issuer(found, below)
    return found


def _load(data: bytes) -> x509.Certificate:
    certificate = x509.load_der_x509_certificate(data)
    if not data.endswith(b"\0" + certificate.signature):  # the count of its unused bits, the one byte nobody signs
        raise AdmissionError("a GPU's certificate has a signature that does not end with a whole byte")
    return certificate


def _verify(certificates: list[x509.Certificate], root: x509.Certificate, now: datetime) -> Device:
    leaf, *issuers = certificates
    for certificate in (*certificates, root):
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise AdmissionError(
                f"the GPU's certificate {certificate.serial_number:X} holds from {certificate.not_valid_before_utc:%F} "
                f"to {certificate.not_valid_after_utc:%F}, and now is {now:%F}"
            )
    key = leaf.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)  # of P-384: `_check_form`
    _check_leaf(leaf)
    model, name = _name(leaf)
    return Device(model, name, _firmware_id(leaf, issuers[0]), key, tuple(each.serial_number for each in certificates))


def _check_issuer(certificate: x509.Certificate, below: int) -> None:
    """May it issue, with `below` other issuers under it?"""
    _check_critical(certificate)
    constraints = _constraints(certificate)
    usage = _usage(certificate)
    depth = constraints.path_length if constraints is not None else None
    if constraints is None or not constraints.ca or usage is None or not usage.key_cert_sign:
        raise AdmissionError("a certificate in the GPU's chain is used as an issuer and is none")
    if depth is not None and below > depth:
        raise AdmissionError("a certificate in the GPU's chain may not have so many issuers below it")


def _check_leaf(certificate: x509.Certificate) -> None:
    _check_critical(certificate)
    constraints = _constraints(certificate)
    usage = _usage(certificate)
    if (constraints is not None and constraints.ca) or usage is None or not usage.digital_signature:
        raise AdmissionError("the GPU's attestation certificate is not one that signs reports")


def _check_critical(certificate: x509.Certificate) -> None:
    known = (x509.BasicConstraints.oid, x509.KeyUsage.oid)
    unknown = [each.oid.dotted_string for each in certificate.extensions if each.critical and each.oid not in known]
    if unknown:
        raise AdmissionError(f"a certificate in the GPU's chain has the critical extension {unknown[0]}, unknown here")


def _constraints(certificate: x509.Certificate) -> x509.BasicConstraints | None:
    for extension in certificate.extensions:
        if isinstance(extension.value, x509.BasicConstraints):
            return extension.value
    return None


def _usage(certificate: x509.Certificate) -> x509.KeyUsage | None:
    for extension in certificate.extensions:
        if isinstance(extension.value, x509.KeyUsage):
            return extension.value
    return None


def _name(leaf: x509.Certificate) -> tuple[str, str]:
    """Model and name, from the one subject alternative name of DMTF's form."""
    names = [
        each.value
        for extension in leaf.extensions
        if isinstance(extension.value, x509.SubjectAlternativeName)
        for each in extension.value
        if isinstance(each, x509.OtherName) and each.type_id == _DEVICE_NAME
    ]
    if len(names) == 1:
        parts = list(_elements(names[0]))
        match = _NAME.fullmatch(parts[0][1]) if len(parts) == 1 and parts[0][0] == 0x0C else None
        if match is not None:
            return match[1].decode(), match[0].decode()
    raise AdmissionError("the GPU's attestation certificate does not name one NVIDIA device")


def _firmware_id(leaf: x509.Certificate, issuer: x509.Certificate) -> bytes:
    """Which firmware the leaf's key was made for. Hopper and the switches say it one way, Blackwell another."""
    found = []
    for extension in leaf.extensions:
        if not isinstance(extension.value, x509.UnrecognizedExtension):
            continue
        if extension.oid == _DEVICE_ID:
            found.append(_from_device_id(extension.value.value, issuer))
        elif extension.oid == _TCB_INFO:
            found.append(_from_tcb_info(extension.value.value))
    return _one_firmware(found)


def _one_firmware(found: list[bytes]) -> bytes:
    """Were the first taken of several, nobody would look at the others."""
    if not found:
        raise AdmissionError("the GPU's attestation certificate names no firmware")
    if len(found) > 1:
        raise AdmissionError(
            "the GPU's attestation certificate names several firmwares, which this release cannot read"
        )
    return found[0]


def _from_device_id(data: bytes, issuer: x509.Certificate) -> bytes:
    """SEQUENCE { version, the issuer's public key, firmware id }."""
    elements = list(_elements(_only(data, 0x30)))
    issuer_key = issuer.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if [tag for tag, _, _ in elements] != [0x02, 0x30, 0x30] or elements[1][2] != issuer_key:
        raise AdmissionError("the GPU's attestation certificate belongs to another boot ROM")
    return _digest(elements[2][1])


def _from_tcb_info(data: bytes) -> bytes:
    """SEQUENCE { ..., [6] firmware ids, [7] flags, ... }. Places for firmware that was not started are zero, not the first."""
    found: list[bytes] = []
    for tag, value, _ in _elements(_only(data, 0x30)):
        if tag == 0xA6:
            found += [_digest(inner) if kind == 0x30 else b"" for kind, inner, _ in _elements(value)]
        elif tag == 0x87:
            _check_flags(value)
    return _one_firmware(found[:1] + [each for each in found[1:] if any(each) or not each])


def _check_flags(value: bytes) -> None:
    """TCG's operational states, a BIT STRING: not configured (0), not secure (1), recovery (2), debug (3), ..."""
    if not value:
        raise AdmissionError("an extension of the GPU's attestation certificate is malformed")
    if value[1:2] and value[1] & _BAD_STATES:
        raise AdmissionError("the GPU's attestation certificate says that it is not secure, in recovery or under debug")


def _digest(data: bytes) -> bytes:
    """{ SHA-384, OCTET STRING }."""
    head = _SHA384 + bytes((0x04, FIRMWARE_ID_BYTES))
    if not data.startswith(head) or len(data) != len(head) + FIRMWARE_ID_BYTES:
        raise AdmissionError("the GPU's firmware id is not a SHA-384 digest")
    return data[len(head) :]


def _only(data: bytes, tag: int) -> bytes:
    elements = list(_elements(data))
    if len(elements) != 1 or elements[0][0] != tag:
        raise AdmissionError("an extension of the GPU's attestation certificate is malformed")
    return elements[0][1]


def _elements(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """DER elements side by side: tag, value, and the whole element. Only what these extensions use: short tags."""
    at = 0
    while at < len(data):
        if at + 2 > len(data) or data[at] & 0x1F == 0x1F:
            raise AdmissionError("an extension of the GPU's attestation certificate is malformed")
        length, start = data[at + 1], at + 2
        if length >= 0x80:
            width = length & 0x7F
            digits = data[start : start + width]
            length, start = int.from_bytes(digits, "big"), start + width
            if not 1 <= width <= 2 or len(digits) != width or digits[0] == 0 or length < 0x80:
                raise AdmissionError("an extension of the GPU's attestation certificate is malformed")
        end = start + length
        if end > len(data):
            raise AdmissionError("an extension of the GPU's attestation certificate is malformed")
        yield data[at], data[start:end], data[at:end]
        at = end
