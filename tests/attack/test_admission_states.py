"""Unauthenticated peers, and liars that hold the secret, in every state of a join: silence ends in time, garbage ends at once.

Sockets and TLS are real. A liar is a worker's own handshake and tree, stopped at a chosen point.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ringfence import keys
from ringfence.admission.binding import Role
from ringfence.admission.handshake import Handshake, State
from ringfence.admission.messages import (
    TREE,
    Acknowledge,
    Entries,
    Failure,
    Frames,
    Message,
    Waiting,
    encode,
    tree_frame_limit,
)
from ringfence.admission.tree import Phase, Terms, Tree
from ringfence.control import Abort, Closed, ControlMessage
from ringfence.errors import AdmissionError
from ringfence.join import loop
from ringfence.join.parent import AddressBook
from ringfence.runtime.aborts import ABORT_CODES
from ringfence.settings import Settings
from ringfence.transport.tls import Credentials
from tests.attack.unauthenticated_peer import UnauthenticatedPeer, channel_of
from tests.integration.join_cluster import SECRET, World
from tests.unit.admission_samples import SUITES, Worker, worker

ONE_RUN = Settings(SECRET, run_id="run-7", generation="3")
SIZE = 2

CONTACT, HALF_TLS = "nothing", "half a TLS hello"  # before the handshake's own states
EVERY_STATE = [CONTACT, HALF_TLS, State.HELLO, State.PROOF, State.ADMIT]
GARBAGE = [bytes(64), b"\xff" * 4096, b"\1\0\0\0\3abc", b"\3\0\0\0\1x", b"\x63\0\0\0\0"]


class Liar:
    """A worker that does all it should up to a point. Holds the secret, so that it can come to every state."""

    def __init__(self, rank: int, reach: Callable[[], UnauthenticatedPeer], credentials: Credentials) -> None:
        self.own: Worker = worker(rank, SIZE, tls_key_digest=credentials.key_digest)
        self.role = Role.PARENT if rank == 0 else Role.CHILD
        self.handshake: Handshake = self.own.handshake(self.role)
        self.tree = Tree(self.own.entry, self.own.policy, self.own.shared, Terms(keys.Secret(bytes(32)), b"", SUITES))
        self._unauthenticated = reach()
        self.peer = 1 - rank

    def come_to(self, goal: State | Phase) -> UnauthenticatedPeer:
        """Do what a worker does until `goal`, which is its own state, and say nothing more."""
        unauthenticated_peer = self._unauthenticated
        own_words = self.handshake.begin(channel_of(unauthenticated_peer.tls))
        while self.handshake.state is not goal:
            unauthenticated_peer.say(*own_words)
            if self.handshake.state is State.DONE:
                break
            heard = unauthenticated_peer.hear()
            assert heard is not None, f"hung up on in {self.handshake.state}"
            own_words = self.handshake.receive(heard)
        if goal is State.ADMIT and self.role is Role.PARENT:
            unauthenticated_peer.say(own_words[0])  # its proof, and not the admission that belongs behind it
        if isinstance(goal, Phase):
            self._join_loop(goal)
        return unauthenticated_peer

    def _join_loop(self, goal: Phase) -> None:
        unauthenticated_peer, handshake = self._unauthenticated, self.handshake
        assert handshake.admitted is not None and handshake.child_proof_digest is not None
        unauthenticated_peer._frames.allow(TREE, tree_frame_limit(SIZE))
        self.tree.begin()
        entry, digest = handshake.admitted.entry, handshake.child_proof_digest
        words: list[Message] = []
        if self.role is Role.PARENT:
            assert handshake.child_kind is not None
            self.tree.attach_child(entry, digest, handshake.child_kind)
        else:
            words = [each.message for each in self.tree.attach_parent(entry, digest)]
        while self.tree.phase is not goal:
            unauthenticated_peer.say(*words)
            heard = unauthenticated_peer.hear()
            assert heard is not None, f"hung up on in {self.tree.phase}"
            words = [each.message for each in self.tree.receive(self.peer, heard)]
        if self.role is Role.PARENT:
            unauthenticated_peer.say(*words)  # the roster


@contextmanager
def victim(rank: int, timeout: float) -> Iterator[tuple[World, Callable[[], socket.socket]]]:
    """A worker that joins with nobody but an attacker to talk to; and how to get a connection with it."""
    world = World(SIZE, timeout=timeout)
    if rank == 0:
        world.start([0], {0: ONE_RUN})
        _, address = world.store.wait_for_address()
        yield world, lambda: socket.create_connection(address, timeout=10)
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        AddressBook(world.store, worker(0, SIZE).entry).publish(listener.getsockname())
        world.start([1], {1: ONE_RUN})
        listener.settimeout(10)
        yield world, lambda: listener.accept()[0]


def hangs_up(connection: socket.socket, seconds: float) -> bool:
    """Whether the worker at the other end lets go of this connection in time."""
    connection.settimeout(seconds)
    try:
        while connection.recv(65536):
            continue
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def come_to(goal: object, rank: int, connect: Callable[[], socket.socket]) -> socket.socket:
    """A connection with the victim, `rank`, on which the attacker has come to `goal` and says nothing more."""
    connection = connect()
    if goal == CONTACT:
        return connection
    if goal == HALF_TLS:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00")
        return connection
    credentials = Credentials()
    liar = Liar(1 - rank, lambda: UnauthenticatedPeer(connection, credentials, server=rank == 1), credentials)
    assert isinstance(goal, State | Phase)
    liar.come_to(goal)
    return connection


# -- silence ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("A peer that stalls in any state of an admission is dropped, or ends the join at its deadline.")
@pytest.mark.parametrize("state", EVERY_STATE, ids=str)
@pytest.mark.parametrize("rank", [0, 1], ids=["met by the parent", "met by the child"])
def test_an_unauthenticated_peer_that_stalls_is_sent_away_in_every_state(
    state: object, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker goes on to wait for a better one, until its own deadline, and says for whom."""
    monkeypatch.setattr(keys, "ADMISSION_SECONDS", 0.2)
    with victim(rank, timeout=1.0) as (world, connect):
        connection = come_to(state, rank, connect)
        assert hangs_up(connection, 5.0), f"it is still waiting for somebody who {state}"
        connection.close()
        error = world.error(rank)
    assert "did not form within 1 s" in error
    assert ("missing: rank 1" if rank == 0 else "did not reach its parent, rank 0") in error


