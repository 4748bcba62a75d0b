"""Vectors of proofs by certificate and by bundle: made by the code, and by a second reading of spec/admission.md.

Ed25519 signs without randomness, so a recorded key and certificate make the same proof for ever.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ringfence.admission.binding import Binding
from ringfence.admission.policy import Policy
from ringfence.admission.proofs import bundle, certificate, certificate_signature
from ringfence.admission.proofs.certificate import CertificateProver, CertificateVerifier, Credential, Rules
from ringfence.admission.proofs.secret import SharedSecret
from tests.certificates import Authority, now, spiffe
from tests.unit.admission_samples import SECRET, worker

FILE = Path(__file__).parents[1] / "vectors" / "proofs.json"
BINDING = Binding(b"the preimage of a binding")
PROOF_DIGEST = hashlib.sha256(b"a proof digest").digest()
ROSTER_DIGEST = hashlib.sha256(b"a roster digest").digest()
PATTERNS = ("spiffe://example.org/worker/*", "spiffe://example.org/other")


def from_code(key: bytes, leaf: bytes, authority: bytes) -> dict[str, Any]:
    credential = Credential((leaf,), Ed25519PrivateKey.from_private_bytes(key))
    rules = Rules((authority,), PATTERNS, "example.org")
    prover, shared, entry = CertificateProver(credential), SharedSecret(SECRET, "run-7"), worker(1).entry
    both = bundle.BundleProver([prover, shared])
    verifier = CertificateVerifier(rules, now)
    limited = Policy((verifier, bundle.BundleVerifier([verifier, shared])), min_workers=8, max_session_age=86400)
    return {
        "key": key.hex(),
        "certificate": leaf.hex(),
        "authority": authority.hex(),
        "binding": BINDING.digest.hex(),
        "entry": entry.encode().hex(),
        "proof digest": PROOF_DIGEST.hex(),
        "certificate proof": prover.prove(BINDING).hex(),
        "certificate endorsement": prover.endorse(entry, PROOF_DIGEST).hex(),
        "roster digest": ROSTER_DIGEST.hex(),
        "certificate acknowledgement": prover.sign_roster(1, ROSTER_DIGEST).hex(),
        "bundle acknowledgement": both.sign_roster(1, ROSTER_DIGEST).hex(),
        "bundle proof": both.prove(BINDING).hex(),
        "bundle endorsement": both.endorse(entry, PROOF_DIGEST).hex(),
        "certificate content": rules.content().hex(),
        "certificate content for ranks 0 to 7": replace(rules, ranks=(0, 7)).content().hex(),
        "policy digest": limited.digest.hex(),
    }


def fresh() -> dict[str, Any]:
    """Make new vectors with a new key and a new authority, after a change of the format."""
    key, authority = Ed25519PrivateKey.generate(), Authority()
    credential = authority.issue(spiffe("worker/1"), key=key)
    return from_code(key.private_bytes_raw(), credential.chain[0], authority.der)


@pytest.fixture(scope="module")
def vectors() -> Any:
    return json.loads(FILE.read_text())


def test_the_code_makes_the_vectors(vectors: Any) -> None:
    made = from_code(*(bytes.fromhex(vectors[name]) for name in ("key", "certificate", "authority")))
    assert made == vectors


def test_the_vectors_verify(vectors: Any) -> None:
    rules = Rules((bytes.fromhex(vectors["authority"]),), PATTERNS, "example.org")
    proof, endorsement = (bytes.fromhex(vectors[f"certificate {name}"]) for name in ("proof", "endorsement"))
    entry = worker(1).entry
    for shown, statement in (
        (proof, certificate_signature.Statement.proof(BINDING)),
        (endorsement, certificate_signature.Statement.endorsement(entry, PROOF_DIGEST)),
    ):
        assert certificate.verify(rules, shown, statement, now()).id == "spiffe://example.org/worker/1"


# -- the spec, read again -------------------------------------------------------------------------------------------


def label(name: str) -> bytes:
    return b"ringfence/1 " + name.encode() + b"\0"


def digest(name: str, *parts: bytes) -> bytes:
    return hashlib.sha256(label(name) + b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def blob(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def text(value: str) -> bytes:
    return len(value).to_bytes(2, "big") + value.encode()


def test_an_independent_implementation_makes_the_same_vectors(vectors: Any) -> None:
    value = {name: bytes.fromhex(each) for name, each in vectors.items()}
    public = x509.load_der_x509_certificate(value["certificate"]).public_key()
    assert isinstance(public, Ed25519PublicKey)
    chain = b"\1" + blob(value["certificate"])
    for name, parts in (("proof", (value["binding"],)), ("endorsement", (value["entry"], value["proof digest"]))):
        shown = value[f"certificate {name}"]
        assert shown.startswith(chain + (64).to_bytes(4, "big"))
        message = b" " * 64 + label(f"certificate {name}") + digest(f"certificate {name}", chain, *parts)
        public.verify(shown[-64:], message)
        together = value[f"bundle {name}"]
        assert together.startswith(b"\2" + b"\1" + (32).to_bytes(4, "big"))
        assert together.endswith(b"\2" + blob(shown))
        assert len(together) == 1 + 5 + 32 + 5 + len(shown)
    covered = (chain, (1).to_bytes(4, "big"), value["roster digest"])
    message = b" " * 64 + label("certificate acknowledgement") + digest("certificate acknowledgement", *covered)
    public.verify(value["certificate acknowledgement"], message)
    assert value["bundle acknowledgement"] == value["certificate acknowledgement"]
    patterns = sorted(PATTERNS)
    content = text("example.org") + b"\0\2" + text(patterns[0]) + text(patterns[1]) + blob(value["authority"])
    assert value["certificate content"] == content
    bound = b"".join(text(f"{each} ranks 0-7") for each in patterns)
    assert value["certificate content for ranks 0 to 7"] == text("example.org") + b"\0\2" + bound + blob(
        value["authority"]
    )
    both = b"\2" + b"\1" + blob(b"shared secret") + b"\2" + blob(content)
    limits = ((8).to_bytes(4, "big"), (86400).to_bytes(8, "big"), text("hybrid"))
    assert value["policy digest"] == digest("policy", *limits, b"\2", content, b"\7", both)
