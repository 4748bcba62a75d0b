"""Attacks on a join under way: unauthenticated peers and lies in the store. The workers join, and no other peer does."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from OpenSSL import SSL, crypto

from ringfence import keys
from ringfence.admission.binding import Role
from ringfence.admission.messages import Admit, Hello, Proof, Reason, Refuse, encode
from ringfence.admission.policy import Evidence, Policy
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.config.settings import Settings
from ringfence.session.join import Membership
from ringfence.session.join.parent import AddressBook
from ringfence.transport.tls import Credentials, TlsStream, _self_signed
from tests.attack.unauthenticated_peer import UnauthenticatedPeer, channel_of, with_key
from tests.integration.join_cluster import SECRET, Clock, MemoryStore, World
from tests.limits import FAR, HANG
from tests.unit.admission_samples import Worker, worker

ONE_RUN = Settings(SECRET, run_id="run-7", generation="3")


def waiting_root(size: int = 2) -> tuple[World, tuple[str, int]]:
    """Rank 0 alone, listening."""
    world = World(size)
    world.start([0], {0: ONE_RUN})
    _, address = world.store.wait_for_address()
    return world, address


def finish(world: World) -> None:
    """Start the other workers; the roster holds exactly the workers that were started."""
    world.start(range(1, world.size), dict.fromkeys(range(1, world.size), ONE_RUN))
    members = world.members()
    started = [member.link_private_key.public_key().public_bytes_raw() for member in members]
    for member in members:
        assert [entry.public_key for entry in member.roster.entries] == started
    world.close()


def credentials_of(rank: int) -> tuple[Credentials, Worker]:
    """A worker of this run, with its TLS key."""
    credentials = Credentials()
    return credentials, worker(rank, 2, tls_key_digest=credentials.key_digest)


@pytest.mark.promise("Garbage, silence and floods of unauthenticated peers do not stop a run from forming.")
@pytest.mark.parametrize(
    "garbage",
    [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", bytes(1 << 17), b"\x16\x03\x01\x40\x00" + b"\1" * 20000],
    ids=["nothing", "a byte", "http", "zeros", "half a TLS record"],
)
def test_garbage_does_not_stop_a_join(garbage: bytes) -> None:
    world, address = waiting_root()
    peers = [socket.create_connection(address, timeout=HANG) for _ in range(5)]
    for peer in peers:
        with contextlib.suppress(ConnectionError):
            peer.sendall(garbage)
    peers[0].close()
    finish(world)
    for peer in peers:
        peer.close()


@pytest.mark.promise("Garbage, silence and floods of unauthenticated peers do not stop a run from forming.")
def test_a_flood_of_silent_peers_does_not_stop_a_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one address may have, and from the child's own address."""
    monkeypatch.setattr(keys, "ADMISSION_SECONDS", FAR)  # the child cannot wait for other peers to expire
    world, address = waiting_root()
    peers = [socket.create_connection(address, timeout=HANG) for _ in range(100)]
    finish(world)
    for peer in peers:
        peer.close()


def test_connections_from_one_address_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "ADMISSION_SECONDS", FAR)  # they are not dropped for their silence
    world, address = waiting_root()
    peers_of_one_address = [
        socket.create_connection(address, timeout=HANG) for _ in range(keys.ADMISSION_PENDING_PER_ADDRESS + 1)
    ]
    assert peers_of_one_address[0].recv(1) == b""
    peers_of_one_address[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        peers_of_one_address[1].recv(1)
    finish(world)
    for peer in peers_of_one_address:
        peer.close()


@pytest.mark.promise("Garbage, silence and floods of unauthenticated peers do not stop a run from forming.")
def test_connections_from_many_addresses_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "ADMISSION_SECONDS", FAR)
    world, address = waiting_root()
    peers = []
    for last in range(2, 10):
        for _ in range(keys.ADMISSION_PENDING_PER_ADDRESS):
            peer = socket.create_connection(address, timeout=HANG, source_address=(f"127.0.0.{last}", 0))
            peers.append(peer)
    # 128 have connected, 64 may stay: the oldest are dropped.
    assert peers[0].recv(1) == b""
    finish(world)
    for peer in peers:
        peer.close()


def test_a_silent_peer_is_dropped_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    world, address = waiting_root()
    with socket.create_connection(address, timeout=HANG) as silent:
        clock.skip_waiting(0.0)  # it is accepted
        clock.skip_waiting(keys.ADMISSION_SECONDS)
        assert silent.recv(1) == b""
    caller = UnauthenticatedPeer.dial(address)  # TLS, and then silence
    assert isinstance(caller.receive(), Hello)
    clock.skip_waiting(keys.ADMISSION_SECONDS)
    assert caller.receive() is None
    finish(world)


