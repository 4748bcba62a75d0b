"""The credentials of the workers of `ringfence bench admission`: a shared secret, or certificates of a temporary CA."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from ringfence import keys
from ringfence.admission.policy import Policy, Prover
from ringfence.admission.proofs.certificate import CertificateProver, CertificateVerifier, Credential, Rules
from ringfence.admission.proofs.secret import SharedSecret

Admission = Callable[[int], tuple[Policy, Prover]]  # of the worker with this rank: its verifier and what it shows

_DOMAIN: Final = "bench.example"
_USES: Final = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign",
    "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


def by_secret(run_id: str) -> Admission:
    """All workers have the same secret."""
    secret = keys.Secret(bytes(range(keys.SECRET_BYTES)))

    def admission(rank: int) -> tuple[Policy, Prover]:
        shared = SharedSecret(secret, run_id)
        return Policy((shared,)), shared

    return admission


def by_certificate(run_id: str) -> Admission:
    """Each worker has its own P-256 certificate with a SPIFFE ID, issued by one CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    authority = _signed("authority", key, "authority", key, None).public_bytes(Encoding.DER)
    rules = Rules((authority,), (f"spiffe://{_DOMAIN}/worker/*",), _DOMAIN)

    def admission(rank: int) -> tuple[Policy, Prover]:
        own = ec.generate_private_key(ec.SECP256R1())
        certificate = _signed(f"worker {rank}", own, "authority", key, f"spiffe://{_DOMAIN}/worker/{rank}")
        credential = Credential((certificate.public_bytes(Encoding.DER),), own)
        return Policy((CertificateVerifier(rules, time.time),)), CertificateProver(credential)

    return admission


PROOFS: Final[dict[str, Callable[[str], Admission]]] = {"secret": by_secret, "certificate": by_certificate}


def _signed(
    subject: str, key: ec.EllipticCurvePrivateKey, issuer: str, issuer_key: ec.EllipticCurvePrivateKey, uri: str | None
) -> x509.Certificate:
    """Return the certificate of the CA or, with a URI, of a worker."""
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    granted = {"digital_signature"} if uri else {"key_cert_sign", "crl_sign"}
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.BasicConstraints(ca=uri is None, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**{use: use in granted for use in _USES}), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if uri is not None:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False
        )
    return builder.sign(issuer_key, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
