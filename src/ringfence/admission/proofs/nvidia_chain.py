"""The certificate chain of an NVIDIA device, from its attestation key to the pinned root.

    leaf (attestation key, firmware id) ◄── boot ROM ◄── provisioner ◄── model ◄── NVIDIA Device Identity CA (pinned)

The boot ROM certifies the attestation key together with a digest of the firmware that it started, so the leaf identifies the
device and the firmware that signed a report. Revocation is checked by `ocsp_status`, and by serial numbers of the policy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ringfence.admission.proofs import certificate_path, der
from ringfence.admission.proofs.certificate_path import extension_of
from ringfence.errors import AdmissionError

CERTIFICATE_BYTES: Final = 2048
CHAIN_LENGTHS: Final = range(2, 7)  # without the root
FIRMWARE_ID_BYTES: Final = 48

# DMTF's name of a device in a certificate, and TCG's two extensions for the firmware that a key was certified for.
_DEVICE_NAME: Final = x509.ObjectIdentifier("1.3.6.1.4.1.412.274.1")
_DEVICE_ID: Final = x509.ObjectIdentifier("2.23.133.5.4.1")
_TCB_INFO: Final = x509.ObjectIdentifier("2.23.133.5.4.1.1")
_SHA384: Final = bytes.fromhex("0609608648016503040202")
_FIRMWARE_IDS: Final = 0xA6  # context-specific tags of TCG's TcbInfo
_FLAGS: Final = 0x87
_BAD_STATES: Final = 0b0111_0000  # of the first byte of TCG's flags
_NAME: Final = re.compile(rb"NVIDIA:([A-Z0-9_]{1,16}):([0-9A-F]{1,32})")

_BAD: Final = (InvalidSignature, *certificate_path.UNREADABLE)


@dataclass(frozen=True)
class CertifiedGpu:
    """The device that a leaf certifies."""

    model: str  #          "GH100"
    name: str  #           "NVIDIA:GH100:48B02D8642D189C6", one per device
    firmware_id: bytes  #  of the firmware that its boot ROM started
    key: ec.EllipticCurvePublicKey
    certificates: tuple[x509.Certificate, ...]  # leaf first, root last


def load_root(pem: bytes) -> x509.Certificate:
    """Load a pinned root."""
    return x509.load_pem_x509_certificate(pem)


def chain_of(pem: bytes, root: x509.Certificate) -> tuple[bytes, ...]:
    """Return the chain in DER, leaf first and without the root, from the PEM text of a driver. Raises AdmissionError."""
    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except _BAD as error:
        raise AdmissionError(f"the GPU's certificate chain is malformed: {error}") from None
    return tuple(each.public_bytes(Encoding.DER) for each in certificates if each != root)


def verify(chain: tuple[bytes, ...], root: x509.Certificate, now: datetime) -> CertifiedGpu:
    """Verify a chain at the time `now`, and return its device. Raises AdmissionError."""
    if len(chain) not in CHAIN_LENGTHS:
        raise AdmissionError(f"a GPU's certificate chain has {len(chain)} certificates")
    try:
        return _verify(_issued(chain, root), root, now)
    except _BAD as error:
        raise AdmissionError(
            f"the GPU's certificate chain is not valid under NVIDIA's root: {type(error).__name__}: {error}"
        ) from None


# -- parts ----------------------------------------------------------------------------------------------------------


def _issued(chain: tuple[bytes, ...], root: x509.Certificate) -> list[x509.Certificate]:
    """Return the certificates of a chain, verified from the root down: no key is used before NVIDIA has certified it."""
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
    """Check size and key type before any cryptography: all of NVIDIA's keys are on P-384."""
    if len(data) > CERTIFICATE_BYTES:
        raise AdmissionError(f"a GPU's certificate of {len(data)} bytes, where at most {CERTIFICATE_BYTES} are allowed")
    if not certificate_path.is_p384_key(certificate_path.parse_fields(data).key):
        raise AdmissionError("a key in the GPU's certificate chain is not on P-384")


@lru_cache(maxsize=256)
def _issuer(data: bytes, above: x509.Certificate, below: int) -> x509.Certificate:
    """Load a CA certificate that `above` issued and that allows `below` CAs under it.

    Valid ones are cached: all GPUs of a model share some, and each is presented to several workers.
    """
    found = _load(data)
    found.verify_directly_issued_by(above)
    _check_issuer(found, below)
    return found


def _load(data: bytes) -> x509.Certificate:
    certificate = x509.load_der_x509_certificate(data)
    if not data.endswith(b"\0" + certificate.signature):  # the count of unused bits, which no signature covers
        raise AdmissionError("a GPU's certificate has a signature with unused bits")
    return certificate


def _verify(certificates: list[x509.Certificate], root: x509.Certificate, now: datetime) -> CertifiedGpu:
    leaf, *issuers = certificates
    for certificate in (*certificates, root):
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise AdmissionError(
                f"the GPU's certificate {certificate.serial_number:X} is valid from {certificate.not_valid_before_utc:%F} "
                f"to {certificate.not_valid_after_utc:%F}, and it is {now:%F}"
            )
    key = leaf.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)  # of P-384: `_check_form`
    _check_leaf(leaf)
    model, name = _name(leaf)
    return CertifiedGpu(model, name, _firmware_id(leaf, issuers[0]), key, (*certificates, root))


