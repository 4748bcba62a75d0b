"""Unauthenticated peers while evidence is collected: a valid hello buys limited time, and no wait is endless."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time

import pytest

from ringfence import keys
from ringfence.admission.binding import Role
from ringfence.admission.handshake import Handshake, State
from ringfence.admission.messages import Hello, Proof
from ringfence.admission.peer_verification import Presentation
from ringfence.admission.policy import Evidence, Policy
from ringfence.config.settings import Settings
from ringfence.session.join import collect, handshakes
from ringfence.session.join.parent import AddressBook
from ringfence.session.join.peer import Peer
from ringfence.transport.tls import Credentials
from tests.attack.test_admission_states import GARBAGE, disconnects, is_closed
from tests.attack.unauthenticated_peer import UnauthenticatedPeer, channel_of, with_key
from tests.integration.join_cluster import SECRET, Clock, Slow, SlowlyShown, World, slow_policy
from tests.limits import FAR, HANG
from tests.unit.admission_samples import SUITES, worker

RUN = "run-7"
ONE_RUN = Settings(SECRET, run_id=RUN, generation="3")
SIZE = 2


class Child:
    """Rank 1, step by step: it can send a valid hello and a valid proof."""

    def __init__(self, address: tuple[str, int], source: str = "127.0.0.1") -> None:
        credentials, policy = Credentials(), slow_policy(RUN)
        self.connection = socket.create_connection(address, timeout=HANG, source_address=(source, 0))
        self.peer = UnauthenticatedPeer(self.connection, credentials, server=False)
        entry = worker(1, SIZE, tls_key_digest=credentials.key_digest).entry
        hello = Hello(entry, policy.digest, SUITES, policy.kinds)
        self.handshake = Handshake(Role.CHILD, hello, frozenset({0}), policy, None)

    def send_hello(self) -> None:
        """Send a valid hello; then collect forever."""
        self.peer.send(*self.handshake.begin(channel_of(self.peer.tls)))
        received = self.peer.receive()
        assert received is not None
        self.handshake.receive(received)
        assert self.handshake.state is State.COLLECT

    def send_proof(self) -> None:
        shown = SlowlyShown(SECRET, RUN).prove(self.handshake.own_binding)
        self.peer.send(*self.handshake.present(Proof(SlowlyShown.kind, shown)))


@contextlib.contextmanager
def parent(world: World, prover: Slow):  # type: ignore[no-untyped-def]
    """Rank 0, which verifies evidence and presents its own; yields its address."""
    world.start([0], {0: ONE_RUN}, {0: (slow_policy(RUN), prover)})
    _, address = world.store.wait_for_address()
    yield address


@pytest.mark.promise("A peer that stalls in any state of an admission is dropped, or ends the join at its deadline.")
def test_a_peer_with_a_valid_hello_has_limited_time_to_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, world = Clock(monkeypatch), World(SIZE)
    with parent(world, Slow(run_id=RUN)) as address:
        child = Child(address)
        child.send_hello()
        clock.skip_waiting(0.0)  # the parent has read it
        clock.skip_waiting(2 * keys.ADMISSION_SECONDS)
        child.connection.setblocking(False)
        assert not is_closed(child.connection), "it had no time to collect its evidence"
        clock.skip_waiting(keys.EVIDENCE_SECONDS - 2 * keys.ADMISSION_SECONDS)
        assert disconnects(child.connection)
        clock.advance(FAR)
        assert "missing: rank 1" in world.error(0)


def test_a_silent_peer_gets_no_time_to_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, world = Clock(monkeypatch), World(SIZE)
    with parent(world, Slow(run_id=RUN)) as address:
        silent = socket.create_connection(address, timeout=HANG)
        clock.skip_waiting(0.0)  # the parent has accepted it
        clock.skip_waiting(keys.ADMISSION_SECONDS)
        assert disconnects(silent)
        clock.advance(FAR)
        assert "missing: rank 1" in world.error(0)


def test_a_worker_whose_device_never_answers_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its child is verified and waits; the device does not answer."""
    clock, world, stuck = Clock(monkeypatch), World(SIZE), Slow(run_id=RUN)
    queue = keys.EVIDENCE_SECONDS * (keys.TREE_FANOUT + 1)  # a device answers one child after the other
    with parent(world, stuck) as address:
        child = Child(address)
        child.send_hello()
        child.send_proof()
        assert stuck.asked.acquire(timeout=HANG)
        clock.skip_waiting(queue)
        assert disconnects(child.connection)
        clock.advance(FAR)
        assert f"this machine gave no evidence within {queue:.0f} s" in world.error(0)
    stuck.may_answer.set()


