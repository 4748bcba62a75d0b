"""The proof that workers are on one machine, within one process: the handshake over abstract sockets and its limits."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfence.keys import NONCE_BYTES, Secret
from ringfence.link.hello import CONFIRM_BYTES, HELLO_BYTES, REPLY_BYTES, Lane, LinkHello
from ringfence.runtime import same_machine
from ringfence.runtime.communicator import group_digest
from ringfence.runtime.link_keys import LinkKeys
from ringfence.runtime.same_machine import MachineProof, place
from ringfence.transport.unix import identifies
from tests.limits import FAR, HANG

MEMBERS = (0, 2, 5)
DIGEST = group_digest("7", MEMBERS)
NONCE = bytes(range(NONCE_BYTES))


class Session:
    """The keys of some workers, as after an admission."""

    def __init__(self, size: int = 6, session_key: bytes | None = None) -> None:
        self.private = [X25519PrivateKey.generate() for _ in range(size)]
        self.public = [key.public_key().public_bytes_raw() for key in self.private]
        self.session_key = os.urandom(32) if session_key is None else session_key

    def keys(self, rank: int) -> LinkKeys:
        return LinkKeys(Secret(self.session_key), self.private[rank], self.public)

    def proof(self, rank: int, members: Sequence[int] = MEMBERS, digest: bytes = DIGEST) -> MachineProof:
        return MachineProof(self.keys(rank), rank, members, digest)


def run(*proofs: MachineProof, seconds: float = FAR) -> list[set[int]]:
    """Run proofs at the same time; return whom each has proved."""
    found: dict[MachineProof, set[int]] = {}

    def one(proof: MachineProof) -> None:
        found[proof] = set(proof.run(seconds))

    threads = [threading.Thread(target=one, args=(proof,), daemon=True) for proof in proofs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive(), "a proof waits for its limit"
    for proof in proofs:
        proof.close()
    return [found[proof] for proof in proofs]


def connect(session: Session, rank: int) -> socket.socket:
    """Connect to a worker's socket as any process of this user can that has read its name in /proc/net/unix."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(HANG)
    stream.connect(session.keys(rank).machine_socket(DIGEST, rank))
    return stream


def test_members_on_one_machine_prove_it_to_each_other() -> None:
    session = Session()
    assert run(*map(session.proof, MEMBERS)) == [{2, 5}, {0, 5}, {0, 2}]


def test_a_member_elsewhere_ends_the_proof_at_once() -> None:
    """Worker 0 is not here: those that dial it know at once. Nobody dials worker 5, so 2 learns only of 0."""
    session = Session()
    proofs = [session.proof(rank) for rank in (2, 5)]
    for found in run(*proofs):
        assert 0 not in found
    assert "it does not listen here" in proofs[0].refusals[0]


def test_an_acceptor_waits_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock is in the test's hands: it is asked when the proof begins, and before and after each wait."""
    times = iter((0.0, 0.0, 0.0, 0.3, 0.3, 0.6))
    clock = SimpleNamespace(monotonic=lambda: next(times))
    waits: list[float] = []
    proof = Session().proof(0)
    monkeypatch.setattr(same_machine, "time", clock)
    monkeypatch.setattr(proof._selector, "select", lambda seconds: waits.append(seconds) or [])
    assert proof.run(0.6) == set()
    proof.close()
    assert waits == pytest.approx([0.6, 0.3]) and next(times, None) is None


def test_names_differ_by_session_group_and_worker() -> None:
    session = Session()
    names = {
        session.keys(0).machine_socket(digest, rank)
        for digest in (DIGEST, group_digest("8", MEMBERS))
        for rank in (0, 2)
    } | {Session().keys(0).machine_socket(DIGEST, 0)}
    assert len(names) == 5
    assert all(name.startswith(b"\0ringfence/1 ") and len(name) == 45 for name in names)


def test_a_name_that_is_taken_proves_nothing() -> None:
    session = Session()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as taken:
        taken.bind(session.keys(0).machine_socket(DIGEST, 0))
        taken.listen()
        assert run(session.proof(0), session.proof(2), seconds=0.5) == [set(), set()]


@pytest.mark.promise("Two workers on different machines, or of different users, cannot pass for one machine.")
@pytest.mark.parametrize("uid", [65534, int(Path("/proc/sys/kernel/overflowuid").read_text())])
def test_the_overflow_uid_identifies_nobody(uid: int) -> None:
    assert not identifies(uid)
    assert identifies(0) and identifies(1000)


def test_place_is_equal_in_one_process_and_hides_behind_the_session_key() -> None:
    one, two = Session(), Session()
    assert place() == place()
    hints = {keys.machine_hint(DIGEST, place()) for keys in (one.keys(0), one.keys(2), two.keys(0))}
    assert len(hints) == 2


# -- attacks ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("An unauthenticated peer on a socket of one machine gets one fixed-size read and a deadline.")
@pytest.mark.parametrize(
    "sent", [b"", b"x", bytes(HELLO_BYTES), os.urandom(100_000)], ids=["silence", "a byte", "zeros", "much"]
)
def test_garbage_is_dropped_and_the_members_prove_themselves(sent: bytes) -> None:
    session = Session()
    proofs = [session.proof(rank) for rank in MEMBERS]
    peers = [connect(session, 0) for _ in range(3)]
    for peer in peers:
        peer.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            peer.send(sent)
    assert run(*proofs) == [{2, 5}, {0, 5}, {0, 2}]
    for peer in peers:
        peer.close()


