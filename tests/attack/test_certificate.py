"""Attacks on admission by certificate: other channels, reflection, roles, relays, names, times. TLS is real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from cryptography import x509

from ringfence import keys
from ringfence.admission.binding import Role, TlsValues
from ringfence.admission.entry import Listing
from ringfence.admission.handshake import Handshake, State
from ringfence.admission.messages import Admit, Hello, Message, Proof, Reason, Refuse
from ringfence.admission.policy import Policy, Prover, verify
from ringfence.admission.proofs import bundle
from ringfence.admission.proofs.certificate import CertificateProver, CertificateVerifier, Credential, Rules
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.config.settings import Settings
from ringfence.errors import AdmissionError
from ringfence.transport.tls import Credentials
from tests.attack.unauthenticated_peer import UnauthenticatedPeer, channel_of, tls_pair
from tests.certificates import HOUR, NOW, ODD_FEATURE, Authority, now, spiffe
from tests.integration.join_cluster import World
from tests.unit.admission_samples import SECRET, SUITES, Tamper, converse, fixed_bytes, worker

AUTHORITY = Authority()
RULES = Rules((AUTHORITY.der,), ("spiffe://example.org/worker/*",), "example.org")
POLICY = Policy((CertificateVerifier(RULES, now),))


@dataclass(frozen=True)
class Party:
    """A worker or an attacker: a rank, a TLS key, and a prover."""

    rank: int
    tls: Credentials
    prover: Prover
    policy: Policy = POLICY

    @property
    def hello(self) -> Hello:
        return self.hello_in(worker(0).entry.world_size)

    def hello_in(self, world_size: int) -> Hello:
        entry = worker(self.rank, world_size, tls_key_digest=self.tls.key_digest).entry
        return Hello(entry, self.policy.digest, SUITES, self.policy.kinds)

    def handshake(self, role: Role, peer: int) -> Handshake:
        return Handshake(role, self.hello, frozenset({peer}), self.policy, self.prover)


def party(rank: int, credential: Credential | None = None) -> Party:
    return Party(rank, Credentials(), CertificateProver(credential or AUTHORITY.issue(spiffe(f"worker/{rank}"))))


def meet(child: Party, parent: Party, tamper: Tamper = lambda role, message: message) -> tuple[Handshake, Handshake]:
    near, far = tls_pair(child.tls, parent.tls)
    one, two = child.handshake(Role.CHILD, parent.rank), parent.handshake(Role.PARENT, child.rank)
    converse(one, two, (channel_of(near), channel_of(far)), tamper)
    return one, two


def refusal_of(handshake: Handshake, reason: Reason = Reason.PROOF) -> str:
    """Return why a worker refused; no worker was admitted."""
    assert handshake.admitted is None
    assert handshake.state is State.REFUSED
    assert handshake.refusal is not None
    assert handshake.refusal.reason is reason
    return handshake.refusal.text


def test_two_workers_with_certificates_admit_each_other() -> None:
    for each in meet(party(1), party(0)):
        assert each.state is State.DONE
        assert each.admitted is not None
        assert each.admitted.proof_name == "certificate"


BAD: dict[str, tuple[Callable[[], Credential], str]] = {
    "two names": (lambda: AUTHORITY.issue(spiffe("worker/1"), spiffe("worker/2")), "2 URIs"),
    "a foreign trust domain": (lambda: AUTHORITY.issue(spiffe("worker/1", "example.com")), "trust domain example.com"),
    "a foreign authority": (
        lambda: Authority().issue(spiffe("worker/1")),
        "not issued under an authority of the policy",
    ),
    "expired": (lambda: AUTHORITY.issue(spiffe("worker/1"), start=NOW - 3 * HOUR, end=NOW - HOUR), "expired at"),
    "not yet valid": (lambda: AUTHORITY.issue(spiffe("worker/1"), start=NOW + HOUR, end=NOW + 3 * HOUR), "valid from"),
    "another name": (lambda: AUTHORITY.issue(spiffe("viewer/1")), "the policy admits"),
    "an authority's": (lambda: Credential((AUTHORITY.der,), AUTHORITY.key), "no subject alternative name"),
    "only a common name": (lambda: AUTHORITY.issue(), "no subject alternative name"),
    "an extension that the library raises on": (
        lambda: AUTHORITY.issue(spiffe("worker/1"), extra=[ODD_FEATURE]),
        "a certificate is malformed or not supported",
    ),
    "a DNS name": (lambda: AUTHORITY.issue(x509.DNSName("worker.example.org")), "no URI"),
}


@pytest.mark.promise("Expired certificates, collateral and tokens are rejected at admission.")
@pytest.mark.promise("A certificate with an ambiguous identity or a foreign trust domain is rejected.")
@pytest.mark.parametrize("kind", BAD)
def test_a_child_with_a_bad_certificate_is_refused_and_learns_nothing(kind: str) -> None:
    make, reason = BAD[kind]
    parent, child = party(0), party(1, make())
    received: list[Message] = []

    def listen(role: Role, message: Message) -> Message:
        if role is Role.PARENT:
            received.append(message)
        return message

    _, two = meet(child, parent, listen)
    assert reason in refusal_of(two)
    assert not any(isinstance(message, Proof | Admit) for message in received)


@pytest.mark.promise("A certificate with an ambiguous identity or a foreign trust domain is rejected.")
@pytest.mark.parametrize("kind", BAD)
def test_a_parent_with_a_bad_certificate_is_refused(kind: str) -> None:
    make, reason = BAD[kind]
    one, two = meet(party(1), party(0, make()))
    assert reason in refusal_of(one)
    assert two.admitted is None


@pytest.mark.promise("A refusal does not tell the peer which values the policy asks for.")
def test_a_refusal_discloses_nothing_of_the_policy() -> None:
    """The policy's values go to the log of the worker that refused, not to the peer."""
    for credential in (AUTHORITY.issue(spiffe("viewer/1")), AUTHORITY.issue(spiffe("viewer/1", "example.com"))):
        one, two = meet(party(1, credential), party(0))
        assert one.refusal is not None
        assert two.refusal is not None
        assert one.refusal.by_peer
        assert "viewer/1" in one.refusal.text
        for value in ("worker/*", "this rule is for"):
            assert value not in one.refusal.text
        assert "worker/*" in two.refusal.text or "this rule is for example.org" in two.refusal.text