@pytest.mark.promise(
    "A malformed message drops an unauthenticated peer, and fails the join if an admitted worker sent it."
)
@pytest.mark.parametrize("garbage", GARBAGE, ids=["zeros", "ones", "no hello", "a long admit", "unknown"])
def test_garbage_during_collection_ends_only_the_connection(garbage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("ADMISSION_SECONDS", "EVIDENCE_SECONDS"):
        monkeypatch.setattr(keys, limit, FAR)  # it is not dropped for its silence
    world, slow = World(SIZE), Slow(run_id=RUN)
    with parent(world, slow) as address:
        child = Child(address)
        child.send_hello()
        child.send_proof()
        assert slow.asked.acquire(timeout=HANG)  # the parent has verified the child, and collects
        child.peer.send_bytes(garbage)
        assert disconnects(child.connection)
        slow.may_answer.set()
        world.start([1], {1: ONE_RUN}, {1: (slow_policy(RUN), SlowlyShown(SECRET, RUN))})
        assert len(world.members()) == SIZE
        world.close()


@pytest.mark.promise("Evidence that takes long to collect does not stop a run, and collections are limited.")
def test_a_flood_does_not_displace_a_peer_that_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that has sent a valid hello collects for seconds. A flood from its own address displaces itself."""
    for limit in ("ADMISSION_SECONDS", "EVIDENCE_SECONDS"):
        monkeypatch.setattr(keys, limit, FAR)
    world, child, quick = World(SIZE), Slow(run_id=RUN), Slow(run_id=RUN)
    quick.may_answer.set()
    with parent(world, quick) as address, contextlib.ExitStack() as connections:
        world.start([1], {1: ONE_RUN}, {1: (slow_policy(RUN), child)})
        assert child.asked.acquire(timeout=HANG)
        silent = [
            connections.enter_context(socket.create_connection(address, timeout=HANG))
            for _ in range(3 * keys.ADMISSION_PENDING_PER_ADDRESS)
        ]
        assert disconnects(silent[0]), "the flood has not reached its limit"
        child.may_answer.set()
        assert len(world.members()) == SIZE
        assert not child.asked.acquire(blocking=False), "it was dropped and came again"
        world.close()


@pytest.mark.promise("Evidence that takes long to collect does not stop a run, and collections are limited.")
def test_a_flood_with_valid_hellos_spares_peers_that_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any peer may send it. The connection to drop is drawn at random: here, the last one."""
    drawn: list[int] = []

    def draw(flood: list[Peer]) -> Peer:
        drawn.append(len(flood))
        return flood[-1]

    hello_received, go_on = threading.Semaphore(0), handshakes.Handshakes._continue

    def count_hellos(self: handshakes.Handshakes, peer: Peer) -> None:
        go_on(self, peer)
        if (peer.handshake.role, peer.handshake.state) == (Role.PARENT, State.PROOF):
            hello_received.release()

    monkeypatch.setattr(handshakes.Handshakes, "_continue", count_hellos)
    monkeypatch.setattr(secrets, "choice", draw)
    monkeypatch.setattr(keys, "ADMISSION_PENDING", 16)
    world, child, quick = World(SIZE), Slow(run_id=RUN), Slow(run_id=RUN)
    quick.may_answer.set()
    with parent(world, quick) as address:
        world.start([1], {1: ONE_RUN}, {1: (slow_policy(RUN), child)})
        assert child.asked.acquire(timeout=HANG) and hello_received.acquire(timeout=HANG)
        flood = [Child(address)]
        for _ in range(keys.ADMISSION_PENDING + 2):
            flood[-1].send_hello()
            assert hello_received.acquire(timeout=HANG)
            flood.append(Child(address))
        assert drawn == [keys.ADMISSION_PENDING + 1] * 3
        for each in flood:
            each.connection.close()
        child.may_answer.set()
        assert len(world.members()) == SIZE
        assert not child.asked.acquire(blocking=False), "it was dropped and came again"
        world.close()


def test_the_address_with_the_most_valid_hellos_loses_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood from one address does not displace a child at another, however large it is."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(keys, "ADMISSION_PENDING", 8)
    world, child, quick = World(SIZE), Slow(run_id=RUN), Slow(run_id=RUN)
    quick.may_answer.set()
    with parent(world, quick) as address:
        world.start([1], {1: ONE_RUN}, {1: (slow_policy(RUN), child)})
        assert child.asked.acquire(timeout=HANG)
        flood = []
        for _ in range(3 * keys.ADMISSION_PENDING):
            flood.append(Child(address, "127.0.0.2"))
            flood[-1].send_hello()
        clock.skip_waiting(0.0)  # the parent has read the last one
        for each in flood:
            each.connection.setblocking(False)
        assert sum(is_closed(each.connection) for each in flood) >= 2 * keys.ADMISSION_PENDING
        child.may_answer.set()
        assert len(world.members()) == SIZE
        assert not child.asked.acquire(blocking=False), "it was dropped and came again"
        world.close()


@pytest.mark.promise("Evidence that takes long to collect does not stop a run, and collections are limited.")
def test_the_number_of_concurrent_collections_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """An impostor in place of the parent sends a valid hello and disconnects: a child must not run out of threads."""
    monkeypatch.setattr(collect, "LIMIT", 2)
    world, child, quick, thief = World(SIZE), Slow(run_id=RUN), Slow(run_id=RUN), Credentials()
    quick.may_answer.set()
    policy = slow_policy(RUN)
    hello = Hello(with_key(worker(0, SIZE).entry, thief), policy.digest, SUITES, policy.kinds)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        AddressBook(world.store, hello.entry).publish(listener.getsockname())
        world.start([1], {1: ONE_RUN}, {1: (policy, child)})
        for attempt in range(5):
            impostor = UnauthenticatedPeer.accept(listener, thief)
            impostor.send(hello)
            assert isinstance(impostor.receive(), Hello)
            if attempt < 2:
                assert child.asked.acquire(timeout=HANG)
            else:
                assert impostor.receive() is None, "it collects for a third"
            impostor.close()
        assert not child.asked.acquire(blocking=False)
    child.may_answer.set()  # for the closed connections; then there is room again
    world.start([0], {0: ONE_RUN}, {0: (policy, quick)})
    assert len(world.members()) == SIZE
    assert child.asked.acquire(blocking=False)
    world.close()


def test_a_proof_is_dated_when_it_is_presented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the other side has verified it, which may take any time."""

    class Clock:
        now = 1000.0
        monotonic = staticmethod(time.monotonic)
        thread_time = staticmethod(time.thread_time)

        def time(self) -> float:
            return self.now

    clock = Clock()

    class Verifier(SlowlyShown):
        def verify(self, evidence: Evidence) -> None:
            super().verify(evidence)
            clock.now += 500

    monkeypatch.setattr(handshakes, "time", clock)
    policy, quick = Policy((Verifier(SECRET, RUN),)), SlowlyShown(SECRET, RUN)
    with World(SIZE) as world:
        world.start(range(SIZE), dict.fromkeys(range(SIZE), ONE_RUN), dict.fromkeys(range(SIZE), (policy, quick)))
        known = [member.peer_verifier for member in world.members()]
    # The child presents, the parent verifies and presents, the child verifies: at 1000, 1500 and 2000.
    assert [Presentation.decode(each.presentation).at for each in known if each is not None] == [1500, 1000]