class Background(SharedSecret):
    """The shared secret, as a kind of proof that is verified beside the loop."""

    kind = 2


class Blocked(Background):
    """A proof whose verification ends when the test permits it."""

    def __init__(self) -> None:
        super().__init__(SECRET, ONE_RUN.run_id)
        self.ranks: list[int] = []
        self.asked, self.may_answer = threading.Semaphore(0), threading.Event()

    def verify(self, evidence: Evidence) -> None:
        self.ranks.append(evidence.entry.rank)
        self.asked.release()
        assert self.may_answer.wait(HANG)
        super().verify(evidence)


def dial_and_prove(address: tuple[str, int], rank: int) -> UnauthenticatedPeer:
    """A child of this run that has presented its proof."""
    credentials = Credentials()
    caller, entry = (
        UnauthenticatedPeer.dial(address, credentials),
        worker(rank, 4, tls_key_digest=credentials.key_digest).entry,
    )
    child = Worker(entry, Background(SECRET, ONE_RUN.run_id))
    handshake = child.handshake(Role.CHILD)
    handshake.begin(channel_of(caller.tls))
    hello = caller.receive()
    assert isinstance(hello, Hello)
    caller.send(child.hello, *handshake.receive(hello))
    return caller


@pytest.mark.promise("A busy worker drops no peer that waits for it, and verifies no proof of a peer that hung up.")
def test_the_proof_of_a_peer_that_has_hung_up_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, shared, world = Clock(monkeypatch), Blocked(), World(4)
    world.start([0], {0: ONE_RUN}, {0: (Policy((shared,)), shared)})
    _, address = world.store.wait_for_address()
    first = dial_and_prove(address, 1)
    assert shared.asked.acquire(timeout=HANG)
    dial_and_prove(address, 2).close()
    third = dial_and_prove(address, 3)  # its hello is read after the end of the second connection
    shared.may_answer.set()
    for caller in (first, third):
        assert isinstance(caller.receive(), Proof)
        caller.close()
    assert shared.ranks == [1, 3]
    clock.advance(FAR)
    assert "3 of 4 workers are missing" in world.error(0)


@pytest.mark.promise("A busy worker drops no peer that waits for it, and verifies no proof of a peer that hung up.")
def test_a_workers_own_delay_does_not_count_against_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One verification takes longer than a handshake may; meanwhile another peer waits."""
    clock, shared, world = Clock(monkeypatch), Blocked(), World(3)
    world.start([0], {0: ONE_RUN}, {0: (Policy((shared,)), shared)})
    _, address = world.store.wait_for_address()
    callers: list[Any] = []
    for rank in (1, 2):
        credentials = Credentials()
        caller = UnauthenticatedPeer.dial(address, credentials)
        child = Worker(worker(rank, 3, tls_key_digest=credentials.key_digest).entry, Background(SECRET, ONE_RUN.run_id))
        handshake = child.handshake(Role.CHILD)
        handshake.begin(channel_of(caller.tls))
        hello = caller.receive()
        assert isinstance(hello, Hello)
        callers.append((caller, child.hello, *handshake.receive(hello)))
    for caller, *messages in callers:
        caller.send(*messages)
    assert shared.asked.acquire(timeout=HANG)
    clock.skip_waiting(0.0)  # both proofs have arrived; one is being verified
    clock.skip_waiting(2 * keys.ADMISSION_SECONDS)
    shared.may_answer.set()
    for caller, *_ in callers:
        assert isinstance(caller.receive(), Proof)
        assert isinstance(caller.receive(), Admit)
        caller.close()
    clock.advance(FAR)
    assert "2 of 3 workers are missing" in world.error(0)


@pytest.mark.promise("Garbage, silence and floods of unauthenticated peers do not stop a run from forming.")
def test_a_peer_that_sends_too_much_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "ADMISSION_SECONDS", FAR)  # it is not dropped for its silence
    world, address = waiting_root()
    caller = UnauthenticatedPeer.dial(address)
    assert isinstance(caller.receive(), Hello)
    caller.send_bytes(b"\1" + keys.ADMISSION_BYTES.to_bytes(4, "big"))
    caller.send_bytes(
        bytes(keys.ADMISSION_BYTES - 1000)
    )  # a message that may still be completed; TLS has used the rest
    assert caller.receive() is None
    finish(world)


@pytest.mark.promise("Garbage, silence and floods of unauthenticated peers do not stop a run from forming.")
def test_a_refused_peer_that_keeps_sending_affects_no_other() -> None:
    """A failing proof and more bytes than the limit arrive in one piece."""
    world, address = waiting_root()
    credentials, peer = credentials_of(1)
    caller = UnauthenticatedPeer.dial(address, credentials)
    assert isinstance(caller.receive(), Hello)
    caller.send_bytes(encode(peer.hello) + encode(Proof(1, bytes(32))) + bytes(2 * keys.ADMISSION_BYTES))
    while caller.receive() is not None:
        continue
    finish(world)


@pytest.mark.promise("Garbage, silence and floods of unauthenticated peers do not stop a run from forming.")
def test_no_more_is_read_than_a_peer_may_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit holds during the read: what exceeds it stays in the kernel."""
    taken: list[int] = []
    receive = TlsStream.receive

    def counted(stream: TlsStream, limit: int = 1 << 20, *, drain: bool = True) -> bytes:
        try:
            return receive(stream, limit, drain=drain)
        finally:
            taken.append(stream.received)

    monkeypatch.setattr(TlsStream, "receive", counted)
    world, address = waiting_root()
    caller = UnauthenticatedPeer.dial(address)
    assert isinstance(caller.receive(), Hello)
    caller.send_bytes(b"\1" + keys.ADMISSION_BYTES.to_bytes(4, "big") + bytes(8 * keys.ADMISSION_BYTES))
    assert caller.receive() is None
    assert max(taken) == keys.ADMISSION_BYTES
    finish(world)


