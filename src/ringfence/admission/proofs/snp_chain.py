"""AMD's certificates, from the pinned root of a product line to the key that signs a chip's reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from ringfence.admission.proofs import der, snp_revocation
from ringfence.admission.proofs.snp_report import PRODUCTS, Product, Tcb
from ringfence.admission.proofs.snp_revocation import RevocationList
from ringfence.errors import AdmissionError

LEAF_BYTES: Final = 4096

_AMD: Final = bytes.fromhex("2b060104019c7801")  # 1.3.6.1.4.1.3704.1, the prefix of the following
_TCB_OIDS: Final = {"bootloader": b"\3\1", "tee": b"\3\2", "snp": b"\3\3", "microcode": b"\3\x08", "fmc": b"\3\x09"}
_CHIP_OID: Final = b"\4"
_PROVIDER_OID: Final = b"\5"
_SALT_BYTES: Final = 48
_HOW_TO: Final = "fetch the VCEK that belongs to this chip and its reported TCB from AMD's key service"


@dataclass(frozen=True)
class Line:
    """The certificates above the leaves of one product line."""

    product: Product
    root: x509.Certificate
    vcek_signer: x509.Certificate
    vlek_signer: x509.Certificate


Roots = Mapping[str, Line]


def roots_content(known: Roots | None) -> bytes:
    """Return an encoding of roots other than AMD's, which only tests can set."""
    lines = (line for _, line in sorted((known or {}).items()))
    return b"".join(line.root.public_bytes(serialization.Encoding.DER) for line in lines)


@dataclass(frozen=True)
class Endorsement:
    """The claims of a verified endorsement certificate (VCEK or VLEK)."""

    product: Product
    key: ec.EllipticCurvePublicKey
    tcb: Tcb
    chip: bytes | None  #     VCEK: the chip it belongs to
    provider: str | None  #   VLEK: the cloud provider it was issued to


@cache
def pinned() -> Roots:
    """Return AMD's roots from the package. A policy cannot set others."""
    return {name: line(PRODUCTS[name], roots.read(f"amd-{name}.pem")) for name in PRODUCTS}


def line(product: Product, pem: bytes) -> Line:
    """Read the root and the two signers below it from one file, and verify their signatures."""
    found = {_common_name(each): each for each in x509.load_pem_x509_certificates(pem)}
    name = product.name.capitalize()
    root = found[f"ARK-{name}"]
    made = Line(product, root, found[f"SEV-{name}"], found[f"SEV-VLEK-{name}"])
    for each in (made.root, made.vcek_signer, made.vlek_signer):
        _check_signed(each.tbs_certificate_bytes, each.signature, by=root)
    return made


def endorsement(
    leaf: bytes,
    known: Roots,
    now: float,
    revoked: Sequence[RevocationList] = (),
    listed: Sequence[RevocationList] = (),
) -> Endorsement:
    """Verify a leaf certificate under AMD's roots, and return its claims. Raises AdmissionError."""
    if len(leaf) > LEAF_BYTES:
        raise AdmissionError(f"an endorsement certificate of {len(leaf)} bytes, where at most {LEAF_BYTES} are allowed")
    try:
        parsed = _Leaf(leaf)
        above, signer = _signer_of(parsed.issuer, known.values())
        _check_signed(parsed.signed, parsed.signature, by=signer)
        moment = datetime.fromtimestamp(now, UTC)
        for each in (above.root, signer):
            _check_time(_common_name(each), each.not_valid_before_utc, each.not_valid_after_utc, moment)
        snp_revocation.check(revoked, listed, above.root, signer, above.product.name.capitalize(), now)
        is_vlek = signer is above.vlek_signer
        _check_time("SEV-VLEK" if is_vlek else "SEV-VCEK", parsed.start, parsed.end, moment)
        return _read(parsed, above.product, is_vlek)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise AdmissionError(f"its endorsement certificate is malformed: {error}") from None


