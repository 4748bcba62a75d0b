"""Certificate authorities and certificates for tests, valid and invalid."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from ringfence.admission.proofs.certificate import Credential
from ringfence.admission.proofs.certificate_signature import PrivateKey

NOW = datetime.datetime(2030, 6, 1, 12, 0, 0, tzinfo=datetime.UTC)
HOUR = datetime.timedelta(hours=1)


def now() -> float:
    return NOW.timestamp()


def spiffe(path: str, domain: str = "example.org") -> x509.GeneralName:
    return x509.UniformResourceIdentifier(f"spiffe://{domain}/{path}")


def key_usage(*granted: str) -> x509.KeyUsage:
    names = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{name: name in granted for name in names})


SIGNS = key_usage("digital_signature")
ISSUES = key_usage("key_cert_sign", "crl_sign")
# A list of TLS features with one that `cryptography` does not know: reading it raises a KeyError.
ODD_FEATURE = x509.UnrecognizedExtension(x509.TLSFeature.oid, bytes.fromhex("3003020101"))


@dataclass(frozen=True)
class Authority:
    """Issues any certificate, valid or not."""

    name: str = "test authority"
    key: PrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    issuer: Authority | None = None
    start: datetime.datetime = NOW - 24 * HOUR
    end: datetime.datetime = NOW + 24 * HOUR

    @cached_property
    def certificate(self) -> x509.Certificate:
        issuer = self.issuer or self
        return issuer.sign(self.name, self.key, (), ca=True, usage=ISSUES, start=self.start, end=self.end)

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def sign(
        self,
        subject: str,
        key: PrivateKey,
        names: Sequence[x509.GeneralName],
        *,
        ca: bool = False,
        usage: x509.KeyUsage | None = SIGNS,
        purposes: Sequence[x509.ObjectIdentifier] = (),
        start: datetime.datetime = NOW - HOUR,
        end: datetime.datetime = NOW + HOUR,
        extra: Sequence[x509.ExtensionType] = (),
        serial: int | None = None,
    ) -> x509.Certificate:
        own, number = self.key.public_key(), serial or (7 if ca else 8)
        builder = (
            x509.CertificateBuilder(_name(self.name), _name(subject), key.public_key(), number, start, end)
            .add_extension(x509.BasicConstraints(ca, None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(own), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        if usage is not None:
            builder = builder.add_extension(usage, critical=True)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        if purposes:
            builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        for extension in extra:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self.key, None if isinstance(self.key, ed25519.Ed25519PrivateKey) else hashes.SHA256())

    def issue(self, *names: x509.GeneralName, key: PrivateKey | None = None, **wrong: object) -> Credential:
        """Return a worker's credential; keyword arguments go to `sign`."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        leaf = self.sign("worker", key, names, **wrong)  # type: ignore[arg-type]
        between = (self.der,) if self.issuer is not None else ()
        return Credential((leaf.public_bytes(Encoding.DER), *between), key)

    def revoke(
        self,
        *serials: int,
        number: int | None = 1,
        start: datetime.datetime = NOW - HOUR,
        end: datetime.datetime = NOW + HOUR,
        key: PrivateKey | None = None,
        issuer: str | None = None,
        extra: Sequence[tuple[x509.ExtensionType, bool]] = (),
    ) -> bytes:
        """Return a list of revoked certificates in DER, valid or not. `extra`: extensions, and whether each is critical."""
        own = self.key.public_key()
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(_name(issuer or self.name))
            .last_update(start)
            .next_update(end)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(own), critical=False)
        )
        if number is not None:
            builder = builder.add_extension(x509.CRLNumber(number), critical=False)
        for extension, critical in extra:
            builder = builder.add_extension(extension, critical)
        for serial in serials:
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(start)
            reason = x509.CRLReason(x509.ReasonFlags.key_compromise)
            builder = builder.add_revoked_certificate(entry.add_extension(reason, critical=False).build())
        signer = key or self.key
        signed = builder.sign(signer, None if isinstance(signer, ed25519.Ed25519PrivateKey) else hashes.SHA256())
        return signed.public_bytes(Encoding.DER)


def private_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