@pytest.mark.parametrize(
    "frame",
    [b"\xff\0\0\0\0", b"\1\xff\xff\xff\xff", b"\x12\0\0\0\0", b"\1\0\0\0\4nope", encode(Proof(1, bytes(32)))],
    ids=["unknown type", "4 GiB", "a message of the tree", "no hello", "proof before hello"],
)
def test_a_peer_that_breaks_the_protocol_is_dropped(frame: bytes) -> None:
    world, address = waiting_root()
    caller = UnauthenticatedPeer.dial(address)
    assert isinstance(caller.receive(), Hello)
    caller.send_bytes(frame)
    assert caller.receive() is None
    finish(world)


def test_a_peer_that_claims_a_rank_does_not_displace_the_worker() -> None:
    world, address = waiting_root()
    credentials, peer = credentials_of(1)
    caller = UnauthenticatedPeer.dial(address, credentials)
    assert isinstance(caller.receive(), Hello)
    caller.send(peer.hello, Proof(1, bytes(32)))
    assert isinstance(caller.receive(), Refuse)
    assert caller.receive() is None
    finish(world)


@pytest.mark.promise("A peer that has not proved its rank cannot end a join.")
@pytest.mark.parametrize("proof", [[], [Proof(1, bytes(32))]], ids=["without a proof", "with a wrong one"])
def test_an_unauthenticated_refusal_does_not_end_a_join(proof: list[Proof]) -> None:
    """A peer claims the only missing rank and refuses."""
    world, address = waiting_root()
    credentials, peer = credentials_of(1)
    caller = UnauthenticatedPeer.dial(address, credentials)
    assert isinstance(caller.receive(), Hello)
    caller.send(peer.hello, *proof, Refuse(Reason.PROOF, "no"))
    while caller.receive() is not None:
        pass
    finish(world)


def test_a_recorded_hello_and_proof_admit_nobody() -> None:
    """A thief replays what a worker sent on another connection, first unchanged, then under its own key."""
    world, address = waiting_root()
    credentials, real = credentials_of(1)
    first = UnauthenticatedPeer.dial(address, credentials)
    parent_hello = first.receive()
    assert isinstance(parent_hello, Hello)
    handshake = real.handshake(Role.CHILD)
    handshake.begin(channel_of(first.tls))
    (recorded,) = handshake.receive(parent_hello)
    first.close()
    thief = Credentials()
    for hello in (real.hello, Hello(with_key(real.entry, thief), real.hello.policy_digest, (1,), (1,))):
        caller = UnauthenticatedPeer.dial(address, thief)
        caller.receive()
        caller.send(hello)
        caller.send(recorded)
        assert isinstance(caller.receive(), Refuse)
        caller.close()
    finish(world)


# -- lies in the store ----------------------------------------------------------------------------------------------


def plant(store: MemoryStore, address: tuple[str, int]) -> None:
    """Publish an address under the key where rank 1 looks for rank 0."""
    AddressBook(store, worker(0, 2).entry).publish(address)


@pytest.mark.promise("A store that hands out wrong addresses admits nobody.")
def test_a_stale_address_is_retried_until_it_is_right() -> None:
    world = World(2)
    with socket.socket() as deaf:  # bound, so that no other process can listen there
        deaf.bind(("127.0.0.1", 0))
        plant(world.store, deaf.getsockname())
        world.start([1], {1: ONE_RUN})
        world.store.wait_for_lookups(3)
        world.start([0], {0: ONE_RUN})
        assert all(isinstance(member, Membership) for member in world.members())
    world.close()


