"""Attacks on one handshake: other secrets, other channels, reflection, swapped keys, relays. TLS is real."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from OpenSSL import SSL

from ringfence import keys
from ringfence.admission.binding import Role, TlsValues
from ringfence.admission.entry import Listing
from ringfence.admission.handshake import Handshake, State
from ringfence.admission.messages import Admit, Entries, Hello, Message, Proof, Reason
from ringfence.admission.policy import Evidence, Policy
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.admission.tree import Outgoing, Phase
from ringfence.errors import AdmissionError, PeerLostError, ProtocolError
from ringfence.transport.tls import Credentials, Tls, _self_signed
from tests.attack.unauthenticated_peer import channel_of, tls_pair
from tests.unit.admission_samples import Worker, channels, converse, fixed_bytes, worker
from tests.unit.test_admission_tree import World

OTHER_SECRET = keys.Secret(bytes(range(50, 82)))


class Credulous(SharedSecret):
    """Has a secret, and admits every proof."""

    def verify(self, evidence: Evidence) -> None:
        pass


def refused(handshake: Handshake, reason: Reason) -> bool:
    assert handshake.admitted is None
    return handshake.state is State.REFUSED and handshake.refusal is not None and handshake.refusal.reason is reason


def with_tls() -> tuple[Credentials, Worker]:
    credentials = Credentials()
    return credentials, worker(1, tls_key_digest=credentials.key_digest)


@pytest.mark.promise("A worker without the secret is rejected.")
def test_a_worker_without_the_secret_is_refused_and_learns_nothing() -> None:
    parent, peer = worker(0), worker(1, secret=OTHER_SECRET)
    two = parent.handshake(Role.PARENT)
    spoken = converse(peer.handshake(Role.CHILD), two, channels(peer, parent))
    assert refused(two, Reason.PROOF)
    received = [message for role, message in spoken if role is Role.PARENT]
    assert not any(isinstance(message, Proof | Admit) for message in received), "the parent sent a proof"


@pytest.mark.promise("A worker without the secret is rejected.")
def test_a_parent_without_the_secret_is_refused() -> None:
    child, impostor, parent = worker(1), worker(0, secret=OTHER_SECRET), worker(0)
    one = child.handshake(Role.CHILD)
    policy = Policy((Credulous(OTHER_SECRET, impostor.entry.run_id),))
    pretending = Handshake(Role.PARENT, impostor.hello, frozenset({1}), policy, impostor.shared)
    spoken = converse(one, pretending, channels(child, impostor))
    assert any(role is Role.PARENT and isinstance(message, Proof) for role, message in spoken), (
        "the impostor presents no proof"
    )
    assert refused(one, Reason.PROOF)
    (proof,) = (message for role, message in spoken if role is Role.CHILD and isinstance(message, Proof))
    assert not any(isinstance(message, Admit) for role, message in spoken if role is Role.CHILD)
    two = parent.handshake(Role.PARENT)
    two.begin(channels(child, parent, b"f" * 32)[1])
    two.receive(child.hello)
    two.receive(proof)
    assert refused(two, Reason.PROOF)


@pytest.mark.promise("A worker without the secret is rejected.")
@pytest.mark.parametrize("guess", [b"", bytes(32), b"\xff" * 32, bytes(31), bytes(33), bytes(1000)])
def test_a_guessed_proof_is_refused(guess: bytes) -> None:
    parent, peer = worker(0), worker(1)
    two = parent.handshake(Role.PARENT)
    two.begin(channels(peer, parent)[1])
    two.receive(peer.hello)
    two.receive(Proof(1, guess))
    assert refused(two, Reason.PROOF)


@pytest.mark.promise("Runs with different ids or generations cannot be spliced, even with one secret.")
@pytest.mark.parametrize("change", [{"run_id": "run-8"}, {"generation": "2"}, {"world_size": 5}])
def test_another_run_generation_or_world_size_is_refused(
    change: dict[str, Any],
) -> None:
    parent, child = worker(0), worker(1, **change)
    two = parent.handshake(Role.PARENT)
    converse(child.handshake(Role.CHILD), two, channels(child, parent))
    assert two.admitted is None
    assert two.refusal is not None
    for entry in (parent.entry, child.entry):
        assert str(getattr(entry, next(iter(change)))) in two.refusal.text


@pytest.mark.promise("A proof is valid on one connection only.")
def test_a_proof_recorded_on_one_connection_is_refused_on_another() -> None:
    """The strongest form: same keys, same hellos on both connections; only the exporter differs."""
    credentials, child = with_tls()
    server = Credentials()
    parent = worker(0, tls_key_digest=server.key_digest)
    proofs, ends = [], []
    for _ in range(2):
        one, two = tls_pair(credentials, server)
        handshake = child.handshake(Role.CHILD)
        handshake.begin(channel_of(one))
        proofs += handshake.receive(parent.hello)
        ends.append(channel_of(two))
    for proof, expected in ((proofs[1], State.ADMIT), (proofs[0], State.REFUSED)):
        victim = parent.handshake(Role.PARENT)
        victim.begin(ends[1])
        victim.receive(child.hello)
        victim.receive(proof)
        assert victim.state is expected


@pytest.mark.promise("A proof that is reflected to its maker is rejected.")
def test_a_proof_reflected_to_its_maker_is_refused() -> None:
    child, mirror = worker(1), worker(0, secret=OTHER_SECRET)
    one = child.handshake(Role.CHILD)
    one.begin(channels(child, mirror)[0])
    (proof,) = one.receive(mirror.hello)
    one.receive(proof)
    assert refused(one, Reason.PROOF)


@pytest.mark.promise("A proof made in one role is rejected in the other.")
def test_the_role_alone_tells_two_bindings_apart() -> None:
    """Even if both ends sent the same hello, a proof would not be valid in both directions."""
    child, parent = worker(1), worker(0)
    ends = channels(child, parent)
    one, two = (
        child.handshake(Role.CHILD),
        Handshake(Role.PARENT, child.hello, frozenset({0}), child.policy, child.shared),
    )
    digests = []
    for handshake in (one, two):
        handshake.begin(ends[0])
        handshake.receive(parent.hello)
        digests.append(handshake._binding(of_peer=False).digest)
    assert digests[0] != digests[1]


@pytest.mark.parametrize("field", ["public_key", "host", "port"])
def test_an_entry_changed_in_transit_breaks_the_proof(field: str) -> None:
    """Even an attacker inside the TLS channel cannot swap the key that goes into the roster."""
    other: Any = {"public_key": fixed_bytes("attacker"), "host": "203.0.113.9", "port": 1}[field]
    child, parent = worker(1), worker(0)

    def swap(role: Role, message: Message) -> Message:
        if role is Role.CHILD and isinstance(message, Hello):
            return replace(message, entry=replace(message.entry, **{field: other}))
        return message

    two = parent.handshake(Role.PARENT)
    converse(child.handshake(Role.CHILD), two, channels(child, parent), swap)
    assert refused(two, Reason.PROOF)


@pytest.mark.promise("A parent that swaps its child's key is detected, if all workers hold one roster.")
def test_a_parent_that_swaps_the_key_of_its_child_is_detected() -> None:
    """Rank 1 holds the secret and endorses another key for rank 5. Rank 5 checks the roster, and no worker begins."""
    world = World(6)
    swapped, digest = worker(5, 6, public_key=fixed_bytes("attacker")), bytes(32)
    world.send(0, world.trees[0].begin())
    for rank in (1, 2, 3, 4):
        world.connect(rank)
    world.trees[1].attach_child(swapped.entry, digest, SharedSecret.kind)
    world.trees[5].attach_parent(world.workers[1].entry, digest)
    forged = Listing(swapped.entry, 1, digest, swapped.shared.endorse(swapped.entry, digest))
    world.send(5, [Outgoing(1, Entries((forged,)))])
    with pytest.raises(AdmissionError, match="lists rank 5 with another entry than it presented"):
        world.settle()
    assert not any(tree.phase is Phase.GO for tree in world.trees)


@pytest.mark.promise("A man in the middle that relays an admission or another worker's evidence is rejected.")
def test_a_relay_that_ends_tls_is_detected_by_its_key() -> None:
    """The relay ends TLS on both sides and forwards the messages of admission unchanged."""
    child_key, parent_key, relay_key = Credentials(), Credentials(), Credentials()
    child = worker(1, tls_key_digest=child_key.key_digest)
    parent = worker(0, tls_key_digest=parent_key.key_digest)
    near, _ = tls_pair(child_key, relay_key)
    _, far = tls_pair(relay_key, parent_key)
    one, two = child.handshake(Role.CHILD), parent.handshake(Role.PARENT)
    converse(one, two, (channel_of(near), channel_of(far)))
    assert refused(one, Reason.KEY)
    assert refused(two, Reason.KEY)
    assert one.refusal is not None
    assert "the connection may be intercepted" in one.refusal.text


@pytest.mark.promise("A man in the middle that relays an admission or another worker's evidence is rejected.")
def test_a_relay_that_names_its_own_key_fails_the_proof() -> None:
    child_key, parent_key, relay_key = Credentials(), Credentials(), Credentials()
    child = worker(1, tls_key_digest=child_key.key_digest)
    parent = worker(0, tls_key_digest=parent_key.key_digest)
    near, _ = tls_pair(child_key, relay_key)
    _, far = tls_pair(relay_key, parent_key)

    def rename(role: Role, message: Message) -> Message:
        if isinstance(message, Hello):
            return replace(message, entry=replace(message.entry, tls_key_digest=relay_key.key_digest))
        return message

    one, two = child.handshake(Role.CHILD), parent.handshake(Role.PARENT)
    converse(one, two, (channel_of(near), channel_of(far)), rename)
    assert refused(two, Reason.PROOF)
    assert one.admitted is None


# -- TLS ------------------------------------------------------------------------------------------------------------


def test_tls_agrees_on_one_exporter_and_names_both_keys() -> None:
    client, server = Credentials(), Credentials()
    one, two = tls_pair(client, server)
    assert one.exporter() == two.exporter()
    assert (one.peer_key_digest, two.peer_key_digest) == (server.key_digest, client.key_digest)
    assert tls_pair(client, server)[0].exporter() != one.exporter()


def test_tls_prefers_a_post_quantum_key_agreement() -> None:
    one, two = tls_pair(Credentials(), Credentials())
    assert one.group == two.group == "X25519MLKEM768"


def client_that_resumes() -> SSL.Context:
    """A TLS client with a certificate that resumes sessions."""
    key = ec.generate_private_key(ec.SECP256R1())
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.use_privatekey(key)
    context.use_certificate(_self_signed(key))
    return context


def connect_with_session(client: SSL.Context, server: Credentials, session: SSL.Session | None) -> SSL.Session:
    """Connect as a client that offers this session; return the next one."""
    end, caller = Tls(server, server=True), SSL.Connection(client, None)
    if session is not None:
        caller.set_session(session)
    caller.set_connect_state()
    for _ in range(3):
        with contextlib.suppress(SSL.WantReadError):
            caller.do_handshake()
        with contextlib.suppress(SSL.WantReadError):
            end.receive(caller.bio_read(65536))
        if answer := end.outgoing():
            caller.bio_write(answer)
    with contextlib.suppress(SSL.WantReadError):
        caller.recv(1)  # reads the tickets
    assert end.established
    found = caller.get_session()
    assert found is not None
    end.close()  # a session that ends otherwise is never resumed
    caller.shutdown()
    return found


@pytest.mark.promise("Admission accepts TLS 1.3 only, and resumes no TLS session.")
@pytest.mark.parametrize("cache", [False, True], ids=["as it is", "with a cache: the test can fail"])
def test_a_tls_session_cannot_be_resumed_past_the_certificate(cache: bool) -> None:
    client, server = client_that_resumes(), Credentials()
    verified: list[bool] = []
    server.context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, lambda *_: not verified.append(True))
    server.context.set_session_id(b"test")  # without one OpenSSL would not resume either
    if cache:
        server.context.set_session_cache_mode(SSL.SESS_CACHE_SERVER)
    session = connect_with_session(client, server, None)
    once = len(verified)
    connect_with_session(client, server, session)
    assert once > 0
    assert len(verified) == (once if cache else 2 * once)


def test_a_changed_record_ends_the_connection() -> None:
    one, two = tls_pair(Credentials(), Credentials())
    two.send(b"hello")
    data = bytearray(two.outgoing())
    data[10] ^= 1
    with pytest.raises(ProtocolError, match="TLS failed"):
        one.receive(bytes(data))
    with pytest.raises(PeerLostError, match="TLS failed"):
        one.send(b"too late")


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\x16\x03\x01\xff\xff" + bytes(200), b"SSH-2.0-x\r\n"]
)
def test_bytes_that_are_not_tls_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="TLS failed"):
        Tls(Credentials(), server=True).receive(data)


def test_a_client_without_a_certificate_is_refused() -> None:
    bare = SSL.Connection(SSL.Context(SSL.TLS_CLIENT_METHOD), None)
    bare.set_connect_state()
    server = Tls(Credentials(), server=True)
    with pytest.raises(ProtocolError, match="certificate"):  # noqa: PT012
        for _ in range(4):
            with contextlib.suppress(SSL.WantReadError):
                bare.do_handshake()
            server.receive(bare.bio_read(65536))
            bare.bio_write(server.outgoing())


@pytest.mark.promise("Admission accepts TLS 1.3 only, and resumes no TLS session.")
def test_older_tls_is_refused() -> None:
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_max_proto_version(SSL.TLS1_2_VERSION)
    old = SSL.Connection(context, None)
    old.set_connect_state()
    with pytest.raises(SSL.WantReadError):
        old.do_handshake()
    with pytest.raises(ProtocolError, match="unsupported protocol"):
        Tls(Credentials(), server=True).receive(old.bio_read(65536))


def test_a_channel_has_the_keys_and_exporter_of_tls() -> None:
    credentials = Credentials()
    one, two = tls_pair(credentials, Credentials())
    assert channel_of(one) == TlsValues(credentials.key_digest, two.own_key_digest, two.exporter())
