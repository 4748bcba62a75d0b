"""A test root in AMD's format, which signs reports over any REPORT_DATA: handshakes need fresh reports."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from functools import cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID, ObjectIdentifier

from ringfence.admission.proofs.snp import Rules
from ringfence.admission.proofs.snp_chain import Roots, line
from ringfence.admission.proofs.snp_report import PRODUCTS, REPORT_BYTES, SIGNED_BYTES, Tcb
from ringfence.admission.proofs.snp_revocation import RevocationList

DAY = datetime.timedelta(days=1)
PSS = padding.PSS(padding.MGF1(hashes.SHA384()), 48)
OIDS = {"bootloader": "3.1", "tee": "3.2", "snp": "3.3", "microcode": "3.8", "fmc": "3.9"}
MEASUREMENT = bytes(range(48))
CPU = {"milan": (0x19, 0x01), "genoa": (0x19, 0x11), "turin": (0x1A, 0x02)}
CURRENT, REPORTED, COMMITTED, LAUNCH = 0x38, 0x180, 0x1E0, 0x1F0  # where a report's TCB versions are
PLATFORM_INFO, ALIAS_CHECK = 0x40, 1 << 5
VERSIONS = {"fmc": 1, "bootloader": 4, "tee": 0, "snp": 24, "microcode": 219}


def name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def number(value: int) -> bytes:
    return b"\x02\x01" + bytes([value]) if value < 0x80 else b"\x02\x02\x00" + bytes([value])


class Foundry:
    """Test keys in place of AMD's, for one product line. Making RSA keys is slow: share one through `foundry()`."""

    def __init__(self, product: str = "milan") -> None:
        self.product = PRODUCTS[product]
        self._now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        self._root_key, self._vcek_key, self._vlek_key = (rsa.generate_private_key(65537, 2048) for _ in range(3))
        line_name = product.capitalize()
        self._signers = {
            "vcek": (f"SEV-{line_name}", self._vcek_key),
            "vlek": (f"SEV-VLEK-{line_name}", self._vlek_key),
        }
        root = self._sign(f"ARK-{line_name}", self._root_key.public_key(), f"ARK-{line_name}", self._root_key, {})
        above = [root]
        for common, key in self._signers.values():
            above.append(self._sign(common, key.public_key(), f"ARK-{line_name}", self._root_key, {}))
        self.pem = b"".join(each.public_bytes(Encoding.PEM) for each in above)
        self.roots: Roots = {product: line(self.product, self.pem)}
        self.chip_key = ec.generate_private_key(ec.SECP384R1())
        self.chip = bytes(range(1, self.product.chip_bytes + 1))

    @property
    def rules(self) -> Rules:
        parts = tuple((part, VERSIONS[part]) for part in self.product.tcb_parts)
        return Rules(measurements=(MEASUREMENT,), minimum_tcb=((self.product.name, Tcb(parts)),))

    def certificate(
        self,
        kind: str = "vcek",
        *,
        versions: Mapping[str, int] = VERSIONS,
        chip: bytes | None = None,
        days: tuple[int, int] = (-1, 30),
    ) -> bytes:
        """A leaf. `days`: from when to when it is valid, counted from now."""
        values = {OIDS[part]: number(versions[part]) for part in self.product.tcb_parts}
        if kind == "vcek":
            values["4"] = self.chip if chip is None else chip
        else:
            values["5"] = b"\x16\x04test"
        common, key = self._signers[kind]
        leaf = self._sign(f"SEV-{kind.upper()}", self.chip_key.public_key(), common, key, values, days)
        return leaf.public_bytes(Encoding.DER)

    def report(
        self,
        report_data: bytes,
        *,
        versions: Mapping[str, int] = VERSIONS,
        changes: Mapping[int, bytes] | None = None,
        key: ec.EllipticCurvePrivateKey | None = None,
    ) -> bytes:
        """A signed report of version 5. `changes`: bytes to put at places before it is signed."""
        raw = bytearray(REPORT_BYTES)
        tcb = self.tcb(versions)
        fields = {
            **dict.fromkeys((CURRENT, REPORTED, COMMITTED, LAUNCH), tcb),
            PLATFORM_INFO: bytes([ALIAS_CHECK]),
            0x00: (5).to_bytes(4, "little"),
            0x08: (0x30000).to_bytes(8, "little"),
            0x34: (1).to_bytes(4, "little"),
            0x50: report_data,
            0x90: MEASUREMENT,
            0x188: bytes(CPU[self.product.name]),
            0x1A0: self.chip.ljust(64, b"\0"),
            **(changes or {}),
        }
        for place, value in fields.items():
            raw[place : place + len(value)] = value
        r, s = decode_dss_signature((key or self.chip_key).sign(bytes(raw[:SIGNED_BYTES]), ec.ECDSA(hashes.SHA384())))
        raw[0x2A0:0x330] = r.to_bytes(72, "little") + s.to_bytes(72, "little")
        return bytes(raw)

    def tcb(self, versions: Mapping[str, int]) -> bytes:
        """The 8 bytes of a TCB_VERSION."""
        raw = bytearray(8)
        for part, place in zip(self.product.tcb_parts, self.product.tcb_places, strict=True):
            raw[place] = versions[part]
        return bytes(raw)

    def revoked(
        self, *serials: int, days: tuple[int, int] = (-1, 30), key: rsa.RSAPrivateKey | None = None
    ) -> RevocationList:
        """A list of revoked certificates by the root. Every signer here has serial number 1."""
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(name(f"ARK-{self.product.name.capitalize()}"))
            .last_update(self._now + days[0] * DAY)
            .next_update(self._now + days[1] * DAY)
        )
        for serial in serials:
            one = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(self._now - DAY).build()
            builder = builder.add_revoked_certificate(one)
        signed = builder.sign(key or self._root_key, hashes.SHA384(), rsa_padding=PSS)
        return RevocationList.parse(signed.public_bytes(Encoding.DER))

    def _sign(
        self,
        common: str,
        key: rsa.RSAPublicKey | ec.EllipticCurvePublicKey,
        issuer: str,
        by: rsa.RSAPrivateKey,
        values: Mapping[str, bytes],
        days: tuple[int, int] = (-1, 30),
    ) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(name(common))
            .issuer_name(name(issuer))
            .public_key(key)
            .serial_number(1)
            .not_valid_before(self._now + days[0] * DAY)
            .not_valid_after(self._now + days[1] * DAY)
        )
        for oid, value in values.items():
            extension = x509.UnrecognizedExtension(ObjectIdentifier("1.3.6.1.4.1.3704.1." + oid), value)
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(by, hashes.SHA384(), rsa_padding=PSS)


@cache
def foundry(product: str = "milan") -> Foundry:
    return Foundry(product)
