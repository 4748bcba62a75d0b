"""Attacks on the proof of one machine, by processes: other users, other namespaces, and relays between them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import selectors
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from ringfence.runtime.same_machine import MachineProof
from tests.limits import HANG
from tests.unit.test_same_machine import DIGEST, Session

CLONE_NEWUSER, CLONE_NEWNET = 0x1000_0000, 0x4000_0000
OTHER_USER = 1234
PAIR = (0, 2)
SECONDS = 2.0  # for what must not prove it

pytestmark = pytest.mark.processes


def unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def stay() -> None:
    """The same user and namespace as the test."""


def other_user() -> None:
    os.setresuid(OTHER_USER, OTHER_USER, OTHER_USER)


def other_network() -> None:
    unshare(CLONE_NEWNET)


def unmapped_user() -> None:
    """A user namespace without a mapping: this process and the test see each other, and themselves, as user 65534."""
    unshare(CLONE_NEWUSER)
    assert os.geteuid() == 65534


class Child:
    """A forked process that runs a proof somewhere else, in steps that the test controls."""

    def __init__(self, session: Session, rank: int, enter: Callable[[], None], seconds: float) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=self._run, args=(theirs, session, rank, enter, seconds), daemon=True)
        self._process.start()
        theirs.close()
        assert self.pipe.recv() == "listening"

    @staticmethod
    def _run(pipe: Connection, session: Session, rank: int, enter: Callable[[], None], seconds: float) -> None:
        enter()
        proof = session.proof(rank, PAIR)
        pipe.send("listening")
        assert pipe.recv() == "go"
        pipe.send((set(proof.run(seconds)), proof.refusals))
        proof.close()

    def result(self) -> tuple[set[int], dict[int, str]]:
        found: tuple[set[int], dict[int, str]] = self.pipe.recv()
        self._process.join(HANG)
        assert self._process.exitcode == 0
        return found


def attempt(mine: int, enter: Callable[[], None], seconds: float = SECONDS) -> tuple[set[int], set[int], str]:
    """Worker `mine` here and the other elsewhere. Return whom each has proved, and why the dialler refused, if it did."""
    session = Session()
    (other,) = set(PAIR) - {mine}
    child = Child(session, other, enter, seconds)
    proof = session.proof(mine, PAIR)
    child.pipe.send("go")
    here = set(proof.run(seconds))
    there, refusals = child.result()
    text = " ".join((*proof.refusals.values(), *refusals.values()))
    proof.close()
    return here, there, text


@pytest.mark.parametrize("mine", PAIR)
def test_two_processes_of_one_user_prove_it(mine: int) -> None:
    """Without this, the refusals below would mean nothing."""
    here, there, _ = attempt(mine, stay, HANG)
    assert (here, there) == ({2 - mine}, {mine})


@pytest.mark.promise("Two workers on different machines, or of different users, cannot pass for one machine.")
@pytest.mark.parametrize("mine", PAIR, ids=["accepts", "dials"])
@pytest.mark.parametrize(
    ("enter", "reason"),
    [
        (other_user, "the process there has the user id"),
        (other_network, "it does not listen here"),
        (unmapped_user, ""),
    ],
    ids=["another user", "another network namespace", "the overflow user"],
)
def test_a_process_elsewhere_is_not_on_this_machine(mine: int, enter: Callable[[], None], reason: str) -> None:
    here, there, text = attempt(mine, enter)
    assert here == there == set()
    assert reason in text


# -- relays -----------------------------------------------------------------------------------------------------------


class Relay:
    """Takes the place of worker 0 in another network namespace and passes all bytes on to the real one.

    It has read the name of the socket where worker 0 is, and has a process on both sides: here one process does both.
    """

    def __init__(self, session: Session, uid: int) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        name = session.keys(0).machine_socket(DIGEST, 0)
        self.process = context.Process(target=self._run, args=(theirs, name, uid), daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.recv() == "ready"

    @staticmethod
    def _run(pipe: Connection, name: bytes, uid: int) -> None:
        outside = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM
        )  # a socket stays in the namespace that it was made in
        unshare(CLONE_NEWNET)
        os.setresuid(uid, uid, uid)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name)
        listener.listen()
        pipe.send("ready")
        victim, _ = listener.accept()
        outside.connect(name)
        pipe.send(carry(victim, outside))

    def enter(self) -> None:
        """Enter the relay's network namespace."""
        with open(f"/proc/{self.process.pid}/ns/net") as place:
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")


def carry(one: socket.socket, two: socket.socket) -> int:
    """Pass bytes on in both directions until an end closes; return how many."""
    count = 0
    with selectors.DefaultSelector() as selector:
        selector.register(one, selectors.EVENT_READ, (one, two))
        selector.register(two, selectors.EVENT_READ, (two, one))
        while True:
            for key, _ in selector.select(SECONDS):
                source, target = key.data
                data = source.recv(4096)
                if not data:
                    return count
                target.sendall(data)
                count += len(data)


@pytest.fixture
def session() -> Session:
    return Session()


def relayed(session: Session, uid: int, seconds: float) -> tuple[set[int], set[int], int]:
    """Worker 0 is here, worker 2 in another network namespace with a relay in between; whom they prove, and bytes relayed."""
    proof = session.proof(0, PAIR)
    relay = Relay(session, uid)
    child = Child(session, 2, relay.enter, seconds)
    child.pipe.send("go")
    here = set(proof.run(seconds))
    there, _ = child.result()
    proof.close()
    count: int = relay.pipe.recv() if relay.pipe.poll(10) else 0
    relay.process.kill()
    relay.process.join(HANG)
    return here, there, count


@pytest.mark.promise("Two workers on different machines, or of different users, cannot pass for one machine.")
def test_a_relay_of_another_user_gets_no_byte(session: Session) -> None:
    """Both ends close the connection by its user id, before they have sent anything."""
    assert relayed(session, OTHER_USER, SECONDS) == (set(), set(), 0)


@pytest.mark.promise("A process of the workers' own user on both machines can relay a proof of one machine.")
def test_a_relay_of_the_same_user_passes(session: Session) -> None:
    """Such a process can read the workers' memory; it is the worker, by the threat model."""
    here, there, count = relayed(session, os.geteuid(), HANG)
    assert (here, there) == ({2}, {0})
    assert count > 0


def test_a_proof_does_not_survive_a_fork() -> None:
    """A child that kept the listener could answer in its parent's place."""
    session = Session()
    proof = session.proof(0, PAIR)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def look() -> None:
        theirs.send((proof._listener is None, proof.run(0.1)))

    child = context.Process(target=look)
    child.start()
    assert ours.recv() == (True, frozenset())
    child.join(HANG)
    assert isinstance(proof, MachineProof) and proof._listener is not None
    proof.close()