@pytest.mark.promise("A store that hands out wrong addresses admits nobody.")
@pytest.mark.parametrize("lie", ["", "nonsense", "127.0.0.1:99999", "\xff\xfe", "a" * 5000, "127.0.0.1:0"])
def test_nonsense_in_the_store_is_retried(lie: str) -> None:
    world = World(2)
    plant(world.store, ("127.0.0.1", 1))
    key, _ = world.store.wait_for_address()
    world.store.set(key, lie)
    world.start([1], {1: ONE_RUN})
    world.store.wait_for_lookups(3)
    world.start([0], {0: ONE_RUN})
    world.members()
    world.close()


def test_an_address_that_does_not_answer_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, world = Clock(monkeypatch), World(2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        plant(world.store, silent.getsockname())
        world.start([1], {1: ONE_RUN})
        connection, _ = silent.accept()
        clock.skip_waiting(keys.ADMISSION_SECONDS)
        world.store.wait_for_lookups(2)
        silent.close()
        connection.close()
        world.start([0], {0: ONE_RUN})
        world.members()
    world.close()


@pytest.mark.promise("A worker of an older generation does not come back.")
def test_the_address_of_an_older_generation_is_refused() -> None:
    old = World(2)
    old.start([0], {0: Settings(SECRET, run_id="run-7", generation="2")})
    _, stale = old.store.wait_for_address()
    world = World(2)
    plant(world.store, stale)
    world.start([1], {1: ONE_RUN})
    world.store.wait_for_lookups(3)
    world.start([0], {0: ONE_RUN})
    world.members()
    world.close()
    old.start([1], {1: Settings(SECRET, run_id="run-7", generation="2")})
    old.members()  # the older generation is not affected
    old.close()


@pytest.mark.promise("Runs with different ids or generations cannot be spliced, even with one secret.")
def test_a_store_cannot_splice_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, other = Clock(monkeypatch), World(2)
    other.start([0], {0: Settings(SECRET, run_id="run-8", generation="3")})
    _, address = other.store.wait_for_address()
    world = World(2)
    plant(world.store, address)
    world.start([1], {1: ONE_RUN})
    world.store.wait_for_lookups(2)  # the first attempt was refused
    clock.advance(FAR)
    error = world.error(1)
    assert "run 'run-7'" in error
    assert "run 'run-8'" in error
    assert "run 'run-8', generation 3, did not form" in other.error(0)


@pytest.mark.promise("A store that hands out wrong addresses admits nobody.")
def test_an_impostor_parent_gets_a_proof_that_admits_nobody() -> None:
    """The store names a false rank 0. The child proves itself first; the impostor takes that proof to the real rank 0."""
    real, address = waiting_root()
    world = World(2)
    thief, parent = Credentials(), worker(0, 2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plant(world.store, listener.getsockname())
        world.start([1], {1: ONE_RUN})
        impostor = UnauthenticatedPeer.accept(listener, thief)
        impostor.send(Hello(with_key(parent.entry, thief), parent.hello.policy_digest, (1,), (1,)))
        hello, proof = impostor.receive(), impostor.receive()
        assert isinstance(hello, Hello)
        assert isinstance(proof, Proof)
        impostor.send(proof)  # reflected
        assert isinstance(impostor.receive(), Refuse)
    for claim in (hello.entry, with_key(hello.entry, thief)):
        caller = UnauthenticatedPeer.dial(address, thief)
        assert isinstance(caller.receive(), Hello)
        caller.send(replace(hello, entry=claim), proof)
        assert isinstance(caller.receive(), Refuse)
        caller.close()
    plant(world.store, address)  # the store tells the truth again
    assert isinstance(world.finish()[1], Membership)
    assert isinstance(real.finish()[0], Membership)
    world.close()
    real.close()


def test_a_certificate_only_openssl_can_read_does_not_stop_a_join() -> None:
    """OpenSSL accepts a month 13; the stricter parser raises on it, during the handshake."""
    world, address = waiting_root()
    key = ec.generate_private_key(ec.SECP256R1())
    encoded = _self_signed(key).public_bytes(serialization.Encoding.DER)
    at = encoded.index(b"000101000000Z")
    strange = encoded[:at] + b"001301000000Z" + encoded[at + 13 :]
    context = SSL.Context(SSL.TLS_METHOD)
    context.use_privatekey(key)
    context.use_certificate(crypto.load_certificate(crypto.FILETYPE_ASN1, strange))
    with socket.create_connection(address, timeout=HANG) as peer:
        peer.settimeout(None)
        connection = SSL.Connection(context, peer)
        connection.set_connect_state()
        connection.do_handshake()
        with contextlib.suppress(SSL.Error):  # it is dropped, and no other peer is
            while connection.recv(1):
                continue
    finish(world)
