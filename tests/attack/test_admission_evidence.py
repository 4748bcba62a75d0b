"""Unauthenticated peers while evidence is collected: only a peer with the right hello is given time, and no wait is endless."""

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
from ringfence.join import collect, handshakes
from ringfence.join.parent import AddressBook
from ringfence.join.peer import Peer
from ringfence.settings import Settings
from ringfence.transport.tls import Credentials
from tests.attack.test_admission_states import GARBAGE, hangs_up
from tests.attack.unauthenticated_peer import UnauthenticatedPeer, channel_of, with_key
from tests.integration.join_cluster import SECRET, Slow, SlowlyShown, World, slow_policy
from tests.unit.admission_samples import SUITES, worker

RUN = "run-7"
ONE_RUN = Settings(SECRET, run_id=RUN, generation="3")
SIZE = 2


class Child:
    """Rank 1, as far as it wants to go: it can say the right hello, and the right proof."""

    def __init__(self, address: tuple[str, int], source: str = "127.0.0.1") -> None:
        credentials, policy = Credentials(), slow_policy(RUN)
        self.connection = socket.create_connection(address, timeout=10, source_address=(source, 0))
        self.unauthenticated_peer = UnauthenticatedPeer(self.connection, credentials, server=False)
        entry = worker(1, SIZE, tls_key_digest=credentials.key_digest).entry
        hello = Hello(entry, policy.digest, SUITES, policy.kinds)
        self.handshake = Handshake(Role.CHILD, hello, frozenset({0}), policy, None)

    def greet(self) -> None:
        """Say the right hello; then collect for ever."""
        self.unauthenticated_peer.say(*self.handshake.begin(channel_of(self.unauthenticated_peer.tls)))
        heard = self.unauthenticated_peer.hear()
        assert heard is not None
        self.handshake.receive(heard)
        assert self.handshake.state is State.COLLECT

    def prove(self) -> None:
        shown = SlowlyShown(SECRET, RUN).prove(self.handshake.wanted)
        self.unauthenticated_peer.say(*self.handshake.present(Proof(SlowlyShown.kind, shown)))


@contextlib.contextmanager
def parent(world: World, prover: Slow):  # type: ignore[no-untyped-def]
    """Rank 0, which verifies by evidence and shows its own when it may; where it is reached."""
    world.start([0], {0: ONE_RUN}, {0: (slow_policy(RUN), prover)})
    _, address = world.store.wait_for_address()
    yield address


@pytest.mark.promise("A peer that stalls in any state of an admission is dropped, or ends the join at its deadline.")
def test_who_says_the_right_hello_is_given_time_to_collect_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "ADMISSION_SECONDS", 0.2)
    monkeypatch.setattr(keys, "EVIDENCE_SECONDS", 1.0)
    world = World(SIZE, timeout=3.0)
    with parent(world, Slow(run_id=RUN)) as address:
        child = Child(address)
        child.greet()
        started = time.monotonic()
        assert not hangs_up(child.connection, 0.5), "it had no time to collect its evidence"
        assert hangs_up(child.connection, 5.0)
        assert time.monotonic() - started < 3
        assert "missing: rank 1" in world.error(0)


def test_who_says_nothing_is_sent_away_as_soon_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "ADMISSION_SECONDS", 0.2)
    world = World(SIZE, timeout=5.0)
    with parent(world, Slow(run_id=RUN)) as address:
        silent = socket.create_connection(address, timeout=10)
        started = time.monotonic()
        assert hangs_up(silent, 5.0)
        assert time.monotonic() - started < 4
        assert "missing: rank 1" in world.error(0)


