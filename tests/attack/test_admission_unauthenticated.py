"""Attacks on a join under way: unauthenticated peers, lies in the store. The workers join all the same, and nobody else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from OpenSSL import SSL, crypto

from ringfence import keys
from ringfence.admission.binding import Role
from ringfence.admission.messages import Admit, Hello, Proof, Reason, Refuse, encode
from ringfence.admission.policy import Evidence, Policy
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.join import Membership, refusals
from ringfence.join.parent import AddressBook
from ringfence.settings import Settings
from ringfence.transport.tls import Credentials, TlsStream, _self_signed
from tests.attack.unauthenticated_peer import UnauthenticatedPeer, channel_of, with_key
from tests.integration.join_cluster import SECRET, MemoryStore, World
from tests.unit.admission_samples import Worker, worker

ONE_RUN = Settings(SECRET, run_id="run-7", generation="3")


def waiting_root(size: int = 2) -> tuple[World, tuple[str, int]]:
    """Rank 0 alone, with its door open."""
    world = World(size)
    world.start([0], {0: ONE_RUN})
    _, address = world.store.wait_for_address()
    return world, address


def finish(world: World) -> None:
    """The others come; the world is complete, and holds only the workers that were started."""
    world.start(range(1, world.size), dict.fromkeys(range(1, world.size), ONE_RUN))
    members = world.members()
    started = [member.link_private_key.public_key().public_bytes_raw() for member in members]
    for member in members:
        assert [entry.public_key for entry in member.roster.entries] == started
    world.close()


def credentials_of(rank: int) -> tuple[Credentials, Worker]:
    """A worker of this run, with the key that it shows."""
    credentials = Credentials()
    return credentials, worker(rank, 2, tls_key_digest=credentials.key_digest)


@pytest.mark.promise("Garbage, silence and floods of unauthenticated peers do not stop a run from forming.")
@pytest.mark.parametrize(
    "garbage",
    [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", bytes(1 << 17), b"\x16\x03\x01\x40\x00" + b"\1" * 20000],
    ids=["nothing", "a byte", "http", "zeros", "half a TLS record"],
)
def test_unauthenticated_with_garbage_do_not_stop_a_join(garbage: bytes) -> None:
    world, address = waiting_root()
    unauthenticated_peers = [socket.create_connection(address, timeout=5) for _ in range(5)]
    for unauthenticated_peer in unauthenticated_peers:
        with contextlib.suppress(ConnectionError):
            unauthenticated_peer.sendall(garbage)
    unauthenticated_peers[0].close()
    finish(world)
    for unauthenticated_peer in unauthenticated_peers:
        unauthenticated_peer.close()


@pytest.mark.promise("Garbage, silence and floods of unauthenticated peers do not stop a run from forming.")
def test_a_crowd_of_silent_unauthenticated_does_not_stop_a_join() -> None:
    """More than one address may hold, and from the very address that the child has."""
    world, address = waiting_root()
    unauthenticated_peers = [socket.create_connection(address, timeout=5) for _ in range(100)]
    started = time.monotonic()
    finish(world)
    assert time.monotonic() - started < keys.ADMISSION_SECONDS, "the child waited for unauthenticated peers to expire"
    for unauthenticated_peer in unauthenticated_peers:
        unauthenticated_peer.close()


def test_unauthenticated_from_one_address_are_held_to_their_share() -> None:
    world, address = waiting_root()
    crowd = [socket.create_connection(address, timeout=5) for _ in range(keys.ADMISSION_PENDING_PER_ADDRESS + 1)]
    assert crowd[0].recv(1) == b""
    crowd[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        crowd[1].recv(1)
    finish(world)
    for unauthenticated_peer in crowd:
        unauthenticated_peer.close()


@pytest.mark.promise("Garbage, silence and floods of unauthenticated peers do not stop a run from forming.")
def test_unauthenticated_from_many_addresses_are_held_to_a_total() -> None:
    world, address = waiting_root()
    unauthenticated_peers = []
    for last in range(2, 10):
        for _ in range(keys.ADMISSION_PENDING_PER_ADDRESS):
            unauthenticated_peer = socket.create_connection(address, timeout=5, source_address=(f"127.0.0.{last}", 0))
            unauthenticated_peers.append(unauthenticated_peer)
    # 128 came, 64 may stay: the oldest have been sent away.
    assert unauthenticated_peers[0].recv(1) == b""
    finish(world)
    for unauthenticated_peer in unauthenticated_peers:
        unauthenticated_peer.close()


def test_a_silent_unauthenticated_is_sent_away_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "ADMISSION_SECONDS", 0.3)
    world, address = waiting_root()
    with socket.create_connection(address, timeout=5) as silent:
        assert silent.recv(1) == b""
    caller = UnauthenticatedPeer.dial(address)  # TLS, and then silence
    assert isinstance(caller.hear(), Hello)
    assert caller.hear() is None
    finish(world)


class Background(SharedSecret):
    """The shared secret, as a kind of proof that is not verified in the loop."""

    kind = 2


class Dear(Background):
    """One that takes long to verify."""

    seconds = 0.0

    def verify(self, evidence: Evidence) -> None:
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            super().verify(evidence)


class Gated(Background):
    """One whose verification takes until the test says so."""

    def __init__(self) -> None:
        super().__init__(SECRET, ONE_RUN.run_id)
        self.ranks: list[int] = []
        self.asked, self.may_answer = threading.Semaphore(0), threading.Event()

    def verify(self, evidence: Evidence) -> None:
        self.ranks.append(evidence.entry.rank)
        self.asked.release()
        assert self.may_answer.wait(20)
        super().verify(evidence)


def call(address: tuple[str, int], rank: int) -> UnauthenticatedPeer:
    """A child of this run that has shown its proof."""
    credentials = Credentials()
    caller, entry = (
        UnauthenticatedPeer.dial(address, credentials),
        worker(rank, 4, tls_key_digest=credentials.key_digest).entry,
    )
    child = Worker(entry, Background(SECRET, ONE_RUN.run_id))
    handshake = child.handshake(Role.CHILD)
    handshake.begin(channel_of(caller.tls))
    hello = caller.hear()
    assert isinstance(hello, Hello)
    caller.say(child.hello, *handshake.receive(hello))
    return caller


@pytest.mark.promise("A busy worker drops no peer that waits for it, and verifies no proof of a peer that hung up.")
def test_the_proof_of_a_peer_that_has_hung_up_is_not_verified() -> None:
    shared, world = Gated(), World(4, timeout=3.0)
    world.start([0], {0: ONE_RUN}, {0: (Policy((shared,)), shared)})
    _, address = world.store.wait_for_address()
    first = call(address, 1)
    assert shared.asked.acquire(timeout=10)
    call(address, 2).close()
    third = call(address, 3)  # when it has been greeted, that the second hung up has been noticed
    shared.may_answer.set()
    for caller in (first, third):
        assert isinstance(caller.hear(), Proof)
        caller.close()
    assert shared.ranks == [1, 3]
    assert "3 of 4 workers are missing" in world.error(0)


@pytest.mark.promise("A busy worker drops no peer that waits for it, and verifies no proof of a peer that hung up.")
def test_time_that_this_worker_needs_does_not_count_against_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One verification takes longer than a peer has for all of its handshake; meanwhile another peer waits its turn."""
    monkeypatch.setattr(keys, "ADMISSION_SECONDS", 0.3)
    monkeypatch.setattr(Dear, "seconds", 0.5)
    shared = Dear(SECRET, ONE_RUN.run_id)
    world = World(3, timeout=3.0)
    world.start([0], {0: ONE_RUN}, {0: (Policy((shared,)), shared)})
    _, address = world.store.wait_for_address()
    callers = []
    for rank in (1, 2):
        credentials = Credentials()
        caller = UnauthenticatedPeer.dial(address, credentials)
        child = Worker(worker(rank, 3, tls_key_digest=credentials.key_digest).entry, Background(SECRET, ONE_RUN.run_id))
        handshake = child.handshake(Role.CHILD)
        handshake.begin(channel_of(caller.tls))
        hello = caller.hear()
        assert isinstance(hello, Hello)
        callers.append((caller, child.hello, *handshake.receive(hello)))
    for caller, *messages in callers:
        caller.say(*messages)
    for caller, *_ in callers:
        assert isinstance(caller.hear(), Proof)
        assert isinstance(caller.hear(), Admit)
        caller.close()
    assert "2 of 3 workers are missing" in world.error(0)


