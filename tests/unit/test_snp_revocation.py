"""AMD's lists of revoked certificates, minted under a test root: what they revoke is refused, and so is a list that is none."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding

from ringfence.admission.proofs import kinds, snp
from ringfence.admission.proofs.snp_revocation import RevocationList, objection
from ringfence.errors import AdmissionError, PolicyError
from tests.unit.snp_mint import MEASUREMENT, foundry

DATA = bytes(range(64))


def verify(*lists: RevocationList, product: str = "milan") -> snp.Claims:
    """Verify a good report of this product line under a policy that names these lists."""
    mint = foundry(product)
    proof = snp.encode(mint.report(DATA), mint.certificate())
    return snp.verify(proof, DATA, replace(mint.rules, revoked=lists), time.time(), known=mint.roots)


def test_a_guest_on_no_revocation_list_is_admitted() -> None:
    assert verify().tcb == verify(foundry("milan").revoked()).tcb == verify(foundry("milan").revoked(2, 3)).tcb


@pytest.mark.promise("A platform whose firmware is outdated or revoked is rejected.")
def test_a_guest_with_a_revoked_signer_is_refused() -> None:
    with pytest.raises(
        AdmissionError, match="AMD has revoked the key that signed its endorsement certificate, for Milan"
    ):
        verify(foundry("milan").revoked(3, 1))
    with pytest.raises(AdmissionError, match="AMD has revoked"):
        verify(foundry("milan").revoked(), foundry("milan").revoked(1))


def test_with_any_list_each_product_line_needs_one() -> None:
    with pytest.raises(
        AdmissionError, match="there is no list of revoked certificates for Turin: name it in crl"
    ) as caught:
        verify(foundry("milan").revoked(), product="turin")
    assert caught.value.to_peer == "there is no list of revoked certificates for Turin"
    assert verify(foundry("milan").revoked(1), foundry("turin").revoked(), product="turin")


@pytest.mark.parametrize("days", [(-30, -1), (1, 30)], ids=["expired", "of tomorrow"])
def test_a_list_counts_within_its_time_only(days: tuple[int, int]) -> None:
    with pytest.raises(AdmissionError, match=r"for Milan is valid from .* fetch a new one"):
        verify(foundry("milan").revoked(days=days))


def test_a_list_with_a_wrong_signature_is_refused() -> None:
    """Otherwise, write access to a policy's folder would be enough to undo a revocation."""
    with pytest.raises(AdmissionError, match="was not signed by AMD"):
        verify(foundry("milan").revoked(key=rsa.generate_private_key(65537, 2048)))


def test_every_flipped_bit_of_a_list_is_refused() -> None:
    good = foundry("milan").revoked(2)
    for place in range(len(good.raw)):
        changed = bytearray(good.raw)
        changed[place] ^= 1 << (place % 8)
        with pytest.raises((AdmissionError, ValueError)):
            verify(RevocationList.parse(bytes(changed)))


def test_an_invalid_list_is_reported_before_it_is_used() -> None:
    mint, now = foundry("milan"), time.time()
    roots = [line.root for line in mint.roots.values()]
    assert objection(mint.revoked(7), roots, now) is None
    assert objection(mint.revoked(days=(-30, -1)), roots, now) is None, "that it has expired is said elsewhere"
    forged = mint.revoked(key=rsa.generate_private_key(65537, 2048))
    assert "was not signed by AMD" in str(objection(forged, roots, now))
    assert "none of AMD's roots issued it" in str(objection(foundry("turin").revoked(), roots, now))
    assert "it is valid from" in str(objection(mint.revoked(days=(2, 30)), roots, now))


def policy(folder: Path, crl: str) -> bytes:
    values = ", ".join(f"{part} = {value}" for part, value in foundry("milan").rules.minimum_tcb[0][1].parts)
    return (
        f'version = 1\n[[admit]]\n[admit.snp]\nmeasurement = "{MEASUREMENT.hex()}"\ncrl = {crl}\n'
        f"[admit.snp.minimum_tcb]\nmilan = {{ {values} }}\n"
    ).encode()


def test_a_policy_names_lists_as_files_in_either_form(tmp_path: Path) -> None:
    found = foundry("milan").revoked(7)
    files = {"a.crl": found.raw, "b.pem": found.list.public_bytes(Encoding.PEM)}
    read = kinds.read(policy(tmp_path, '["a.crl", "b.pem"]'), lambda name, limit: files[name])
    rules = dict(read.rules[0].proofs)["snp"]
    assert [each.list for each in rules.revoked] == [found.list, found.list]  # type: ignore[attr-defined]
    without = kinds.read(policy(tmp_path, '["a.crl"]'), lambda name, limit: files[name])
    assert kinds.digest_of(read) != kinds.digest_of(without), "all workers must verify by the same lists"
    assert any("not revoked by AMD's list, which is valid until" in line for line in rules.explain())


@pytest.mark.parametrize("content", [b"", b"-----BEGIN X509 CRL-----", b"\x30\x03\x02\x01\x00", b"x" * 10_000])
def test_a_file_that_is_no_list_is_an_error_of_the_policy(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(PolicyError, match=r"crl: not a certificate revocation list.*kdsintf") as caught:
        kinds.read(policy(tmp_path, '"a.crl"'), lambda name, limit: content)
    assert len(str(caught.value)) < 500


@pytest.mark.promise("What one rule of a policy revokes, every rule rejects.")
def test_what_a_list_of_another_rule_revokes_is_refused() -> None:
    """Any rule admits, so one that names no list, or an older one, would admit what the other rule refuses."""
    mint = foundry("milan")
    good, bad = mint.revoked(days=(-9, 30)), mint.revoked(1)
    files = {"good.crl": good.raw, "bad.crl": bad.raw}
    values = ", ".join(f"{part} = {value}" for part, value in mint.rules.minimum_tcb[0][1].parts)
    table = f'[[admit]]\n[admit.snp]\nmeasurement = "{MEASUREMENT.hex()}"\nminimum_tcb.milan = {{ {values} }}\n'
    proof = snp.encode(mint.report(DATA), mint.certificate())
    for first in ("", 'crl = "good.crl"\n'):
        policy = kinds.read(
            f'version = 1\n{table}{first}{table}crl = "bad.crl"\n'.encode(), lambda path, limit: files[path]
        )
        for rule in policy.rules:
            rules = rule.proofs[0][1]
            assert isinstance(rules, snp.Rules)
            with pytest.raises(AdmissionError, match="AMD has revoked"):
                snp.verify(proof, DATA, rules, time.time(), known=mint.roots)


def test_a_rule_without_a_list_needs_none_for_its_own_product_line() -> None:
    mint, turin = foundry("milan"), foundry("turin")
    proof = snp.encode(mint.report(DATA), mint.certificate())
    rules = replace(mint.rules, listed=(turin.revoked(1),))
    assert snp.verify(proof, DATA, rules, time.time(), known=mint.roots).product.name == "milan"