def test_a_certificate_without_its_key_is_refused() -> None:
    """The roster contains every certificate, so every worker has them all."""
    victim = AUTHORITY.issue(spiffe("worker/1"))
    thief = replace(victim, key=AUTHORITY.issue(spiffe("worker/9")).key)
    _, two = meet(party(1, thief), party(0))
    assert "made for another connection, or with another key" in refusal_of(two)


@pytest.mark.promise("A proof is valid on one connection only.")
def test_a_proof_recorded_on_one_connection_is_refused_on_another() -> None:
    """The strongest form: same keys, same hellos, same certificate on both connections; only the exporter differs."""
    child, parent = party(1), party(0)
    proofs, ends = [], []
    for _ in range(2):
        near, far = tls_pair(child.tls, parent.tls)
        handshake = child.handshake(Role.CHILD, 0)
        handshake.begin(channel_of(near))
        proofs += handshake.receive(parent.hello)
        ends.append(channel_of(far))
    for proof, expected in ((proofs[1], State.ADMIT), (proofs[0], State.REFUSED)):
        victim = parent.handshake(Role.PARENT, 1)
        victim.begin(ends[1])
        victim.receive(child.hello)
        victim.receive(proof)
        assert victim.state is expected


@pytest.mark.promise("A proof that is reflected to its maker is rejected.")
def test_a_proof_reflected_to_its_maker_is_refused() -> None:
    child, mirror = party(1), party(0)
    near, _ = tls_pair(child.tls, mirror.tls)
    one = child.handshake(Role.CHILD, 0)
    one.begin(channel_of(near))
    (proof,) = one.receive(mirror.hello)
    one.receive(proof)
    assert "made for another connection" in refusal_of(one)


@pytest.mark.promise("A proof made in one role is rejected in the other.")
def test_a_proof_made_in_one_role_is_refused_in_the_other() -> None:
    """Everything else is equal: hellos, keys, ranks, the connection itself."""
    child, parent = party(1), party(0)
    near, far = tls_pair(child.tls, parent.tls)
    wrong = child.handshake(Role.PARENT, 0)  # makes its proof as a parent would
    wrong.begin(channel_of(near))
    wrong.receive(parent.hello)
    proof = Proof(child.prover.kind, child.prover.prove(wrong.own_binding))
    victim = parent.handshake(Role.PARENT, 1)
    victim.begin(channel_of(far))
    victim.receive(child.hello)
    victim.receive(proof)
    assert "made for another connection" in refusal_of(victim)


@pytest.mark.promise("A man in the middle that relays an admission or another worker's evidence is rejected.")
def test_a_relay_cannot_pass_on_a_certificate() -> None:
    """The relay ends TLS on both sides, names its own key in both hellos, and forwards the proofs."""
    child, parent, relay = party(1), party(0), Credentials()
    near, _ = tls_pair(child.tls, relay)
    _, far = tls_pair(relay, parent.tls)

    def rename(role: Role, message: Message) -> Message:
        if isinstance(message, Hello):
            return replace(message, entry=replace(message.entry, tls_key_digest=relay.key_digest))
        return message

    one, two = child.handshake(Role.CHILD, 0), parent.handshake(Role.PARENT, 1)
    converse(one, two, (channel_of(near), channel_of(far)), rename)
    assert "made for another connection" in refusal_of(two)
    assert one.admitted is None