@pytest.mark.promise("Garbage, silence and floods of unauthenticated peers do not stop a run from forming.")
def test_an_unauthenticated_peer_that_talks_too_much_is_sent_away() -> None:
    world, address = waiting_root()
    caller = UnauthenticatedPeer.dial(address)
    assert isinstance(caller.hear(), Hello)
    caller.say_bytes(b"\1" + keys.ADMISSION_BYTES.to_bytes(4, "big"))
    caller.say_bytes(bytes(keys.ADMISSION_BYTES - 1000))  # a message that may still become whole; TLS has cost the rest
    started = time.monotonic()
    assert caller.hear() is None
    assert time.monotonic() - started < keys.ADMISSION_SECONDS / 2, "it was sent away for its silence"
    finish(world)


@pytest.mark.promise("Garbage, silence and floods of unauthenticated peers do not stop a run from forming.")
def test_an_unauthenticated_peer_that_is_refused_and_talks_on_costs_nobody_else() -> None:
    """A failing proof and more bytes than the limit arrive in one piece."""
    world, address = waiting_root()
    credentials, unauthenticated_peer = credentials_of(1)
    caller = UnauthenticatedPeer.dial(address, credentials)
    assert isinstance(caller.hear(), Hello)
    caller.say_bytes(encode(unauthenticated_peer.hello) + encode(Proof(1, bytes(32))) + bytes(2 * keys.ADMISSION_BYTES))
    while caller.hear() is not None:
        continue
    finish(world)


