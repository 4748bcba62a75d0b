"""A test root in Intel's format, with a PCK, collateral and quotes over any REPORTDATA: handshakes need fresh quotes."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from functools import cache, cached_property

import dcap_qvl
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID, ObjectIdentifier

from ringfence.admission.proofs import tdx_quote
from ringfence.admission.proofs.tdx import Rules
from ringfence.admission.proofs.tdx_collateral import Collateral
from tests.unit.tdx_records import FOLDER, RECORDS

DAY = datetime.timedelta(days=1)
SGX_EXTENSION = ObjectIdentifier("1.2.840.113741.1.13.1")
ROOT, SIGNING = "Intel SGX Root CA", "Intel SGX TCB Signing"
CAS = {"platform": "Intel SGX PCK Platform CA", "processor": "Intel SGX PCK Processor CA"}
HEADER, BODY = slice(0, 48), slice(48, 632)
QE_REPORT = slice(636 + 64 + 64 + 6, 636 + 64 + 64 + 6 + 384)


def name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def raw_signature(key: ec.EllipticCurvePrivateKey, message: bytes) -> bytes:
    r, s = decode_dss_signature(key.sign(message, ec.ECDSA(hashes.SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def raw_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    numbers = key.public_key().public_numbers()
    return numbers.x.to_bytes(32, "big") + numbers.y.to_bytes(32, "big")


def pem(*certificates: x509.Certificate) -> str:
    return "".join(each.public_bytes(Encoding.PEM).decode() for each in certificates)


class Foundry:
    """Test keys in place of Intel's, and one platform modelled on a recorded one."""

    def __init__(self) -> None:
        self._now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        self._recorded = RECORDS["dstack"].quote
        keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(6)]
        self._root_key, self._pck_key, self._signing_key, self._attestation_key = keys[:4]
        self._ca_keys = dict(zip(CAS, keys[4:], strict=True))
        self._root = self._certificate(ROOT, self._root_key, ROOT, self._root_key, is_ca=True)
        self._cas = {
            each: self._certificate(CAS[each], self._ca_keys[each], ROOT, self._root_key, is_ca=True) for each in CAS
        }
        self._signing = self._certificate(SIGNING, self._signing_key, ROOT, self._root_key, is_ca=False)
        chain = dcap_qvl.parse_quote(self._recorded).cert_chain_pem_bytes()
        assert chain is not None
        platform = x509.load_pem_x509_certificate(chain).extensions.get_extension_for_oid(SGX_EXTENSION).value
        assert isinstance(platform, x509.UnrecognizedExtension)
        self._pcks = {
            each: self._certificate(
                "Intel SGX PCK Certificate", self._pck_key, CAS[each], key, is_ca=False, platform=platform
            )
            for each, key in self._ca_keys.items()
        }

    @property
    def root(self) -> bytes:
        return self._root.public_bytes(Encoding.DER)

    @cached_property
    def rules(self) -> Rules:
        body = tdx_quote.read(self._recorded)
        return Rules((body.mrtd,), tuple((each,) for each in body.rtmrs), (self.collateral(),))

    def collateral(
        self,
        *,
        status: str | None = None,
        qe_status: str | None = None,
        is_revoked: bool = False,
        is_ca_revoked: bool = False,
        ca: str = "platform",
        fmspc: str | None = None,
        number: int = 17,
        age: int = 1,
        days: int = 20,
    ) -> Collateral:
        """Collateral issued `age` days ago that expires in `days`.

        `status` and `qe_status`: what it says of this platform's TCB and of its quoting enclave. `is_revoked` and
        `is_ca_revoked`: its PCK certificate, or the authority of that, is. `number`: its evaluation data number.
        """
        recorded = json.loads((FOLDER / RECORDS["dstack"].collateral_file).read_text())
        info, identity = json.loads(recorded["tcb_info"]), json.loads(recorded["qe_identity"])
        info["fmspc"] = fmspc or info["fmspc"]
        issued, ends = self._now - age * DAY, self._now + days * DAY
        for each, said in ((info, status), (identity, qe_status)):
            each["tcbEvaluationDataNumber"] = number
            each["issueDate"], each["nextUpdate"] = (f"{at:%Y-%m-%dT%H:%M:%SZ}" for at in (issued, ends))
            for level in each["tcbLevels"] if said else ():
                level |= {"tcbStatus": said, "advisoryIDs": ["INTEL-SA-00001"]}
        # The form must not change otherwise: it is what is signed.
        info, identity = (json.dumps(each, separators=(",", ":")) for each in (info, identity))
        signing = pem(self._signing, self._root)
        pcks, cas = [self._pcks[ca]] if is_revoked else [], list(self._cas.values()) if is_ca_revoked else []
        parts = {
            "pck_crl_issuer_chain": pem(self._cas[ca], self._root),
            "root_ca_crl": self._revocations(ROOT, self._root_key, cas, issued, ends).hex(),
            "pck_crl": self._revocations(CAS[ca], self._ca_keys[ca], pcks, issued, ends).hex(),
            "tcb_info_issuer_chain": signing,
            "tcb_info": info,
            "tcb_info_signature": raw_signature(self._signing_key, info.encode()).hex(),
            "qe_identity_issuer_chain": signing,
            "qe_identity": identity,
            "qe_identity_signature": raw_signature(self._signing_key, identity.encode()).hex(),
        }
        return Collateral.parse(json.dumps(parts).encode())

    def quote(
        self,
        report_data: bytes,
        *,
        changes: Mapping[int, bytes] | None = None,
        service_td: bytes | None = None,
        key: ec.EllipticCurvePrivateKey | None = None,
        ca: str = "platform",
    ) -> bytes:
        """A quote of version 4, or of version 5 with a `service_td`. `changes`: bytes at places of the body."""
        body = bytearray(self._recorded[BODY])
        header = self._recorded[HEADER]
        if service_td is not None:
            body += bytes(body[:16]) + service_td  # TEE_TCB_SVN again
        for place, value in {520: report_data, **(changes or {})}.items():
            body[place : place + len(value)] = value
        if service_td is not None:
            header = b"\5" + header[1:] + (3).to_bytes(2, "little") + len(body).to_bytes(4, "little")
        signed = header + bytes(body)
        own = self._attestation_key
        data = bytes(32)
        report = bytearray(self._recorded[QE_REPORT])
        report[320:384] = hashlib.sha256(raw_key(own) + data).digest() + bytes(32)
        chain = pem(self._pcks[ca], self._cas[ca], self._root).encode()
        inner = bytes(report) + raw_signature(self._pck_key, bytes(report))
        inner += len(data).to_bytes(2, "little") + data
        inner += (5).to_bytes(2, "little") + len(chain).to_bytes(4, "little") + chain
        outer = raw_signature(key or own, signed) + raw_key(own)
        outer += (6).to_bytes(2, "little") + len(inner).to_bytes(4, "little") + inner
        return signed + len(outer).to_bytes(4, "little") + outer

    def _revocations(
        self,
        issuer: str,
        key: ec.EllipticCurvePrivateKey,
        revoked: list[x509.Certificate],
        issued: datetime.datetime,
        ends: datetime.datetime,
    ) -> bytes:
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(name(issuer))
            .last_update(issued)
            .next_update(ends)
            .add_extension(x509.CRLNumber(1), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        )
        for each in revoked:
            entry = x509.RevokedCertificateBuilder().serial_number(each.serial_number).revocation_date(issued)
            builder = builder.add_revoked_certificate(entry.build())
        return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)

    def _certificate(
        self,
        common: str,
        key: ec.EllipticCurvePrivateKey,
        issuer: str,
        by: ec.EllipticCurvePrivateKey,
        *,
        is_ca: bool,
        platform: x509.UnrecognizedExtension | None = None,
    ) -> x509.Certificate:
        usage = x509.KeyUsage(not is_ca, False, False, False, False, is_ca, is_ca, False, False)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name(common))
            .issuer_name(name(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - 60 * DAY)
            .not_valid_after(self._now + 30 * DAY)
            .add_extension(x509.BasicConstraints(is_ca, None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
        )
        if platform is not None:
            builder = builder.add_extension(platform, critical=False)
        return builder.sign(by, hashes.SHA256())


@cache
def foundry() -> Foundry:
    return Foundry()