def test_a_key_swapped_in_the_entry_breaks_the_proof() -> None:
    def swap(role: Role, message: Message) -> Message:
        if role is Role.CHILD and isinstance(message, Hello):
            return replace(message, entry=replace(message.entry, public_key=fixed_bytes("attacker")))
        return message

    _, two = meet(party(1), party(0), swap)
    assert "made for another connection" in refusal_of(two)


@pytest.mark.promise("A parent that swaps its child's key is detected, if all workers hold one roster.")
def test_a_certificate_endorses_no_other_key_for_a_child() -> None:
    """Under a secret every worker can. A parent with a certificate can endorse another key only in its own name."""
    child, parent = AUTHORITY.issue(spiffe("worker/5")), AUTHORITY.issue(spiffe("worker/1"))
    entry, digest = worker(5, 6).entry, bytes(32)
    honest = Listing(entry, 2, digest, CertificateProver(child).endorse(entry, digest))
    assert verify(POLICY, honest)
    swapped = replace(honest, entry=replace(entry, public_key=fixed_bytes("attacker")))
    with pytest.raises(AdmissionError, match=r"rank 5: .*made for another connection"):
        verify(POLICY, swapped)
    own = replace(swapped, endorsement=CertificateProver(parent).endorse(swapped.entry, digest))
    assert verify(POLICY, own).entry == swapped.entry, "an admitted worker that lies can still claim another's rank"


def test_a_proof_over_the_binding_is_no_endorsement() -> None:
    """A worker that dials a hostile parent signs a proof for it, but no entry of the roster."""
    child, parent = party(1), party(0)
    near, _ = tls_pair(child.tls, parent.tls)
    one = child.handshake(Role.CHILD, 0)
    one.begin(channel_of(near))
    (proof,) = one.receive(parent.hello)
    assert isinstance(proof, Proof)
    listing = Listing(child.hello.entry, 2, bytes(32), proof.proof)
    with pytest.raises(AdmissionError, match="made for another connection"):
        verify(POLICY, listing)


def test_proofs_of_two_workers_do_not_combine() -> None:
    """One holds the secret, another the certificate, and each presents its proof on its own connection."""
    shared, other = SharedSecret(SECRET, "run-7"), SharedSecret(keys.Secret(bytes(range(50, 82))), "run-7")
    policy = Policy((bundle.BundleVerifier([shared, CertificateVerifier(RULES, now)]),))
    certificate = CertificateProver(AUTHORITY.issue(spiffe("worker/1")))
    tls = Credentials()
    holder, parent = (
        Party(1, tls, bundle.BundleProver([other, certificate]), policy),
        Party(0, Credentials(), shared, policy),
    )
    accomplice = Party(1, tls, bundle.BundleProver([shared, certificate]), policy)
    shown: list[Proof] = []
    ends: list[TlsValues] = []
    for each in (holder, accomplice):
        near, far = tls_pair(each.tls, parent.tls)
        handshake = each.handshake(Role.CHILD, 0)
        handshake.begin(channel_of(near))
        (proof,) = handshake.receive(parent.hello)
        assert isinstance(proof, Proof)
        shown.append(proof)
        ends.append(channel_of(far))
    parts = [dict(bundle.decode(proof.proof, keys.PROOF_LIMIT_BYTES)) for proof in shown]
    spliced = bundle.encode([(1, parts[1][1]), (2, parts[0][2])])
    for end in ends:
        victim = parent.handshake(Role.PARENT, 1)
        victim.begin(end)
        victim.receive(holder.hello)
        victim.receive(Proof(bundle.KIND, spliced))
        assert refusal_of(victim)


@pytest.mark.promise("No fuzzed input crashes a parser or takes it more than 5 s of CPU time.")
def test_a_certificate_the_library_raises_on_does_not_end_a_join() -> None:
    """An unauthenticated peer can make such a certificate without an authority."""
    workers = {rank: (POLICY, CertificateProver(AUTHORITY.issue(spiffe(f"worker/{rank}")))) for rank in range(2)}
    settings = dict.fromkeys(range(2), Settings(run_id="run-7", generation="3"))
    with World(2) as world:
        world.start([0], settings, workers)
        _, address = world.store.wait_for_address()
        odd = party(1, Authority().issue(spiffe("worker/1"), extra=[ODD_FEATURE]))
        peer = UnauthenticatedPeer.dial(address, odd.tls)
        handshake = Handshake(Role.CHILD, odd.hello_in(2), frozenset({0}), POLICY, odd.prover)
        peer.send(*handshake.begin(channel_of(peer.tls)))
        hello = peer.receive()
        assert isinstance(hello, Hello)
        peer.send(*handshake.receive(hello))
        assert isinstance(peer.receive(), Refuse)
        peer.close()
        world.start([1], settings, workers)
        assert len(world.members()) == 2