def test_a_worker_that_never_gets_its_own_evidence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its child has proved itself and waits; the device does not answer."""
    monkeypatch.setattr(keys, "EVIDENCE_SECONDS", 0.2)
    world, stuck = World(SIZE, timeout=2.5), Slow(run_id=RUN)
    with parent(world, stuck) as address:
        child = Child(address)
        child.greet()
        child.prove()
        assert stuck.asked.acquire(timeout=5)
        assert hangs_up(child.connection, 5.0)
        assert "this machine gave no evidence within 1 s" in world.error(0)
    stuck.may_answer.set()


@pytest.mark.promise(
    "A malformed message drops an unauthenticated peer, and fails the join if an admitted worker sent it."
)
@pytest.mark.parametrize("garbage", GARBAGE, ids=["zeros", "ones", "no hello", "a long admit", "unknown"])
def test_garbage_while_evidence_is_collected_ends_the_connection_and_nothing_else(garbage: bytes) -> None:
    world, slow = World(SIZE), Slow(run_id=RUN)
    with parent(world, slow) as address:
        child = Child(address)
        child.greet()
        child.prove()
        assert slow.asked.acquire(timeout=5)  # the parent has verified, and collects
        child.unauthenticated_peer.say_bytes(garbage)
        started = time.monotonic()
        assert hangs_up(child.connection, 5.0)
        assert time.monotonic() - started < keys.ADMISSION_SECONDS / 2
        slow.may_answer.set()
        world.start([1], {1: ONE_RUN}, {1: (slow_policy(RUN), SlowlyShown(SECRET, RUN))})
        assert len(world.members()) == SIZE
        world.close()


@pytest.mark.promise("Evidence that takes long to collect does not stop a run, and collections are limited.")
def test_a_crowd_does_not_displace_who_collects_its_evidence() -> None:
    """A child that has said the right hello sits there for seconds. A crowd from its own address displaces itself."""
    world, child, quick = World(SIZE), Slow(run_id=RUN), Slow(run_id=RUN)
    quick.may_answer.set()
    with parent(world, quick) as address, contextlib.ExitStack() as crowd:
        world.start([1], {1: ONE_RUN}, {1: (slow_policy(RUN), child)})
        assert child.asked.acquire(timeout=10)
        silent = [
            crowd.enter_context(socket.create_connection(address, timeout=10))
            for _ in range(3 * keys.ADMISSION_PENDING_PER_ADDRESS)
        ]
        assert hangs_up(silent[0], 5.0), "the crowd has not reached its limit"
        child.may_answer.set()
        assert len(world.members()) == SIZE
        assert not child.asked.acquire(blocking=False), "it was sent away and came again"
        world.close()


@pytest.mark.promise("Evidence that takes long to collect does not stop a run, and collections are limited.")
def test_a_crowd_that_says_the_right_hello_does_not_displace_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may say it. The child was there first, and whoever goes is drawn by lot: here, the last one."""
    drawn: list[int] = []

    def draw(crowd: list[Peer]) -> Peer:
        drawn.append(len(crowd))
        return crowd[-1]

    greeted, go_on = threading.Semaphore(0), handshakes.Handshakes._continue

    def goes_on(self: handshakes.Handshakes, peer: Peer) -> None:
        go_on(self, peer)
        if (peer.handshake.role, peer.handshake.state) == (Role.PARENT, State.PROOF):
            greeted.release()

    monkeypatch.setattr(handshakes.Handshakes, "_continue", goes_on)
    monkeypatch.setattr(secrets, "choice", draw)
    monkeypatch.setattr(keys, "ADMISSION_PENDING", 16)
    world, child, quick = World(SIZE), Slow(run_id=RUN), Slow(run_id=RUN)
    quick.may_answer.set()
    with parent(world, quick) as address:
        world.start([1], {1: ONE_RUN}, {1: (slow_policy(RUN), child)})
        assert child.asked.acquire(timeout=10) and greeted.acquire(timeout=10)
        crowd = [Child(address)]
        for _ in range(keys.ADMISSION_PENDING + 2):
            crowd[-1].greet()
            assert greeted.acquire(timeout=10)
            crowd.append(Child(address))
        assert drawn == [keys.ADMISSION_PENDING + 1] * 3
        for each in crowd:
            each.connection.close()
        child.may_answer.set()
        assert len(world.members()) == SIZE
        assert not child.asked.acquire(blocking=False), "it was sent away and came again"
        world.close()


def test_of_many_that_say_the_right_hello_those_of_the_largest_crowd_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child at an address of its own is not driven out by a crowd at another, however many come."""
    monkeypatch.setattr(keys, "ADMISSION_PENDING", 8)
    world, child, quick = World(SIZE), Slow(run_id=RUN), Slow(run_id=RUN)
    quick.may_answer.set()
    with parent(world, quick) as address:
        world.start([1], {1: ONE_RUN}, {1: (slow_policy(RUN), child)})
        assert child.asked.acquire(timeout=10)
        crowd = []
        for _ in range(3 * keys.ADMISSION_PENDING):
            crowd.append(Child(address, "127.0.0.2"))
            crowd[-1].greet()
        assert sum(hangs_up(each.connection, 0.3) for each in crowd) >= 2 * keys.ADMISSION_PENDING
        child.may_answer.set()
        assert len(world.members()) == SIZE
        assert not child.asked.acquire(blocking=False), "it was sent away and came again"
        world.close()


@pytest.mark.promise("Evidence that takes long to collect does not stop a run, and collections are limited.")
def test_evidence_is_collected_for_a_limited_number_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An impostor in place of the parent says the right hello and hangs up: a child must not be filled with threads."""
    monkeypatch.setattr(collect, "LIMIT", 2)
    world, child, quick, thief = World(SIZE), Slow(run_id=RUN), Slow(run_id=RUN), Credentials()
    quick.may_answer.set()
    policy = slow_policy(RUN)
    hello = Hello(with_key(worker(0, SIZE).entry, thief), policy.digest, SUITES, policy.kinds)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        AddressBook(world.store, hello.entry).publish(listener.getsockname())
        world.start([1], {1: ONE_RUN}, {1: (policy, child)})
        for attempt in range(5):
            impostor = UnauthenticatedPeer.wait(listener, thief)
            impostor.say(hello)
            assert isinstance(impostor.hear(), Hello)
            if attempt < 2:
                assert child.asked.acquire(timeout=10)
            else:
                assert impostor.hear() is None, "it collects for a third"
            impostor.close()
        assert not child.asked.acquire(blocking=False)
    child.may_answer.set()  # for those who hung up; then there is room again
    world.start([0], {0: ONE_RUN}, {0: (policy, quick)})
    assert len(world.members()) == SIZE
    assert child.asked.acquire(blocking=False)
    world.close()


def test_a_proof_counts_as_of_when_it_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of when the other side had verified it: that may take as long as it likes."""

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
    # The child shows, the parent verifies and shows, the child verifies: at 1000, 1500 and 2000.
    assert [Presentation.decode(each.presentation).at for each in known if each is not None] == [1500, 1000]