class _Leaf:
    """A parsed certificate without bytes that its signature does not cover. Raises ValueError."""

    def __init__(self, leaf: bytes) -> None:
        whole = der.open_only(leaf, der.SEQUENCE)
        self.signed = whole.element(der.SEQUENCE)
        algorithm = whole.element(der.SEQUENCE)
        bits = whole.content(der.BIT_STRING)
        whole.end()
        inner = der.DerReader(self.signed).open(der.SEQUENCE)
        if inner.content(0xA0) != b"\x02\x01\x02":
            raise ValueError("not an X.509 certificate of version 3")
        inner.content(der.INTEGER)  # the serial number, 0 in all of them
        if inner.element(der.SEQUENCE) != algorithm or bits[:1] != b"\0":
            raise ValueError("it has bytes that its signature does not cover")
        self.signature = bits[1:]
        self.issuer = inner.element(der.SEQUENCE)
        validity = inner.open(der.SEQUENCE)
        self.start, self.end = der.time(validity), der.time(validity)
        validity.end()
        inner.content(der.SEQUENCE)  # the subject
        self.key = inner.element(der.SEQUENCE)
        self.extensions = _extensions(inner.open(0xA3))
        inner.end()


def _extensions(reader: der.DerReader) -> dict[bytes, bytes]:
    """Return the content of each extension by the content of its object identifier."""
    found: dict[bytes, bytes] = {}
    values = reader.open(der.SEQUENCE)
    reader.end()
    while values.tag is not None:
        each = values.open(der.SEQUENCE)
        name = each.content(der.OBJECT_IDENTIFIER)
        if each.tag == der.BOOLEAN:
            each.content(der.BOOLEAN)
        if name in found:
            raise ValueError("a duplicate extension")
        found[name] = each.content(der.OCTET_STRING)
        each.end()
    return found


def _signer_of(issuer: bytes, lines: Iterable[Line]) -> tuple[Line, x509.Certificate]:
    for each in lines:
        for signer in (each.vcek_signer, each.vlek_signer):
            if signer.subject.public_bytes() == issuer:
                return each, signer
    raise AdmissionError(f"its endorsement certificate was not issued under a pinned root of AMD; {_HOW_TO}")


def _check_signed(signed: bytes, signature: bytes, by: x509.Certificate) -> None:
    key = by.public_key()
    if not isinstance(key, rsa.RSAPublicKey):
        raise ValueError("the signer's key is not an RSA key")
    scheme = padding.PSS(padding.MGF1(hashes.SHA384()), _SALT_BYTES)
    try:
        key.verify(signature, signed, scheme, hashes.SHA384())
    except InvalidSignature:
        raise AdmissionError(f"its endorsement certificate was not signed by AMD; {_HOW_TO}") from None


def _check_time(name: str, start: datetime, end: datetime, moment: datetime) -> None:
    if not start <= moment <= end:
        raise AdmissionError(
            f"the certificate {name} is valid from {start:%Y-%m-%d} to {end:%Y-%m-%d}, and it is {moment:%Y-%m-%d}: "
            "fetch a new one, or set the clock"
        )


def _read(leaf: _Leaf, product: Product, is_vlek: bool) -> Endorsement:
    key = serialization.load_der_public_key(leaf.key)
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ValueError("its key is not on curve P-384")
    values = {name.removeprefix(_AMD): value for name, value in leaf.extensions.items() if name.startswith(_AMD)}
    missing = [part for part in product.tcb_parts if _TCB_OIDS[part] not in values]
    if missing:
        raise ValueError(f"it does not name the version of {', '.join(missing)}")
    tcb = Tcb(tuple((part, der.small_integer(values[_TCB_OIDS[part]])) for part in product.tcb_parts))
    chip, provider = values.get(_CHIP_OID), values.get(_PROVIDER_OID)
    if is_vlek:
        if chip is not None or provider is None:
            raise ValueError("the VLEK names no provider, or names a chip")
        return Endorsement(product, key, tcb, None, der.ia5_string(provider))
    if provider is not None or chip is None or len(chip) != product.chip_bytes:
        raise ValueError("the VCEK names no chip, or names a provider")
    return Endorsement(product, key, tcb, chip, None)


def _common_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else "without a name"
