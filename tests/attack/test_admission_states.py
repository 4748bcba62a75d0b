"""Unauthenticated peers, and liars with the secret, in every state of a join: silence ends in time, garbage at once.

Sockets and TLS are real. A liar runs a worker's handshake and tree, and stops at a chosen point.
"""

from __future__ import annotations

import select
import socket
import threading
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
    Message,
    MessageSplitter,
    Waiting,
    encode,
    tree_frame_limit,
)
from ringfence.admission.tree import Phase, Terms, Tree
from ringfence.config.settings import Settings
from ringfence.errors import AdmissionError
from ringfence.runtime.aborts import ABORT_CODES
from ringfence.runtime.control import Abort, Closed, ControlMessage
from ringfence.session.join.parent import AddressBook
from ringfence.transport.tls import Credentials
from tests.attack.unauthenticated_peer import UnauthenticatedPeer, channel_of
from tests.integration.join_cluster import SECRET, Clock, World
from tests.limits import FAR, HANG
from tests.unit.admission_samples import SUITES, Worker, worker

ONE_RUN = Settings(SECRET, run_id="run-7", generation="3")
SIZE = 2

CONTACT, HALF_TLS = "nothing", "half a TLS hello"  # before the handshake's own states
EVERY_STATE = [CONTACT, HALF_TLS, State.HELLO, State.PROOF, State.ADMIT]
GARBAGE = [bytes(64), b"\xff" * 4096, b"\1\0\0\0\3abc", b"\3\0\0\0\1x", b"\x63\0\0\0\0"]


class Liar:
    """A worker that follows the protocol up to a point. It holds the secret, so it can reach every state."""

    def __init__(self, rank: int, reach: Callable[[], UnauthenticatedPeer], credentials: Credentials) -> None:
        self.own: Worker = worker(rank, SIZE, tls_key_digest=credentials.key_digest)
        self.role = Role.PARENT if rank == 0 else Role.CHILD
        self.handshake: Handshake = self.own.handshake(self.role)
        self.tree = Tree(self.own.entry, self.own.policy, self.own.shared, Terms(keys.Secret(bytes(32)), b"", SUITES))
        self.connection = reach()
        self.peer_rank = 1 - rank

    def advance_to(self, goal: State | Phase) -> UnauthenticatedPeer:
        """Follow the protocol until the liar is in state `goal`, and send nothing more."""
        peer = self.connection
        outgoing = self.handshake.begin(channel_of(peer.tls))
        while self.handshake.state is not goal:
            peer.send(*outgoing)
            if self.handshake.state is State.DONE:
                break
            received = peer.receive()
            assert received is not None, f"disconnected in {self.handshake.state}"
            outgoing = self.handshake.receive(received)
        if goal is State.ADMIT and self.role is Role.PARENT:
            peer.send(outgoing[0])  # its proof, without the Admit that follows
        if isinstance(goal, Phase):
            self._advance_tree(goal)
        return peer

    def _advance_tree(self, goal: Phase) -> None:
        peer, handshake = self.connection, self.handshake
        assert handshake.admitted is not None and handshake.child_proof_digest is not None
        peer._frames.allow(TREE, tree_frame_limit(SIZE))
        self.tree.begin()
        entry, digest = handshake.admitted.entry, handshake.child_proof_digest
        outgoing: list[Message] = []
        if self.role is Role.PARENT:
            assert handshake.child_kind is not None
            self.tree.attach_child(entry, digest, handshake.child_kind)
        else:
            outgoing = [each.message for each in self.tree.attach_parent(entry, digest)]
        while self.tree.phase is not goal:
            peer.send(*outgoing)
            received = peer.receive()
            assert received is not None, f"disconnected in {self.tree.phase}"
            outgoing = [each.message for each in self.tree.receive(self.peer_rank, received)]
        if self.role is Role.PARENT:
            peer.send(*outgoing)  # the roster


