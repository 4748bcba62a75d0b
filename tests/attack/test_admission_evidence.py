"""Strangers while evidence is collected: who said the right hello is given time, nobody else is, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from ringfence import keys
from ringfence.admission.binding import Role
from ringfence.admission.handshake import Handshake, State
from ringfence.admission.messages import Hello, Proof
from ringfence.settings import Settings
from ringfence.transport.tls import Credentials
from tests.attack.admission_strangers import Stranger, channel_of
from tests.attack.test_admission_states import GARBAGE, hangs_up
from tests.process.join_world import SECRET, Slow, SlowlyShown, World, slow_policy
from tests.pure.admission_samples import SUITES, worker

RUN = "run-7"
ONE_RUN = Settings(SECRET, run_id=RUN, generation="3")
SIZE = 2


class Child:
    """Rank 1, as far as it wants to go: it can say the right hello, and the right proof."""

    def __init__(self, address: tuple[str, int]) -> None:
        credentials, policy = Credentials(), slow_policy(RUN)
        self.connection = socket.create_connection(address, timeout=10)
        self.stranger = Stranger(self.connection, credentials, server=False)
        entry = worker(1, SIZE, tls_key_digest=credentials.key_digest).entry
        hello = Hello(entry, policy.digest, SUITES, policy.kinds)
        self.handshake = Handshake(Role.CHILD, hello, frozenset({0}), policy, None)

    def greet(self) -> None:
        """Say the right hello; then collect for ever."""
        self.stranger.say(*self.handshake.begin(channel_of(self.stranger.tls)))
        heard = self.stranger.hear()
        assert heard is not None
        self.handshake.receive(heard)
        assert self.handshake.state is State.COLLECT

    def prove(self) -> None:
        shown = SlowlyShown(SECRET, RUN).prove(self.handshake.wanted)
        self.stranger.say(*self.handshake.show(Proof(SlowlyShown.kind, shown)))


@contextlib.contextmanager
def parent(world: World, prover: Slow):  # type: ignore[no-untyped-def]
    """Rank 0, which judges by evidence and shows its own when it may; where it is reached."""
    world.start([0], {0: ONE_RUN}, {0: (slow_policy(RUN), prover)})
    _, address = world.store.wait_for_address()
    yield address


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
    world = World(SIZE, timeout=2.0)
    with parent(world, Slow(run_id=RUN)) as address:
        silent = socket.create_connection(address, timeout=10)
        started = time.monotonic()
        assert hangs_up(silent, 5.0)
        assert time.monotonic() - started < 1.5
        assert "missing: rank 1" in world.error(0)


def test_a_worker_that_never_gets_its_own_evidence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its child has proved itself and waits; the device does not answer."""
    monkeypatch.setattr(keys, "EVIDENCE_SECONDS", 0.3)
    world, stuck = World(SIZE, timeout=1.5), Slow(run_id=RUN)
    with parent(world, stuck) as address:
        child = Child(address)
        child.greet()
        child.prove()
        assert stuck.asked.acquire(timeout=5)
        assert hangs_up(child.connection, 5.0)
        assert "this machine gave no evidence within 0 s" in world.error(0)
    stuck.may_answer.set()


@pytest.mark.parametrize("garbage", GARBAGE, ids=["zeros", "ones", "no hello", "a long admit", "unknown"])
def test_garbage_while_evidence_is_collected_ends_the_connection_and_nothing_else(garbage: bytes) -> None:
    world, slow = World(SIZE), Slow(run_id=RUN)
    with parent(world, slow) as address:
        child = Child(address)
        child.greet()
        child.prove()
        assert slow.asked.acquire(timeout=5)  # the parent has judged, and collects
        child.stranger.say_bytes(garbage)
        started = time.monotonic()
        assert hangs_up(child.connection, 5.0)
        assert time.monotonic() - started < keys.ADMISSION_SECONDS / 2
        slow.may_answer.set()
        world.start([1], {1: ONE_RUN}, {1: (slow_policy(RUN), SlowlyShown(SECRET, RUN))})
        assert len(world.members()) == SIZE
        world.close()


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
