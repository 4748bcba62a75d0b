"""Bundles: a worker is admitted only if all its proofs verify."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence import keys
from ringfence.admission.binding import Role
from ringfence.admission.entry import ENDORSEMENT_BYTES, Listing
from ringfence.admission.handshake import Handshake, State
from ringfence.admission.messages import HANDSHAKE, Hello, Message, MessageSplitter, Proof, Reason, encode
from ringfence.admission.policy import Policy, Prover, verify
from ringfence.admission.proofs import bundle, nvidia
from ringfence.admission.proofs.certificate import CertificateProver, CertificateVerifier, Rules
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.errors import AdmissionError, ConfigurationError, ProtocolError
from tests.certificates import Authority, now, spiffe
from tests.unit.admission_samples import SECRET, SUITES, Tamper, Worker, channels, converse, fixed_bytes, worker
from tests.unit.nvidia_records import serialized

AUTHORITY = Authority()
RULES = Rules((AUTHORITY.der,), ("spiffe://example.org/*",), "example.org")
SHARED = SharedSecret(SECRET, "run-7")
OTHER = SharedSecret(keys.Secret(bytes(range(50, 82))), "run-7")
CERTIFICATE = CertificateProver(AUTHORITY.issue(spiffe("a")))
FOREIGN = CertificateProver(Authority().issue(spiffe("a")))
POLICY = Policy((bundle.BundleVerifier([CertificateVerifier(RULES, now), SHARED]),))
GOOD = bundle.BundleProver([CERTIFICATE, SHARED])


def side(one: Worker, role: Role, peer: int, prover: Prover, policy: Policy = POLICY) -> Handshake:
    return Handshake(role, Hello(one.entry, policy.digest, SUITES, policy.kinds), frozenset({peer}), policy, prover)


def meet(prover: Prover, policy: Policy = POLICY, tamper: Tamper = lambda role, message: message) -> Handshake:
    """The result of a parent that verifies a child with the proof of `prover`."""
    parent, child = worker(0), worker(1)
    verifying = side(parent, Role.PARENT, 1, GOOD if policy is POLICY else prover, policy)
    converse(side(child, Role.CHILD, 0, prover, policy), verifying, channels(child, parent), tamper)
    return verifying


def objection(handshake: Handshake) -> str:
    assert handshake.admitted is None
    assert handshake.state is State.REFUSED
    assert handshake.refusal is not None
    assert handshake.refusal.reason is Reason.PROOF
    return handshake.refusal.text


def test_all_proofs_of_a_rule_admit() -> None:
    admitted = meet(GOOD).admitted
    assert admitted is not None
    assert admitted.proof_name == "shared secret and certificate"


def test_each_missing_or_wrong_part_is_refused() -> None:
    assert "accepts: shared secret and certificate" in objection(meet(SHARED))
    assert "accepts: shared secret and certificate" in objection(meet(CERTIFICATE))
    assert "does not have the shared secret" in objection(meet(bundle.BundleProver([CERTIFICATE, OTHER])))
    assert "not issued under an authority of the policy" in objection(meet(bundle.BundleProver([FOREIGN, SHARED])))


def test_either_of_two_rules_is_enough_and_both_errors_are_reported() -> None:
    second = Rules((Authority().der,), ("spiffe://example.com/*",), "example.com")
    policy = Policy((CertificateVerifier(second, now), CertificateVerifier(RULES, now)))
    assert meet(CERTIFICATE, policy).admitted is not None
    told = objection(meet(CertificateProver(AUTHORITY.issue(spiffe("a", "example.net"))), policy))
    assert "its signature was not made with its issuer's key; or: " in told
    assert "this rule is for example.org" in told


def test_another_combination_than_the_rules_is_named() -> None:
    class Quote(Prover):
        kind = 3

        def prove(self, binding: object) -> bytes:
            return b""

    told = objection(meet(bundle.BundleProver([CERTIFICATE, Quote()])))
    assert (
        "rank 1 presents proofs of kinds [2, 3]; this rule asks for shared secret and certificate, kinds [1, 2]" in told
    )


def bound_to(role: Role, one: Worker, two: Worker, exporter: bytes = b"e" * 32) -> Proof:
    """The bundle of worker `one`, in this role, for a connection with worker `two`."""
    child, parent = (one, two) if role is Role.CHILD else (two, one)
    ends = channels(child, parent, exporter)
    making = side(one, role, two.entry.rank, GOOD)
    making.begin(ends[0] if role is Role.CHILD else ends[1])
    making.receive(Hello(two.entry, POLICY.digest, SUITES, POLICY.kinds))
    return Proof(bundle.KIND, GOOD.prove(making._binding(of_peer=False)))


MISUSED = {
    "in the other role": lambda: bound_to(Role.PARENT, worker(1), worker(0)),
    "on another connection": lambda: bound_to(Role.CHILD, worker(1), worker(0), b"f" * 32),
    "relayed by a parent in between": lambda: bound_to(
        Role.CHILD, worker(1), worker(0, tls_key_digest=fixed_bytes("in between"))
    ),
}


@pytest.mark.promise("A proof made in one role is rejected in the other.")
@pytest.mark.promise("A man in the middle that relays an admission or another worker's evidence is rejected.")
@pytest.mark.parametrize("misuse", MISUSED)
def test_a_bundle_for_another_connection_is_refused(misuse: str) -> None:
    """One part of the right place does not carry the other, whichever it is."""
    here = dict(bundle.decode(bound_to(Role.CHILD, worker(1), worker(0)).proof, keys.PROOF_LIMIT_BYTES))
    elsewhere = dict(bundle.decode(MISUSED[misuse]().proof, keys.PROOF_LIMIT_BYTES))
    for used, reasons in (
        (elsewhere, ("does not have the shared secret", "is not over this connection")),
        (here | {1: elsewhere[1]}, ("does not have the shared secret",)),
        (here | {2: elsewhere[2]}, ("is not over this connection",)),
    ):

        def tamper(role: Role, message: Message, used: dict[int, bytes] = used) -> Message:
            if role is Role.CHILD and isinstance(message, Proof):
                return Proof(bundle.KIND, bundle.encode(tuple(sorted(used.items()))))
            return message

        told = objection(meet(GOOD, tamper=tamper))
        assert any(reason in told for reason in reasons)


@pytest.mark.promise("A proof that is reflected to its maker is rejected.")
def test_a_reflected_bundle_is_refused() -> None:
    child, parent = worker(1), worker(0)
    one = side(child, Role.CHILD, 0, GOOD)
    one.begin(channels(child, parent)[0])
    (proof,) = one.receive(Hello(parent.entry, POLICY.digest, SUITES, POLICY.kinds))
    one.receive(proof)
    objection(one)


@pytest.mark.parametrize("data", [b"", b"\0", b"\2", b"\1\1\0\0\0\0", bytes(100), b"\2\1\0\0\0\0\7\0\0\0\0"])
def test_a_malformed_bundle_is_refused(data: bytes) -> None:
    def tamper(role: Role, message: Message) -> Message:
        return Proof(bundle.KIND, data) if role is Role.CHILD and isinstance(message, Proof) else message

    assert "malformed" in objection(meet(GOOD, tamper=tamper))


def test_a_listing_needs_every_endorsement() -> None:
    entry = worker(1).entry
    good = Listing(entry, bundle.KIND, bytes(32), GOOD.endorse(entry, bytes(32)))
    assert verify(POLICY, good).proof_name == "shared secret and certificate"
    for bad in (
        replace(good, proof_digest=b"\1" * 32),
        replace(good, endorsement=b""),
        replace(good, endorsement=bundle.BundleProver([CERTIFICATE, OTHER]).endorse(entry, bytes(32))),
        replace(good, endorsement=bundle.BundleProver([FOREIGN, SHARED]).endorse(entry, bytes(32))),
        replace(good, kind=1, endorsement=SHARED.endorse(entry, bytes(32))),
    ):
        with pytest.raises(AdmissionError):
            verify(POLICY, bad)


parts = st.dictionaries(st.integers(1, 6), st.binary(max_size=40), min_size=2).map(
    lambda found: tuple(sorted(found.items()))
)


@settings(deadline=None)
@given(parts)
def test_what_is_encoded_comes_back(found: tuple[tuple[int, bytes], ...]) -> None:
    assert bundle.decode(bundle.encode(found), 40) == found
    for wrong in (
        bundle.encode(found) + b"\0",
        bundle.encode(found)[:-1],
        bundle.encode(found[::-1]),
        bundle.encode(found[:1]),
    ):
        with pytest.raises(ProtocolError):
            bundle.decode(wrong, 40)


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_what_is_read_encodes_to_the_same_bytes(data: bytes) -> None:
    try:
        found = bundle.decode(data, 80)
    except ProtocolError:
        return
    assert bundle.encode(found) == data


def test_a_certificate_a_quote_and_sixteen_gpus_fit_together() -> None:
    """With real sizes: a recorded quote, and the evidence of four recorded GPUs four times, with fewer shared certificates."""
    quote = (Path(__file__).parents[1] / "evidence" / "tdx" / "phala-tdx_quote").read_bytes()
    gpus = 4 * nvidia.encode([one.gpu for one in serialized("multi_gpu_hopper.json")])
    shown = Proof(bundle.KIND, bundle.encode([(2, bytes(ENDORSEMENT_BYTES)), (3, quote), (5, gpus)]))
    frames = MessageSplitter(HANDSHAKE, keys.ADMISSION_BYTES)
    frames.feed(encode(worker(1).hello) + encode(shown))
    assert (frames.next(), frames.next()) == (worker(1).hello, shown)
    assert len(encode(shown)) + 16 * 1024 < keys.ADMISSION_BYTES, "TLS wants its share"


def test_a_rule_has_each_kind_once_and_holds_no_bundle() -> None:
    for wrong in ([SHARED], [SHARED, OTHER], [SHARED, POLICY.verifiers[0]]):
        with pytest.raises(ConfigurationError, match="a rule must ask for"):
            bundle.BundleVerifier(wrong)
    assert bundle.verifier_for([SHARED]) is SHARED
    assert bundle.prover_for([SHARED]) is SHARED
