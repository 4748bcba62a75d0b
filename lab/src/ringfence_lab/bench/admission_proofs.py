"""The credentials of the workers of `ringfence bench admission`: a shared secret, or certificates of a temporary CA."""

from __future__ import annotations

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
from ringfence.cli import dev_ca

Admission = Callable[[int], tuple[Policy, Prover]]  # of the worker with this rank: its verifier and what it shows

_DOMAIN: Final = "bench.example"


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
    authority = _signed("authority", key, key, "")
    rules = Rules((authority,), (f"spiffe://{_DOMAIN}/worker/*",), _DOMAIN)

    def admission(rank: int) -> tuple[Policy, Prover]:
        own = ec.generate_private_key(ec.SECP256R1())
        credential = Credential((_signed(f"worker {rank}", own, key, f"/worker/{rank}"),), own)
        return Policy((CertificateVerifier(rules, time.time),)), CertificateProver(credential)

    return admission


PROOFS: Final[dict[str, Callable[[str], Admission]]] = {"secret": by_secret, "certificate": by_certificate}


def _signed(subject: str, key: ec.EllipticCurvePrivateKey, issuer_key: ec.EllipticCurvePrivateKey, path: str) -> bytes:
    """Return the certificate of a worker, or of the CA, which signs its own."""
    issues = key is issuer_key
    public, issuer = key.public_key(), issuer_key.public_key()
    begun = dev_ca.builder(_name(subject), _name("authority"), public, issuer, f"spiffe://{_DOMAIN}{path}", days=1)
    certificate = (
        begun.add_extension(x509.BasicConstraints(ca=issues, path_length=None), critical=True)
        .add_extension(dev_ca.key_usage(issues=issues), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )
    return certificate.public_bytes(Encoding.DER)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