@pytest.mark.promise("Garbage, silence and floods of unauthenticated peers do not stop a run from forming.")
def test_no_more_is_taken_off_the_network_than_an_unauthenticated_peer_may_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit holds while reading, not after it: whatever the kernel has ready, the rest is left there."""
    taken: list[int] = []
    receive = TlsStream.receive

    def counted(stream: TlsStream, limit: int = 1 << 20) -> bytes:
        try:
            return receive(stream, limit)
        finally:
            taken.append(stream.received)

    monkeypatch.setattr(TlsStream, "receive", counted)
    world, address = waiting_root()
    caller = UnauthenticatedPeer.dial(address)
    assert isinstance(caller.hear(), Hello)
    caller.say_bytes(b"\1" + keys.ADMISSION_BYTES.to_bytes(4, "big") + bytes(8 * keys.ADMISSION_BYTES))
    assert caller.hear() is None
    assert max(taken) == keys.ADMISSION_BYTES
    finish(world)


@pytest.mark.parametrize(
    "frame",
    [b"\xff\0\0\0\0", b"\1\xff\xff\xff\xff", b"\x12\0\0\0\0", b"\1\0\0\0\4nope", encode(Proof(1, bytes(32)))],
    ids=["unknown type", "4 GiB", "a message of the tree", "no hello", "proof before hello"],
)
def test_an_unauthenticated_peer_that_breaks_the_protocol_is_sent_away(frame: bytes) -> None:
    world, address = waiting_root()
    caller = UnauthenticatedPeer.dial(address)
    assert isinstance(caller.hear(), Hello)
    caller.say_bytes(frame)
    assert caller.hear() is None
    finish(world)


def test_an_unauthenticated_peer_that_claims_a_rank_without_the_secret_is_refused_and_the_worker_still_joins() -> None:
    world, address = waiting_root()
    credentials, unauthenticated_peer = credentials_of(1)
    caller = UnauthenticatedPeer.dial(address, credentials)
    assert isinstance(caller.hear(), Hello)
    caller.say(unauthenticated_peer.hello, Proof(1, bytes(32)))
    assert isinstance(caller.hear(), Refuse)
    assert caller.hear() is None
    finish(world)


@pytest.mark.promise("A peer that has not proved its rank cannot end a join.")
@pytest.mark.parametrize("proof", [[], [Proof(1, bytes(32))]], ids=["without a proof", "with a wrong one"])
def test_an_unauthenticated_refusal_does_not_end_a_join(monkeypatch: pytest.MonkeyPatch, proof: list[Proof]) -> None:
    """A peer claims the only missing rank and refuses. A worker that had proved its rank would end the join by that."""
    monkeypatch.setattr(refusals, "_RETRIES_SECONDS", 0.0)
    monkeypatch.setattr(refusals, "_SILENCE_SECONDS", 0.0)
    world, address = waiting_root()
    credentials, unauthenticated_peer = credentials_of(1)
    caller = UnauthenticatedPeer.dial(address, credentials)
    assert isinstance(caller.hear(), Hello)
    caller.say(unauthenticated_peer.hello, *proof, Refuse(Reason.PROOF, "no"))
    while caller.hear() is not None:
        pass
    finish(world)


def test_a_recorded_hello_and_proof_do_not_let_an_unauthenticated_peer_in() -> None:
    """A thief replays what a real worker said on another connection, first as it was, then under his own key."""
    world, address = waiting_root()
    credentials, real = credentials_of(1)
    first = UnauthenticatedPeer.dial(address, credentials)
    parent_hello = first.hear()
    assert isinstance(parent_hello, Hello)
    handshake = real.handshake(Role.CHILD)
    handshake.begin(channel_of(first.tls))
    (recorded,) = handshake.receive(parent_hello)
    first.close()
    thief = Credentials()
    for hello in (real.hello, Hello(with_key(real.entry, thief), real.hello.policy_digest, (1,), (1,))):
        caller = UnauthenticatedPeer.dial(address, thief)
        caller.hear()
        caller.say(hello)
        caller.say(recorded)
        assert isinstance(caller.hear(), Refuse)
        caller.close()
    finish(world)


# -- lies in the store ----------------------------------------------------------------------------------------------


def plant(store: MemoryStore, address: tuple[str, int]) -> None:
    """Put an address where rank 1 looks for rank 0."""
    AddressBook(store, worker(0, 2).entry).publish(address)


def closed_port() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host, port = probe.getsockname()
    return host, port


@pytest.mark.promise("A store that hands out wrong addresses admits nobody.")
def test_a_stale_address_is_tried_again_until_the_right_one_stands_there() -> None:
    world = World(2)
    plant(world.store, closed_port())
    world.start([1], {1: ONE_RUN})
    world.store.wait_for_lookups(3)
    world.start([0], {0: ONE_RUN})
    assert all(isinstance(member, Membership) for member in world.members())
    world.close()


@pytest.mark.promise("A store that hands out wrong addresses admits nobody.")
@pytest.mark.parametrize("lie", ["", "nonsense", "127.0.0.1:99999", "\xff\xfe", "a" * 5000, "127.0.0.1:0"])
def test_nonsense_in_the_store_is_waited_out(lie: str) -> None:
    world = World(2)
    plant(world.store, ("127.0.0.1", 1))
    key, _ = world.store.wait_for_address()
    world.store.set(key, lie)
    world.start([1], {1: ONE_RUN})
    world.store.wait_for_lookups(3)
    world.start([0], {0: ONE_RUN})
    world.members()
    world.close()


def test_an_address_where_nobody_answers_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "ADMISSION_SECONDS", 0.3)
    world = World(2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        plant(world.store, silent.getsockname())
        world.start([1], {1: ONE_RUN})
        world.store.wait_for_lookups(2)
        world.start([0], {0: ONE_RUN})
        world.members()
    world.close()


@pytest.mark.promise("A worker of an older generation does not come back.")
def test_the_address_of_an_older_generation_is_refused_and_waited_out() -> None:
    old = World(2, timeout=60.0)
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
    old.members()  # the older generation was not disturbed either
    old.close()


@pytest.mark.promise("Runs with different ids or generations cannot be spliced, even with one secret.")
def test_a_store_that_names_a_worker_of_another_run_cannot_splice_two_runs() -> None:
    other = World(2, timeout=3.0)
    other.start([0], {0: Settings(SECRET, run_id="run-8", generation="3")})
    _, address = other.store.wait_for_address()
    world = World(2, timeout=2.0)
    plant(world.store, address)
    world.start([1], {1: ONE_RUN})
    error = world.error(1)
    assert "run 'run-7'" in error
    assert "run 'run-8'" in error
    assert "run 'run-8', generation 3, did not form" in other.error(0)


@pytest.mark.promise("A store that hands out wrong addresses admits nobody.")
def test_an_impostor_in_place_of_the_parent_gets_a_proof_that_is_good_for_nothing() -> None:
    """The store names a false rank 0. The child proves itself first; the peer carries that proof to the real rank 0."""
    real, address = waiting_root()
    world = World(2)
    thief, parent = Credentials(), worker(0, 2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plant(world.store, listener.getsockname())
        world.start([1], {1: ONE_RUN})
        impostor = UnauthenticatedPeer.wait(listener, thief)
        impostor.say(Hello(with_key(parent.entry, thief), parent.hello.policy_digest, (1,), (1,)))
        hello, proof = impostor.hear(), impostor.hear()
        assert isinstance(hello, Hello)
        assert isinstance(proof, Proof)
        impostor.say(proof)  # reflected
        assert isinstance(impostor.hear(), Refuse)
    for claim in (hello.entry, with_key(hello.entry, thief)):
        caller = UnauthenticatedPeer.dial(address, thief)
        assert isinstance(caller.hear(), Hello)
        caller.say(replace(hello, entry=claim), proof)
        assert isinstance(caller.hear(), Refuse)
        caller.close()
    plant(world.store, address)  # the lie ends
    assert isinstance(world.finish()[1], Membership)
    assert isinstance(real.finish()[0], Membership)
    world.close()
    real.close()


def test_a_certificate_that_only_openssl_can_read_does_not_stop_a_join() -> None:
    """OpenSSL takes a month 13; the stricter parser raises on it, in the middle of the door."""
    world, address = waiting_root()
    key = ec.generate_private_key(ec.SECP256R1())
    encoded = _self_signed(key).public_bytes(serialization.Encoding.DER)
    at = encoded.index(b"000101000000Z")
    strange = encoded[:at] + b"001301000000Z" + encoded[at + 13 :]
    context = SSL.Context(SSL.TLS_METHOD)
    context.use_privatekey(key)
    context.use_certificate(crypto.load_certificate(crypto.FILETYPE_ASN1, strange))
    with socket.create_connection(address, timeout=5) as unauthenticated_peer:
        unauthenticated_peer.settimeout(None)
        connection = SSL.Connection(context, unauthenticated_peer)
        connection.set_connect_state()
        connection.do_handshake()
        with contextlib.suppress(SSL.Error):  # it is sent away, and nobody else is
            while connection.recv(1):
                continue
    finish(world)