@pytest.mark.promise("A peer that stalls in any state of an admission is dropped, or ends the join at its deadline.")
@pytest.mark.parametrize(
    ("rank", "phase", "words"),
    [
        (0, Phase.GATHER, "; 1 of 2 workers are missing: rank 1"),
        (0, Phase.ACKED, "rank 0 waits for rank 1 to acknowledge the roster"),
        (1, Phase.GATHER, "rank 1 waits for the roster from its parent, rank 0"),
        (1, Phase.SEALED, "rank 1 waits for the go from its parent, rank 0"),
    ],
    ids=["a child gathers", "a child acknowledges", "a parent gathers", "a parent seals"],
)
def test_an_admitted_worker_that_stalls_ends_the_join_at_its_deadline(rank: int, phase: Phase, words: str) -> None:
    """`phase` is where the liar stops, before it says what is due there."""
    with victim(rank, timeout=1.0) as (world, connect):
        started = time.monotonic()
        connection = come_to(phase, rank, connect)
        error = world.error(rank)
        assert hangs_up(connection, 5.0)
        assert time.monotonic() - started < 10
    assert words in error


def test_a_worker_that_came_late_and_stalls_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has said that rank 1 is missing; then it comes, gets the roster, and does not acknowledge it."""
    monkeypatch.setattr(loop, "_REPORT_SECONDS", 0.05)
    with victim(0, timeout=2.0) as (world, connect):
        credentials = Credentials()
        connection = connect()
        liar = Liar(1, lambda: UnauthenticatedPeer(connection, credentials, server=False), credentials)
        unauthenticated_peer = liar.come_to(Phase.GATHER)
        assert unauthenticated_peer.hear() == Waiting(1, (1,))
        unauthenticated_peer.say(Entries((liar.tree._listings[1],)))
        error = world.error(0)
        connection.close()
    assert "; rank 0 waits for rank 1 to acknowledge the roster" in error
    assert "missing" not in error


def test_a_worker_that_fails_before_it_has_the_go_says_so_to_those_who_have_begun() -> None:
    with victim(0, timeout=20.0) as (world, connect):
        credentials = Credentials()
        connection = connect()
        liar = Liar(1, lambda: UnauthenticatedPeer(connection, credentials, server=False), credentials)
        unauthenticated_peer = liar.come_to(Phase.ACKED)
        assert liar.tree.session is not None
        unauthenticated_peer.say(Acknowledge(liar.tree.session.roster.digest), Failure(1, "KeyboardInterrupt"))
        connection.shutdown(socket.SHUT_WR)
        (member,) = world.members()
        (edge,) = member.edges
        found: list[ControlMessage] = []
        while not any(isinstance(each, Closed) for each in found):
            select.select([edge], [], [], 10)
            found += edge.receive()
        assert found[0] == Abort(1, -1, ABORT_CODES.index(AdmissionError), "", "its join ended: KeyboardInterrupt")
        assert len(found) == 2
        world.close()
        connection.close()


# -- garbage ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise(
    "A malformed message drops an unauthenticated peer, and fails the join if an admitted worker sent it."
)
@pytest.mark.parametrize("garbage", GARBAGE, ids=["zeros", "ones", "no hello", "a long admit", "unknown"])
@pytest.mark.parametrize("state", [State.HELLO, State.PROOF, State.ADMIT], ids=str)
@pytest.mark.parametrize("rank", [0, 1], ids=["met by the parent", "met by the child"])
def test_garbage_in_every_state_ends_the_connection_and_nothing_else(state: State, rank: int, garbage: bytes) -> None:
    """Inside TLS, where an unauthenticated peer has come to `state`; the worker hangs up at once and lets the right one in."""
    with victim(rank, timeout=20.0) as (world, connect):
        credentials = Credentials()
        connection = connect()
        liar = Liar(1 - rank, lambda: UnauthenticatedPeer(connection, credentials, server=rank == 1), credentials)
        liar.come_to(state).say_bytes(garbage)
        started = time.monotonic()
        assert hangs_up(connection, 5.0)
        assert time.monotonic() - started < keys.ADMISSION_SECONDS / 2, "it was sent away for its silence"
        connection.close()
        world.start([1 - rank], {1 - rank: ONE_RUN})
        assert len(world.members()) == SIZE
        world.close()


@pytest.mark.promise(
    "A malformed message drops an unauthenticated peer, and fails the join if an admitted worker sent it."
)
@pytest.mark.parametrize("garbage", GARBAGE, ids=["zeros", "ones", "no hello", "a long admit", "unknown"])
@pytest.mark.parametrize(
    ("rank", "phase"),
    [(0, Phase.GATHER), (0, Phase.ACKED), (1, Phase.GATHER), (1, Phase.SEALED)],
    ids=["a child gathers", "a child acknowledges", "a parent gathers", "a parent seals"],
)
def test_garbage_from_an_admitted_worker_ends_the_session_at_once_and_names_it(
    rank: int, phase: Phase, garbage: bytes
) -> None:
    with victim(rank, timeout=20.0) as (world, connect):
        started = time.monotonic()
        credentials = Credentials()
        connection = connect()
        liar = Liar(1 - rank, lambda: UnauthenticatedPeer(connection, credentials, server=rank == 1), credentials)
        liar.come_to(phase).say_bytes(garbage)
        error = world.error(rank)
        connection.close()
        assert time.monotonic() - started < 10
    assert f"rank {1 - rank} was lost while the run was forming" in error


def test_the_liar_is_a_worker_if_it_does_not_stop() -> None:
    """So that silence and garbage are what the tests above are about: told to go on, the liar is admitted."""
    with victim(0, timeout=20.0) as (world, connect):
        credentials = Credentials()
        connection = connect()
        liar = Liar(1, lambda: UnauthenticatedPeer(connection, credentials, server=False), credentials)
        done = threading.Thread(target=lambda: liar.come_to(Phase.ACKED), daemon=True)
        done.start()
        done.join(10)
        assert liar.tree.phase is Phase.ACKED
        assert liar.tree.session is not None
        unauthenticated_peer = liar._unauthenticated
        (entry,) = [each for each in liar.tree.session.roster.entries if each.rank == 1]
        assert entry == liar.own.entry
        acknowledge = liar.tree._acknowledge_if_all()[0].message
        unauthenticated_peer.say(acknowledge)
        (member,) = world.members()
        assert member.roster.digest == liar.tree.session.roster.digest
        assert encode(acknowledge)[5:] == member.roster.digest
        world.close()
        connection.close()


def test_frames_of_the_tree_mean_nothing_before_admission() -> None:
    frames = Frames(TREE, tree_frame_limit(SIZE))
    frames.feed(encode(worker(0, SIZE).hello))
    with pytest.raises(Exception, match="no place here"):
        frames.next()
