"""AMD's certificates: from a pinned root of a product line down to the key that signs one chip's reports."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.oid import NameOID

from ringfence.admission import roots
from ringfence.admission.proofs.snp_report import PRODUCTS, Product, Tcb
from ringfence.errors import AdmissionError

LEAF_BYTES: Final = 4096

_AMD: Final = "1.3.6.1.4.1.3704.1."
_TCB_OIDS: Final = {"bootloader": "3.1", "tee": "3.2", "snp": "3.3", "microcode": "3.8", "fmc": "3.9"}
_CHIP_OID: Final = "4"
_PROVIDER_OID: Final = "5"
_SALT_BYTES: Final = 48
_UNREADABLE: Final = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)  # all that `cryptography` raises over a stranger's certificate
_HOW_TO: Final = "fetch the VCEK that belongs to this chip and its reported TCB from AMD's key service"


@dataclass(frozen=True)
class Line:
    """The certificates above the leaves of one product line."""

    product: Product
    root: x509.Certificate
    vcek_signer: x509.Certificate
    vlek_signer: x509.Certificate

    def content(self) -> bytes:
        return self.root.public_bytes(serialization.Encoding.DER)


Roots = Mapping[str, Line]


@dataclass(frozen=True)
class Endorsement:
    """What AMD says of the key that signed a report."""

    product: Product
    key: ec.EllipticCurvePublicKey
    tcb: Tcb
    chip: bytes | None  #     VCEK: the chip it belongs to
    provider: str | None  #   VLEK: the cloud it was given to


@cache
def pinned() -> Roots:
    """AMD's own, from the package. The only ones that a policy file can lead to."""
    return {name: line(PRODUCTS[name], roots.read(f"amd-{name}.pem")) for name in PRODUCTS}


def line(product: Product, pem: bytes) -> Line:
    """The root and the two signers below it, out of one file; each must be signed by the root."""
    found = {_common_name(each): each for each in x509.load_pem_x509_certificates(pem)}
    name = product.name.capitalize()
    root = found[f"ARK-{name}"]
    made = Line(product, root, found[f"SEV-{name}"], found[f"SEV-VLEK-{name}"])
    for certificate in (made.root, made.vcek_signer, made.vlek_signer):
        _check_signed(certificate, by=root)
    return made


def endorsement(leaf: bytes, known: Roots, now: float) -> Endorsement:
    """What the leaf certificate says, once it is known to be AMD's. Raises AdmissionError."""
    if len(leaf) > LEAF_BYTES:
        raise AdmissionError(f"an endorsement certificate of {len(leaf)} bytes where {LEAF_BYTES} are allowed")
    try:
        with warnings.catch_warnings():  # AMD's serial numbers are all 0: `cryptography` reads that, and deplores it
            warnings.simplefilter("ignore")
            certificate = x509.load_der_x509_certificate(leaf)
            _check_form(certificate, leaf)
            product, signer, root, is_vlek = _signer_of(certificate.issuer, known.values())
            _check_signed(certificate, by=signer)
            _check_time((root, signer, certificate), now)
            return _read(certificate, product, is_vlek)
    except _UNREADABLE as error:
        raise AdmissionError(f"its endorsement certificate cannot be read: {error}") from None


def _check_form(certificate: x509.Certificate, leaf: bytes) -> None:
    """The signed part, the algorithm as the signed part names it, the signature: no byte that nothing vouches for."""
    signed, signature = certificate.tbs_certificate_bytes, certificate.signature
    tail = b"\x03\x82" + (len(signature) + 1).to_bytes(2, "big") + b"\0" + signature
    algorithm = leaf.partition(signed)[2].removesuffix(tail)
    whole = signed + algorithm + tail
    if leaf != b"\x30\x82" + len(whole).to_bytes(2, "big") + whole or algorithm not in signed:
        raise ValueError("it holds bytes that its signer did not sign")


def _signer_of(issuer: x509.Name, lines: Iterable[Line]) -> tuple[Product, x509.Certificate, x509.Certificate, bool]:
    for each in lines:
        for signer in (each.vcek_signer, each.vlek_signer):
            if signer.subject == issuer:
                return each.product, signer, each.root, signer is each.vlek_signer
    raise AdmissionError(f"its endorsement certificate does not lead to a pinned root of AMD; {_HOW_TO}")


def _check_signed(certificate: x509.Certificate, by: x509.Certificate) -> None:
    key = by.public_key()
    if not isinstance(key, rsa.RSAPublicKey):
        raise ValueError("a signer without an RSA key")
    scheme = padding.PSS(padding.MGF1(hashes.SHA384()), _SALT_BYTES)
    try:
        key.verify(certificate.signature, certificate.tbs_certificate_bytes, scheme, hashes.SHA384())
    except InvalidSignature:
        raise AdmissionError(f"its endorsement certificate was not signed by AMD; {_HOW_TO}") from None


def _check_time(chain: Iterable[x509.Certificate], now: float) -> None:
    moment = datetime.fromtimestamp(now, UTC)
    for each in chain:
        if not each.not_valid_before_utc <= moment <= each.not_valid_after_utc:
            raise AdmissionError(
                f"the certificate {_common_name(each)} is valid from {each.not_valid_before_utc:%Y-%m-%d} to "
                f"{each.not_valid_after_utc:%Y-%m-%d}, and it is {moment:%Y-%m-%d}: fetch a new one, or set the clock"
            )


def _read(certificate: x509.Certificate, product: Product, is_vlek: bool) -> Endorsement:
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ValueError("its key is not on curve P-384")
    values = {
        each.oid.dotted_string.removeprefix(_AMD): each.value.value
        for each in certificate.extensions
        if each.oid.dotted_string.startswith(_AMD) and isinstance(each.value, x509.UnrecognizedExtension)
    }
    tcb = Tcb(tuple((part, _small_number(values.get(_TCB_OIDS[part]))) for part in product.tcb_parts))
    chip, provider = values.get(_CHIP_OID), values.get(_PROVIDER_OID)
    if is_vlek:
        if chip is not None or provider is None:
            raise ValueError("a VLEK that names no provider, or names a chip")
        return Endorsement(product, key, tcb, None, _text(provider))
    if provider is not None or chip is None or len(chip) != product.chip_bytes:
        raise ValueError("a VCEK that names no chip, or names a provider")
    return Endorsement(product, key, tcb, chip, None)


def _small_number(value: bytes | None) -> int:
    """A DER INTEGER from 0 to 255."""
    if value is not None and len(value) == 3 and value[:2] == b"\x02\x01" and value[2] < 0x80:
        return value[2]
    if value is not None and len(value) == 4 and value[:3] == b"\x02\x02\x00" and value[3] >= 0x80:
        return value[3]
    raise ValueError("a TCB version is missing or not a number from 0 to 255")


def _text(value: bytes) -> str:
    """A DER IA5String."""
    if len(value) < 3 or value[0] != 0x16 or value[1] != len(value) - 2 or value[1] >= 0x80:
        raise ValueError("the name of the provider is not a text")
    return value[2:].decode("ascii")


def _common_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else "without a name"
