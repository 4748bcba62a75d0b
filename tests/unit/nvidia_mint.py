"""GPUs for tests: keys, certificates and reports in NVIDIA's format, under a root of the tests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from ringfence.admission.proofs.nvidia import Gpu

BEGIN = datetime(2025, 1, 1, tzinfo=UTC)
END = datetime(2035, 1, 1, tzinfo=UTC)
NOW = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
DRIVER = "570.124.06"
VBIOS = "96.00.A5.00.01"
_SHA384 = bytes.fromhex("0609608648016503040202")
Extensions = list[tuple[x509.ExtensionType, bool]]


def key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def usage(*, signs: bool = False, issues: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=issues,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def issuing(path_length: int | None = None) -> Extensions:
    return [(x509.BasicConstraints(ca=True, path_length=path_length), True), (usage(issues=True), True)]


@dataclass
class Issuer:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def issue(
        self,
        name: str,
        extensions: Extensions,
        *,
        begin: datetime = BEGIN,
        end: datetime = END,
        own_key: ec.EllipticCurvePrivateKey | None = None,
    ) -> Issuer:
        return _issue(name, extensions, self.certificate.subject, self.key, own_key or key(), begin, end)

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)


def root() -> Issuer:
    own = key()
    return _issue("Test Device Identity CA", issuing(), None, own, own, BEGIN, END)


def _issue(
    name: str,
    extensions: Extensions,
    issuer: x509.Name | None,
    signer: ec.EllipticCurvePrivateKey,
    own: ec.EllipticCurvePrivateKey,
    begin: datetime,
    end: datetime,
) -> Issuer:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
    )
    for value, critical in extensions:
        builder = builder.add_extension(value, critical)
    return Issuer(builder.sign(signer, hashes.SHA384()), own)


def der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    length = bytes([len(body)]) if len(body) < 0x80 else bytes([0x81, len(body)])
    return bytes([tag]) + length + body


def device_name(name: str) -> tuple[x509.ExtensionType, bool]:
    other = x509.OtherName(x509.ObjectIdentifier("1.3.6.1.4.1.412.274.1"), der(0x0C, name.encode()))
    return x509.SubjectAlternativeName([other]), False


def device_id(issuer: ec.EllipticCurvePublicKey, firmware_id: bytes) -> tuple[x509.ExtensionType, bool]:
    spki = issuer.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    value = der(0x30, der(0x02, b"\1"), spki, der(0x30, _SHA384, der(0x04, firmware_id)))
    return x509.UnrecognizedExtension(x509.ObjectIdentifier("2.23.133.5.4.1"), value), False


def tcb_info(*firmware_ids: bytes, flags: bytes | None = None) -> tuple[x509.ExtensionType, bool]:
    """The firmware extension of Blackwell. `flags`: the content of its BIT STRING."""
    values = (der(0x30, _SHA384, der(0x04, each)) for each in firmware_ids)
    value = der(0x30, der(0x80, b"TEST"), der(0xA6, *values), b"" if flags is None else der(0x87, flags))
    return x509.UnrecognizedExtension(x509.ObjectIdentifier("2.23.133.5.4.1.1"), value), False


@dataclass
class Device:
    """A GPU that signs any nonce."""

    name: str = "NVIDIA:GH100:48B02D0000000001"
    firmware_id: bytes = hashlib.sha384(b"firmware").digest()
    measurements: dict[int, bytes] = field(default_factory=lambda: {i: bytes([i]) * 48 for i in range(1, 65)})
    opaque: dict[int, bytes] = field(default_factory=dict)
    above: Sequence[Issuer] = ()  # from the issuer of the boot ROM up to below the root
    rom: Issuer | None = None
    leaf: Issuer | None = None

    @classmethod
    def under(cls, top: Issuer, number: int = 1) -> Device:
        model = top.issue("Test GH100 Identity", issuing())
        provisioner = model.issue("Test GH100 Provisioner ICA 1", issuing())
        return cls(name=f"NVIDIA:GH100:48B02D{number:010X}", above=(provisioner, model)).boot()

    def boot(self) -> Device:
        """The boot ROM certifies a fresh key for the firmware that it starts."""
        self.rom = self.rom or self.above[0].issue("GH100 A01 GSP BROM", issuing())
        self.leaf = self.rom.issue("GH100 A01 GSP FMC LF", self.leaf_extensions())
        return self

    def leaf_extensions(self) -> Extensions:
        assert self.rom is not None
        return [
            (usage(signs=True), True),
            device_name(self.name),
            device_id(self.rom.key.public_key(), self.firmware_id),
        ]

    @property
    def chain(self) -> tuple[bytes, ...]:
        assert self.leaf is not None and self.rom is not None
        return tuple(each.der for each in (self.leaf, self.rom, *self.above))

    def fields(self) -> dict[int, bytes]:
        driver = DRIVER.encode() + b"\0"
        vbios = bytes.fromhex("00a5009601000000")
        return {6: vbios, 3: driver, 20: self.firmware_id, 21: b"\x55"} | self.opaque

    def report(self, nonce: bytes) -> bytes:
        assert self.leaf is not None
        blocks = b"".join(
            bytes((index, 1))
            + (3 + len(value)).to_bytes(2, "little")
            + b"\1"
            + len(value).to_bytes(2, "little")
            + value
            for index, value in self.measurements.items()
        )
        opaque = b"".join(
            kind.to_bytes(2, "little") + len(value).to_bytes(2, "little") + value
            for kind, value in self.fields().items()
        )
        signed = b"".join(
            (
                b"\x11\xe0\x01\xff" + nonce + b"\0",
                b"\x11\x60\0\0" + bytes([len(self.measurements)]) + len(blocks).to_bytes(3, "little") + blocks,
                hashlib.sha256(b"the device's nonce").digest(),
                len(opaque).to_bytes(2, "little") + opaque,
            )
        )
        r, s = decode_dss_signature(self.leaf.key.sign(signed, ec.ECDSA(hashes.SHA384())))
        return signed + r.to_bytes(48, "big") + s.to_bytes(48, "big")

    def gpu(self, nonce: bytes) -> Gpu:
        return Gpu(self.report(nonce), self.chain)
