"""What a renewal proves: the same name and kind as in the roster, by the policy of this session."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.admission.entry import Listing
from ringfence.admission.policy import Policy
from ringfence.admission.proofs.certificate import CertificateProver, CertificateVerifier, Rules
from ringfence.admission.renewal import Renewal, Renewals
from ringfence.admission.roster import seal
from ringfence.errors import AdmissionError
from ringfence.session.fresh_credentials import FreshCredentials, PolicyChangedError
from tests.certificates import Authority, now, spiffe
from tests.unit.admission_samples import fixed_bytes, worker

AUTHORITY = Authority()
POLICY = Policy((CertificateVerifier(Rules((AUTHORITY.der,), ("spiffe://example.org/w/*",), "example.org"), now),))
NONCE, EXPORTER = fixed_bytes("nonce"), fixed_bytes("exporter")


def prover(name: str) -> CertificateProver:
    return CertificateProver(AUTHORITY.issue(spiffe(name)))


def pair() -> tuple[Renewals, Renewals]:
    """Rank 0 and rank 1, admitted by certificates of their names."""
    entries = [worker(rank, 2).entry for rank in range(2)]
    digests = bytes(32), fixed_bytes("proof")
    listings = [
        Listing(entry, 2, digest, prover(f"w/{entry.rank}").endorse(entry, digest))
        for entry, digest in zip(entries, digests, strict=True)
    ]
    roster = seal(POLICY, entries[0], listings, 1, b"")
    return Renewals(roster, 0), Renewals(roster, 1)


def test_another_certificate_of_the_same_name_passes() -> None:
    verifier, own = pair()
    proof = prover("w/1").prove(own.own_binding(0, EXPORTER, NONCE))
    verifier.verify(POLICY, 1, EXPORTER, NONCE, Renewal(2, proof))


@pytest.mark.promise("A proof of verification again is valid for one challenge, one connection and one session.")
def test_another_name_that_the_policy_admits_does_not_pass() -> None:
    """An accomplice with a certificate of its own proves in the place of a worker that was revoked."""
    verifier, own = pair()
    proof = prover("w/7").prove(own.own_binding(0, EXPORTER, NONCE))
    with pytest.raises(AdmissionError, match=r"it proves to be 'spiffe://example.org/w/7', and was admitted as .*w/1'"):
        verifier.verify(POLICY, 1, EXPORTER, NONCE, Renewal(2, proof))


def test_a_policy_that_was_edited_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(AUTHORITY.pem)
    (tmp_path / "secret").write_text(fixed_bytes("secret").hex() + "\n")
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "policy.toml").write_text("version = 1\n[[admit]]\n[admit.secret]\n")
    environment = {
        "RINGFENCE_POLICY": str(tmp_path / "policy.toml"),
        "RINGFENCE_SECRET_FILE": str(tmp_path / "secret"),
    }
    with (
        pytest.raises(PolicyChangedError, match="its policy was changed while the session went on"),
        FreshCredentials(environment, "run", fixed_bytes("another policy")).read(),
    ):
        raise AssertionError("the policy is used")