@contextmanager
def victim(rank: int) -> Iterator[tuple[World, Callable[[], socket.socket]]]:
    """A worker whose only peer is an attacker; yields the cluster and a function that connects to the worker."""
    world = World(SIZE)
    if rank == 0:
        world.start([0], {0: ONE_RUN})
        _, address = world.store.wait_for_address()
        yield world, lambda: socket.create_connection(address, timeout=HANG)
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        AddressBook(world.store, worker(0, SIZE).entry).publish(listener.getsockname())
        world.start([1], {1: ONE_RUN})
        listener.settimeout(HANG)

        def accept() -> socket.socket:
            with listener:  # the worker's next attempt is refused; it would wait for an answer otherwise
                return listener.accept()[0]

        yield world, accept


def disconnects(connection: socket.socket) -> bool:
    """Return whether the worker at the other end closes this connection."""
    connection.settimeout(HANG)
    return is_closed(connection)


def is_closed(connection: socket.socket) -> bool:
    """Return whether the worker at the other end has closed this connection; read what it sent before that."""
    try:
        while connection.recv(65536):
            continue
    except (TimeoutError, BlockingIOError):
        return False
    except ConnectionError:
        pass
    return True


def connect_and_advance(goal: object, rank: int, connect: Callable[[], socket.socket]) -> socket.socket:
    """Return a connection to the victim on which the attacker has reached `goal` and sends nothing more."""
    connection = connect()
    if goal == CONTACT:
        return connection
    if goal == HALF_TLS:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00")
        return connection
    credentials = Credentials()
    liar = Liar(1 - rank, lambda: UnauthenticatedPeer(connection, credentials, server=rank == 1), credentials)
    assert isinstance(goal, State | Phase)
    liar.advance_to(goal)
    return connection