def _check_issuer(certificate: x509.Certificate, below: int) -> None:
    """Check that a certificate is a CA that allows `below` CAs under it."""
    _check_critical(certificate)
    constraints, usage = extension_of(certificate, x509.BasicConstraints), extension_of(certificate, x509.KeyUsage)
    depth = constraints.path_length if constraints is not None else None
    if constraints is None or not constraints.ca or usage is None or not usage.key_cert_sign:
        raise AdmissionError("an issuer certificate in the GPU's chain is not a CA")
    if depth is not None and below > depth:
        raise AdmissionError("a CA in the GPU's chain exceeds its path length constraint")


def _check_leaf(certificate: x509.Certificate) -> None:
    _check_critical(certificate)
    constraints, usage = extension_of(certificate, x509.BasicConstraints), extension_of(certificate, x509.KeyUsage)
    if (constraints is not None and constraints.ca) or usage is None or not usage.digital_signature:
        raise AdmissionError("the GPU's attestation certificate is not valid for signing reports")


def _check_critical(certificate: x509.Certificate) -> None:
    known = (x509.BasicConstraints.oid, x509.KeyUsage.oid)
    unknown = [each.oid.dotted_string for each in certificate.extensions if each.critical and each.oid not in known]
    if unknown:
        raise AdmissionError(f"a certificate in the GPU's chain has the unknown critical extension {unknown[0]}")


def _name(leaf: x509.Certificate) -> tuple[str, str]:
    """Return model and name, from the one subject alternative name in DMTF's form."""
    others = extension_of(leaf, x509.SubjectAlternativeName) or ()
    names = [each.value for each in others if isinstance(each, x509.OtherName) and each.type_id == _DEVICE_NAME]
    if len(names) == 1:
        reader = der.DerReader(names[0])
        match = _NAME.fullmatch(reader.content(der.UTF8_STRING)) if reader.tag == der.UTF8_STRING else None
        if match is not None and reader.tag is None:
            return match[1].decode(), match[0].decode()
    raise AdmissionError("the GPU's attestation certificate does not name one NVIDIA device")


def _firmware_id(leaf: x509.Certificate, issuer: x509.Certificate) -> bytes:
    """Return the digest of the firmware that the leaf's key was certified for.

    Hopper and the switches use one of TCG's extensions for it, Blackwell the other.
    """
    found = []
    for extension in leaf.extensions:
        if not isinstance(extension.value, x509.UnrecognizedExtension):
            continue
        if extension.oid == _DEVICE_ID:
            found.append(read_device_id(extension.value.value, issuer))
        elif extension.oid == _TCB_INFO:
            found.append(read_tcb_info(extension.value.value))
    return _only_firmware(found)


def _only_firmware(found: list[bytes]) -> bytes:
    """The only firmware id. With several, taking the first would leave the others unchecked."""
    if not found:
        raise AdmissionError("the GPU's attestation certificate names no firmware")
    if len(found) > 1:
        raise AdmissionError(
            "the GPU's attestation certificate names several firmwares, which this release does not support"
        )
    return found[0]


def read_device_id(data: bytes, issuer: x509.Certificate) -> bytes:
    """Return the firmware id of SEQUENCE { version, the issuer's public key, firmware id }. Raises AdmissionError."""
    try:
        reader = der.open_only(data, der.SEQUENCE)
        reader.content(der.INTEGER)
        key = reader.element(der.SEQUENCE)
        firmware_id = reader.content(der.SEQUENCE)
        reader.end()
    except ValueError as error:
        raise _malformed(error) from None
    if key != issuer.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo):
        raise AdmissionError("the GPU's attestation certificate belongs to another boot ROM")
    return _digest(firmware_id)


def read_tcb_info(data: bytes) -> bytes:
    """Return the firmware id of SEQUENCE { ..., [6] firmware ids, [7] flags, ... }. Raises AdmissionError.

    Entries after the first are zero for firmware that was not started.
    """
    found: list[bytes] = []
    try:
        reader = der.open_only(data, der.SEQUENCE)
        while (tag := reader.tag) is not None:
            content = reader.content(tag)
            if tag == _FIRMWARE_IDS:
                found += _firmware_ids(der.DerReader(content))
            elif tag == _FLAGS:
                _check_flags(content)
    except ValueError as error:
        raise _malformed(error) from None
    return _only_firmware(found[:1] + [each for each in found[1:] if any(each) or not each])


def _firmware_ids(reader: der.DerReader) -> Iterator[bytes]:
    """Yield the digests of a list; an entry that is not one yields no bytes, which no policy lists."""
    while (tag := reader.tag) is not None:
        content = reader.content(tag)
        yield _digest(content) if tag == der.SEQUENCE else b""


def _check_flags(value: bytes) -> None:
    """TCG's operational states, a BIT STRING: not configured (0), not secure (1), recovery (2), debug (3), ..."""
    if not value:
        raise ValueError("flags without a count of unused bits")
    if value[1:2] and value[1] & _BAD_STATES:
        raise AdmissionError("the GPU's attestation certificate says that it is not secure, in recovery or under debug")


def _digest(data: bytes) -> bytes:
    """{ SHA-384, OCTET STRING }."""
    head = _SHA384 + bytes((der.OCTET_STRING, FIRMWARE_ID_BYTES))
    if not data.startswith(head) or len(data) != len(head) + FIRMWARE_ID_BYTES:
        raise AdmissionError("the GPU's firmware id is not a SHA-384 digest")
    return data[len(head) :]


def _malformed(error: ValueError) -> AdmissionError:
    return AdmissionError(f"an extension of the GPU's attestation certificate is malformed: {error}")