@pytest.mark.promise("An unauthenticated peer on a socket of one machine gets one fixed-size read and a deadline.")
def test_an_unauthenticated_peer_gets_no_answer() -> None:
    session = Session()
    proof = session.proof(0)
    with connect(session, 0) as peer:
        peer.send(os.urandom(HELLO_BYTES))
        assert run(proof, seconds=0.3) == [set()]
        assert peer.recv(100) == b""


@pytest.mark.promise("An unauthenticated peer on a socket of one machine gets one fixed-size read and a deadline.")
def test_pending_connections_are_limited() -> None:
    session = Session()
    proofs = [session.proof(rank) for rank in MEMBERS]
    background = threading.Thread(target=proofs[0].run, args=(FAR,), daemon=True)
    background.start()
    peers = []
    for _ in range(3 * same_machine._PENDING):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.connect(session.keys(0).machine_socket(DIGEST, 0))  # blocks while the queue is full
        peers.append(peer)
    assert len(proofs[0]._pending) <= same_machine._PENDING + 2
    assert run(*proofs[1:]) == [{0, 5}, {0, 2}]
    background.join(HANG)
    assert set(proofs[0].proved) == {2, 5}
    proofs[0].close()
    for peer in peers:
        peer.close()


def hello_of(session: Session, lane: int = Lane.SAME_MACHINE, **changes: object) -> bytes:
    hello = LinkHello(2, 0, lane, DIGEST, NONCE)._replace(**changes)  # type: ignore[arg-type]
    return session.keys(2).hello_bytes(hello)


@pytest.mark.parametrize(
    "changes",
    [
        {"lane": Lane.COLLECTIVE},
        {"lane": Lane.POINT_TO_POINT},
        {"lane": Lane.PEER_VERIFICATION},
        {"group": group_digest("8", MEMBERS)},
        {"sender": 1},
        {"sender": 0},
        {"receiver": 5},
    ],
    ids=["collective", "point-to-point", "peer verification", "group", "no member", "itself", "for another"],
)
def test_a_hello_of_another_place_is_not_answered(changes: dict[str, object]) -> None:
    """Also a recorded hello of a link: anyone in the session can make these."""
    session = Session()
    proof = session.proof(0)
    with connect(session, 0) as peer:
        peer.send(hello_of(session, **changes))  # type: ignore[arg-type]
        assert run(proof, seconds=0.3) == [set()]
        assert peer.recv(100) == b""


@pytest.mark.promise("Two workers on different machines, or of different users, cannot pass for one machine.")
def test_a_replayed_hello_proves_nothing() -> None:
    """The hello authenticates and gets an answer; the confirmation needs the private key of worker 2."""
    session = Session()
    proof = session.proof(0)
    with connect(session, 0) as peer:
        peer.send(hello_of(session))
        background = threading.Thread(target=proof.run, args=(FAR,), daemon=True)
        background.start()
        assert len(peer.recv(2 * REPLY_BYTES)) == REPLY_BYTES
        peer.send(os.urandom(CONFIRM_BYTES))
        assert peer.recv(100) == b""
        assert not proof.proved
    run(session.proof(2), session.proof(5))  # ends the wait for both
    background.join(HANG)
    assert set(proof.proved) == {2, 5}
    proof.close()


@pytest.mark.promise("Two workers on different machines, or of different users, cannot pass for one machine.")
def test_a_worker_of_the_session_cannot_stand_in_for_another() -> None:
    """Worker 3 knows the session key, but not the private key of worker 2, in either role."""
    session, liar = Session(), Session()
    liar.session_key, liar.public = session.session_key, session.public
    for honest, claimed in ((0, 2), (2, 0)):
        proof, false = session.proof(honest, (0, 2)), liar.proof(claimed, (0, 2))
        assert run(proof, false, seconds=0.5)[0] == set()


def test_workers_of_two_sessions_do_not_find_each_other() -> None:
    one, two = Session(), Session()
    assert run(one.proof(0, (0, 2)), two.proof(2, (0, 2)), seconds=0.3) == [set(), set()]


def test_a_second_connection_of_a_proved_worker_is_refused() -> None:
    session = Session()
    proofs = [session.proof(0), session.proof(2, (0, 2))]  # worker 5, for which worker 0 waits, runs at the end
    background = threading.Thread(target=proofs[0].run, args=(FAR,), daemon=True)
    background.start()
    assert proofs[1].run(FAR) == {0}
    with connect(session, 0) as peer:
        peer.send(hello_of(session))
        assert peer.recv(100) == b""
    assert set(proofs[0].proved) == {2}
    assert run(session.proof(5, (0, 5))) == [{0}]
    background.join(HANG)
    for proof in proofs:
        proof.close()


def test_nothing_stays_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    run(*map(Session().proof, MEMBERS), seconds=0.2)
    assert set(os.listdir("/proc/self/fd")) == before


def test_forgotten_keys_prove_nothing() -> None:
    """A session that fails meanwhile wipes its keys."""
    session = Session()
    keys = session.keys(2)
    proofs = [session.proof(0, (0, 2)), MachineProof(keys, 2, (0, 2), DIGEST)]
    keys.forget()
    assert run(*proofs, seconds=0.3) == [set(), set()]