# -- silence ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("A peer that stalls in any state of an admission is dropped, or ends the join at its deadline.")
@pytest.mark.parametrize("state", EVERY_STATE, ids=str)
@pytest.mark.parametrize("rank", [0, 1], ids=["by the parent", "by the child"])
def test_an_unauthenticated_peer_that_stalls_is_dropped_in_every_state(
    state: object, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker keeps waiting for the right peer until its own deadline, and names it.

    A child whose proof was accepted may have admitted the parent: it is not dropped before that deadline.
    """
    clock = Clock(monkeypatch)
    with victim(rank) as (world, connect):
        connection = connect_and_advance(state, rank, connect)
        clock.skip_waiting(0.0)  # the worker has accepted the connection
        clock.skip_waiting(keys.ADMISSION_SECONDS)
        if (rank, state) == (0, State.ADMIT):
            connection.setblocking(False)
            assert not is_closed(connection)
        else:
            assert disconnects(connection), f"it still waits for a peer in state {state}"
        connection.close()
        clock.advance(FAR)
        error = world.error(rank)
    assert "did not form within 600 s" in error
    assert ("missing: rank 1" if rank == 0 else "did not reach its parent, rank 0") in error


@pytest.mark.promise("A peer that stalls in any state of an admission is dropped, or ends the join at its deadline.")
@pytest.mark.parametrize(
    ("rank", "phase", "reason"),
    [
        (0, Phase.GATHER, "; 1 of 2 workers are missing: rank 1"),
        (0, Phase.ACKED, "rank 0 waits for rank 1 to acknowledge the roster"),
        (1, Phase.GATHER, "rank 1 waits for the roster from its parent, rank 0"),
        (1, Phase.SEALED, "rank 1 waits for GO from its parent, rank 0"),
    ],
    ids=["a child gathers", "a child acknowledges", "a parent gathers", "a parent seals"],
)
def test_an_admitted_worker_that_stalls_ends_the_join_at_its_deadline(
    rank: int, phase: Phase, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`phase` is where the liar stops, before it sends what is due there."""
    clock = Clock(monkeypatch)
    with victim(rank) as (world, connect):
        connection = connect_and_advance(phase, rank, connect)
        clock.advance(1.0)  # the victim has read what the liar sent
        clock.advance(FAR)
        error = world.error(rank)
        assert disconnects(connection)
    assert "did not form within 600 s" in error and reason in error


def test_a_late_worker_that_stalls_is_not_reported_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has reported rank 1 as missing; then rank 1 comes, gets the roster, and does not acknowledge it."""
    clock = Clock(monkeypatch)
    with victim(0) as (world, connect):
        credentials = Credentials()
        connection = connect()
        liar = Liar(1, lambda: UnauthenticatedPeer(connection, credentials, server=False), credentials)
        peer = liar.advance_to(Phase.GATHER)
        assert peer.receive() == Waiting(1, (1,))
        peer.send(Entries((liar.tree._listings[1],)))
        clock.advance(1.0)  # rank 0 has read them
        clock.advance(FAR)
        error = world.error(0)
        connection.close()
    assert "; rank 0 waits for rank 1 to acknowledge the roster" in error
    assert "missing" not in error


def test_a_worker_that_fails_before_go_informs_those_that_have_begun() -> None:
    with victim(0) as (world, connect):
        credentials = Credentials()
        connection = connect()
        liar = Liar(1, lambda: UnauthenticatedPeer(connection, credentials, server=False), credentials)
        peer = liar.advance_to(Phase.ACKED)
        assert liar.tree.session is not None
        peer.send(Acknowledge(liar.tree.session.roster.digest), Failure(1, "KeyboardInterrupt"))
        connection.shutdown(socket.SHUT_WR)
        (member,) = world.members()
        (edge,) = member.edges
        found: list[ControlMessage] = []
        while not any(isinstance(each, Closed) for each in found):
            select.select([edge], [], [], HANG)
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
@pytest.mark.parametrize("rank", [0, 1], ids=["by the parent", "by the child"])
def test_garbage_in_any_state_ends_only_the_connection(
    state: State, rank: int, garbage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside TLS, in `state`: the worker closes the connection at once and admits the right peer."""
    monkeypatch.setattr(keys, "ADMISSION_SECONDS", FAR)  # it is not dropped for its silence
    with victim(rank) as (world, connect):
        credentials = Credentials()
        connection = connect()
        liar = Liar(1 - rank, lambda: UnauthenticatedPeer(connection, credentials, server=rank == 1), credentials)
        liar.advance_to(state).send_bytes(garbage)
        assert disconnects(connection)
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
def test_garbage_from_an_admitted_worker_ends_the_join_and_names_it(rank: int, phase: Phase, garbage: bytes) -> None:
    with victim(rank) as (world, connect):
        credentials = Credentials()
        connection = connect()
        liar = Liar(1 - rank, lambda: UnauthenticatedPeer(connection, credentials, server=rank == 1), credentials)
        liar.advance_to(phase).send_bytes(garbage)
        error = world.error(rank)
        connection.close()
    assert f"rank {1 - rank} was lost while the run was forming" in error


def test_the_liar_joins_if_it_does_not_stop() -> None:
    """The control for the tests above: without silence and garbage, the liar is admitted."""
    with victim(0) as (world, connect):
        credentials = Credentials()
        connection = connect()
        liar = Liar(1, lambda: UnauthenticatedPeer(connection, credentials, server=False), credentials)
        done = threading.Thread(target=lambda: liar.advance_to(Phase.ACKED), daemon=True)
        done.start()
        done.join(HANG)
        assert liar.tree.phase is Phase.ACKED
        assert liar.tree.session is not None
        peer = liar.connection
        (entry,) = [each for each in liar.tree.session.roster.entries if each.rank == 1]
        assert entry == liar.own.entry
        acknowledge = liar.tree._acknowledge_if_all()[0].message
        peer.send(acknowledge)
        (member,) = world.members()
        assert member.roster.digest == liar.tree.session.roster.digest
        assert encode(acknowledge)[5:] == member.roster.digest + bytes(4), "a shared secret signs nothing"
        world.close()
        connection.close()


def test_frames_of_the_tree_are_refused_before_admission() -> None:
    frames = MessageSplitter(TREE, tree_frame_limit(SIZE))
    frames.feed(encode(worker(0, SIZE).hello))
    with pytest.raises(Exception, match="not allowed here"):
        frames.next()
