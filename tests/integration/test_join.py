"""Workers join over real sockets: all in the same session, or an error that names the missing ranks and why."""

from __future__ import annotations

import multiprocessing
import re
import select
import socket
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfence import keys
from ringfence.admission.binding import Binding
from ringfence.admission.entry import Entry
from ringfence.admission.messages import Hello
from ringfence.admission.policy import Evidence, Policy, Prover
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.config.settings import Settings
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.runtime.control import Abort, Bye, Closed
from ringfence.session.join import Membership, diagnostics, join, listen, loop
from ringfence.session.join.diagnostics import Deadline
from ringfence.session.join.loop import JoinLoop
from ringfence.session.join.parent import AddressBook
from ringfence.session.join.provers import policy_of
from ringfence.transport.tls import Credentials
from tests.integration.join_cluster import (
    OTHER_SECRET,
    SECRET,
    Admissions,
    Clock,
    MemoryStore,
    Slow,
    Warnings,
    World,
    slow_policy,
)
from tests.limits import FAR, HANG
from tests.unit.admission_samples import worker


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_all_workers_join_the_same_session(size: int) -> None:
    with World(size) as world:
        world.start(reversed(range(size)))
        members = world.members()
        assert len({member.roster.digest for member in members}) == 1
        assert all(member.session_key == members[0].session_key for member in members)
        assert {member.table for member in members} == {b"table of 0"}
        assert {each.proof_name for member in members for each in member.roster.admitted} == {"shared secret"}
        assert {member.suite for member in members} == {keys.SUITE_AES_256_GCM}
        for rank, member in enumerate(members):
            entry = member.roster.entries[rank]
            assert entry.public_key == member.link_private_key.public_key().public_bytes_raw()
            assert (entry.host, entry.port) == ("127.0.0.1", 30000 + rank)
            assert (member.rank, member.world_size, len(member.roster.entries)) == (rank, size, size)
        edges = {(member.rank, edge.peer) for member in members for edge in member.edges}
        assert edges == {(b, a) for a, b in edges}
        assert len(edges) == 2 * (size - 1)


def test_a_world_of_one_opens_no_socket_and_asks_no_store() -> None:
    world = World(1)
    world.start([0])
    assert world.members()[0].edges == ()
    assert world.store.lookups == 0


def test_workers_of_a_machine_listen_there_before_anyone_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that did not listen yet would be dialled over TCP for the rest of the session."""
    may_end, member_of = threading.Event(), JoinLoop._membership

    def late(loop: JoinLoop) -> Membership:
        assert loop._entry.rank == 0 or may_end.wait(HANG)
        return member_of(loop)

    monkeypatch.setattr(JoinLoop, "_membership", late)
    with World(3) as world:
        world.start(range(3))
        first = world.member(0)
        assert first.local is not None and first.local.workers == {1, 2}
        connections = [first.local.dial(1), first.local.dial(2)]
        may_end.set()
        assert all(connections)
        for connection in connections:
            connection.close()  # type: ignore[union-attr]


def test_a_policy_that_seals_inside_a_machine_listens_nowhere() -> None:
    with World(2) as world:
        world.start(range(2), dict.fromkeys(range(2), Settings(SECRET, same_host="sealed")))
        for member in world.members():
            assert member.local is not None and not member.local.workers and member.local.listener is None


def test_workers_that_seal_and_workers_that_do_not_form_no_run() -> None:
    world = World(2)
    world.start(range(2), {1: Settings(SECRET, same_host="sealed")})
    for rank in range(2):
        assert "different policies" in world.error(rank)


@pytest.mark.promise("Every session draws fresh keys.")
def test_two_sessions_share_nothing() -> None:
    with World(2) as one, World(2) as two:
        one.start([0, 1])
        two.start([0, 1])
        assert one.members()[0].session_key != two.members()[0].session_key
        assert one.members()[0].roster.digest != two.members()[0].roster.digest
        entries = [entry for world in (one, two) for entry in world.members()[0].roster.entries]
        assert len({entry.public_key for entry in entries}) == len(entries)
        assert len({entry.tls_key_digest for entry in entries}) == len(entries)


@pytest.mark.promise("Every session draws fresh keys.")
@pytest.mark.promise("A secret that leaks later does not open a recorded run.")
def test_the_sessions_secret_is_drawn_and_not_derived() -> None:
    """In both joins all that is stored, and all that goes into the roster, is the same, to this worker's own keys."""
    credentials, private_key = Credentials(), X25519PrivateKey.generate()
    public_key = private_key.public_key().public_bytes_raw()
    entry = Entry(
        run_id="none",
        generation="0",
        rank=0,
        world_size=1,
        public_key=public_key,
        tls_key_digest=credentials.key_digest,
        host="127.0.0.1",
        port=30000,
    )
    settings = Settings(SECRET)
    one, two = (
        JoinLoop(
            store=MemoryStore(),
            settings=settings,
            entry=entry,
            credentials=credentials,
            private_key=private_key,
            deadline=Deadline(FAR, time.monotonic() + FAR),
            table=b"table",
            admission=policy_of(settings),
        ).run()
        for _ in range(2)
    )
    assert one.roster.digest == two.roster.digest
    assert one.session_key != two.session_key


def test_a_membership_shows_no_secret() -> None:
    with World(2) as world:
        world.start([0, 1])
        member = world.members()[0]
        assert member.session_key.reveal().hex() not in repr(member)
        assert repr(member.session_key.reveal()) not in repr(member)


def test_the_control_edges_have_keepalive_and_a_limit_on_silence() -> None:
    with World(2) as world:
        world.start([0, 1])
        for member in world.members():
            copy = socket.socket(fileno=socket.dup(member.edges[0].fileno()))
            with copy:
                assert copy.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3
                assert copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 30
                assert copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 300_000


def test_the_admission_listener_closes_when_the_session_begins() -> None:
    with World(2) as world:
        world.start([0, 1])
        world.members()
        _, address = world.store.wait_for_address()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=HANG)


# -- failures -------------------------------------------------------------------------------------------------------


HINTS = "check that all workers run, have the same RINGFENCE_RUN_ID"


def test_a_missing_rank_is_named_by_everyone_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, admissions = Clock(monkeypatch), Admissions(monkeypatch)
    world = World(7)
    world.start([0, 1, 2, 3, 4, 5])
    admissions.wait_for_pairs(5)
    for _ in range(8):  # two levels up for what is listed, two down for rank 0's report: a turn of every join for each
        clock.advance(1.0)
    clock.advance(FAR)
    world.finish()
    for rank in range(6):
        error = world.error(rank)
        assert error.startswith("AdmissionError")
        assert "did not form within 600 s (the shorter of RINGFENCE_JOIN_TIMEOUT" in error
        assert "1 of 7 workers are missing: rank 6" in error
        assert HINTS in error


def test_a_worker_that_cannot_reach_its_parent_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, world = Clock(monkeypatch), World(2)
    world.start([1])
    world.store.wait_for_lookups(2)
    clock.advance(FAR)
    error = world.error(1)
    assert "rank 1 did not reach its parent, rank 0: it has not published an address" in error


def test_a_waiting_worker_warns_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two generations of one run: each looks for the other in a place of its own, until the deadline."""
    monkeypatch.setattr(diagnostics, "FIRST_WARNING", FAR)
    monkeypatch.setattr(diagnostics, "NEXT_WARNING", 2 * FAR)
    clock, world = Clock(monkeypatch), World(2, timeout=4 * FAR)
    with Warnings() as logged:
        world.start([0, 1], {1: replace(Settings(SECRET), generation="1")})
        world.store.wait_for_lookups(2)
        counts = []
        for _ in range(3):
            clock.advance(FAR)
            counts.append(len(logged.texts))
        clock.advance(FAR)
        errors = [world.error(rank) for rank in (0, 1)]
    said = logged.texts
    assert counts == [2, 2, 4] and len(said) == 4, "it is said again, and not all the time"
    after = r"run 'none', generation {}, has not formed after (6|18)\d\d of 2400 s; "
    parent, child = ([text for text in said if re.match(after.format(generation), text)] for generation in (0, 1))
    assert len(parent) == len(child) == 2
    _, (host, port) = world.store.wait_for_address()
    for text in (parent[0], errors[0]):
        assert "1 of 2 workers are missing: rank 1" in text
        assert f"rank 0 itself is at {host}:{port}" in text
    for text in (child[0], errors[1]):
        assert "rank 1 did not reach its parent, rank 0: it has not published an address" in text
        assert "rank 1 itself is at 127.0.0.1:30001" in text
    for text in (*said, *errors):
        assert "RINGFENCE_RUN_ID and RINGFENCE_GENERATION" in text


def test_a_worker_with_all_its_neighbours_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "FIRST_WARNING", FAR)
    clock, admissions = Clock(monkeypatch), Admissions(monkeypatch)
    with Warnings() as logged, World(3, timeout=2 * FAR) as world:
        world.start([0, 1])
        admissions.wait_for_pairs(1)
        for _ in range(2):
            clock.advance(FAR)
        world.finish()
    said = logged.texts
    assert len(said) == 1
    assert "1 of 3 workers are missing: rank 2" in said[0]
    assert "rank 0 itself is at" in said[0]


def test_an_address_that_refuses_is_named_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, world = Clock(monkeypatch), World(2)
    with socket.socket() as deaf:  # bound, so that no other process can listen there
        deaf.bind(("127.0.0.1", 0))
        address = deaf.getsockname()
        AddressBook(world.store, worker(0, 2, run_id="none", generation="0").entry).publish(address)
        world.start([1])
        world.store.wait_for_lookups(2)  # the first attempt has failed
    clock.advance(FAR)
    assert f"rank 1 did not reach its parent, rank 0: 127.0.0.1:{address[1]}: Connection refused" in world.error(1)


def test_an_unreachable_address_is_named_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP has none to a broadcast address: the kernel says so at once, sends nothing, and keeps no error in the socket."""
    clock, world = Clock(monkeypatch), World(2)
    AddressBook(world.store, worker(0, 2, run_id="none", generation="0").entry).publish(("255.255.255.255", 4000))
    world.start([1])
    world.store.wait_for_lookups(2)
    clock.advance(FAR)
    assert "its parent, rank 0: 255.255.255.255:4000: Network is unreachable" in world.error(1)


def test_a_wrong_secret_is_refused_and_both_sides_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, world = Clock(monkeypatch), World(2)
    with Warnings() as warnings:
        world.start([0, 1], {1: Settings(OTHER_SECRET)})
        warnings.wait_for(lambda texts: sum("give every worker the same secret file" in text for text in texts) == 2)
    clock.advance(FAR)
    refused, waited = world.error(1), world.error(0)
    assert "rank 1 did not reach its parent, rank 0" in refused and "rank 1 refused by the worker at" in refused
    assert "give every worker the same secret file" in refused
    assert "1 of 2 workers are missing: rank 1" in waited
    assert "rank 1 does not have the shared secret" in waited
    assert HINTS not in refused + waited, "the cause is known"


def test_a_missing_worker_beside_a_refused_one_gets_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, world = Clock(monkeypatch), World(3)
    with Warnings() as warnings:
        world.start([0, 1], {1: Settings(OTHER_SECRET)})
        warnings.wait_for(lambda texts: any("rank 1 does not have the shared secret" in text for text in texts))
    clock.advance(FAR)
    waited = world.error(0)
    assert "rank 1 does not have the shared secret" in waited and HINTS in waited


@pytest.mark.promise("A peer that has not proved its rank cannot end a join.")
@pytest.mark.parametrize("impostor", [0, 1], ids=["as parent", "as child"])
def test_an_impostor_does_not_end_the_join_of_others(monkeypatch: pytest.MonkeyPatch, impostor: int) -> None:
    """Any peer that reaches a port, or that the store names, could otherwise end a run by claiming to be the missing rank."""
    clock, world = Clock(monkeypatch), World(2)
    other = World(2, timeout=FAR / 2, store=world.store)
    with Warnings() as warnings:
        other.start([impostor], {impostor: Settings(OTHER_SECRET)})
        world.start([1 - impostor])
        warnings.wait_for(lambda texts: sum("the same secret file" in text for text in texts) >= 1)
    clock.advance(FAR / 2)  # many refusals later
    assert "did not form within" in other.error(impostor)
    with world:
        world.start([impostor])
        assert [member.rank for member in world.members()] == [0, 1]


@pytest.mark.promise(
    "Workers of different versions or policies that prove themselves end the join at once, on both sides."
)
def test_another_world_size_ends_both_joins() -> None:
    two = World(2)
    three = World(3, store=two.store)
    two.start([0])
    three.start([1])
    assert "different world sizes: 3 and 2" in three.error(1)
    assert "different world sizes: 2 and 3" in two.error(0)


@pytest.mark.promise(
    "Workers of different versions or policies that prove themselves end the join at once, on both sides."
)
@pytest.mark.parametrize("newer", range(2))
def test_another_version_ends_both_joins(monkeypatch: pytest.MonkeyPatch, newer: int) -> None:
    def hello(**fields: Any) -> Hello:
        return Hello(**fields, version=2, release="0.9.3") if fields["entry"].rank == newer else Hello(**fields)

    monkeypatch.setattr(loop, "Hello", hello)
    world = World(2)
    world.start(range(2))
    for rank in range(2):
        assert "install one release on all machines, such as 0.9.3" in world.error(rank)


@pytest.mark.promise("Two workers that claim one rank end the session, and the error names both.")
def test_two_workers_with_one_rank_end_the_session_for_all() -> None:
    world, double = World(3), None
    world.start([0, 1])
    world.store.wait_for_address()
    double = World(3, store=world.store)
    double.start([1])
    errors = [world.error(0), world.error(1), double.error(1)]
    assert "two workers claim rank 1" in errors[0]
    assert any("rank 0 ended the join: two workers claim rank 1" in error for error in errors[1:])


def test_a_failure_in_one_worker_reaches_the_others_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, admissions = Clock(monkeypatch), Admissions(monkeypatch)
    late = World(6, timeout=2 * FAR)
    soon = World(6, store=late.store)
    late.start([0, 1, 2])
    soon.start([5])
    admissions.wait_for_pairs(3)
    clock.advance(FAR)
    for rank in (0, 1, 2):
        assert "rank 5 ended the join" in late.error(rank)
    soon.finish()


def test_a_store_that_fails_is_named() -> None:
    class Broken(MemoryStore):
        def check(self, keys: list[str], /) -> bool:
            raise RuntimeError("connection reset by peer")

    world = World(2, store=Broken())
    world.start([1])
    assert "the store failed while rank 1 was joining: connection reset by peer" in world.error(1)


# -- addresses ------------------------------------------------------------------------------------------------------


def test_listeners_keep_to_the_range_of_ports() -> None:
    with listen(Settings(SECRET)) as other:  # no other process can take its port meanwhile, except at one address
        port = other.getsockname()[1]
        narrow = Settings(SECRET, host="127.0.0.2", ports=range(port, port + 1))
        with listen(narrow) as one:
            assert one.getsockname()[1] == port
            with pytest.raises(ConfigurationError, match=rf"ports {port}-{port} of 127\.0\.0\.2.*RINGFENCE_PORTS"):
                listen(narrow)


def test_an_address_that_is_not_ours_cannot_be_bound() -> None:
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1.*RINGFENCE_INTERFACE"):
        listen(Settings(SECRET, host="192.0.2.1"))


def test_workers_join_over_ipv6() -> None:
    with World(2) as world:
        world.start([0, 1], dict.fromkeys((0, 1), Settings(SECRET, host="::1")))
        assert len(world.members()) == 2


# -- processes ------------------------------------------------------------------------------------------------------


def _join_in_process(pipe: Connection, store_file: str, rank: int, size: int) -> None:
    from torch.distributed import FileStore

    member = join(FileStore(store_file, size), rank, size, Settings(SECRET), ("127.0.0.1", 1), FAR, b"")
    pipe.send((member.roster.digest, keys.digest(b"test", member.session_key.reveal())))
    pipe.recv()
    for edge in member.edges:
        edge.send(Bye(rank))
        edge.close()


def test_processes_join_through_a_store_of_torch(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for rank in range(3):
        near, far = context.Pipe()
        worker = context.Process(target=_join_in_process, args=(far, str(tmp_path / "store"), rank, 3), daemon=True)
        worker.start()
        pipes.append(near)
        workers.append(worker)
    results = set()
    for pipe in pipes:
        assert pipe.poll(HANG), "a worker did not join"
        results.add(pipe.recv())
    assert len(results) == 1
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.send("done")
        worker.join(HANG)
        assert worker.exitcode == 0


# -- the control plane ----------------------------------------------------------------------------------------------


def pair() -> tuple[World, Membership, Membership]:
    world = World(2)
    world.start([0, 1])
    parent, child = world.members()
    return world, parent, child


def next_message(member: Membership) -> object:
    """Wait until the only edge of a worker has something to say."""
    edge = member.edges[0]
    found: list[object] = []
    while not found:
        select.select([edge], [], [], HANG)
        found += edge.receive()
    assert len(found) == 1, found
    return found[0]


def test_messages_cross_an_edge_both_ways() -> None:
    world, parent, child = pair()
    with world:
        abort = Abort(1, -1, 3, "all_reduce #7", "tag mismatch")
        child.edges[0].send(abort)
        assert next_message(parent) == abort
        answer = Abort(0, 1, 255, "", "gone\n" * 100)
        parent.edges[0].send(answer)
        received = next_message(child)
        assert received == answer
        assert isinstance(received, Abort)
        assert len(received.text) == 256
        assert "\n" not in received.text
        assert parent.edges[0].receive() == []


def test_an_end_after_a_bye_differs_from_an_end_without() -> None:
    world, parent, child = pair()
    child.edges[0].send(Bye(1))
    child.edges[0].close()
    found: list[object] = []
    while not any(isinstance(each, Closed) for each in found):
        select.select([parent.edges[0]], [], [], HANG)
        found += parent.edges[0].receive()
    assert found[0] == Bye(1)
    assert isinstance(found[-1], Closed)
    assert parent.edges[0].receive() == []
    world.close()

    world, parent, child = pair()
    child.edges[0].abandon()
    end = next_message(parent)
    assert isinstance(end, Closed)
    parent.edges[0].send(Bye(0))  # to nobody: no error
    world.close()


def test_a_message_that_arrived_with_go_is_not_lost() -> None:
    """The parent may abort before the child has returned from its join: both in one piece on the wire."""
    world = World(2)
    world.start([0])
    world.store.wait_for_address()
    world.start([1])
    parent, child = world.members()
    with world:
        parent.edges[0].send(Abort(0, -1, 1, "", "at once"))
        assert next_message(child) == Abort(0, -1, 1, "", "at once")


def test_writes_that_the_kernel_does_not_take_are_kept() -> None:
    world, parent, child = pair()
    with world:
        abort = Abort(1, 0, 1, "p" * 256, "t" * 256)
        sent = 0
        while not child.edges[0].wants_write:
            child.edges[0].send(abort)
            sent += 1
        received = 0
        while received < sent:
            child.edges[0].flush()
            received += len(parent.edges[0].receive())
        assert not child.edges[0].wants_write
        assert received == sent


class Moody(Prover):
    """Shows a shared secret, but not the first `times`: as a service that is down, or a device that is busy."""

    kind = 1

    def __init__(self, times: int, error: Exception) -> None:
        self.left = times
        self.asked = threading.Semaphore(0)
        self._error = error
        self._shared = SharedSecret(SECRET, "none")

    def prove(self, binding: Binding) -> bytes:
        self.left -= 1
        self.asked.release()
        if self.left >= 0:
            raise self._error
        return self._shared.prove(binding)

    def endorse(self, entry: Entry, proof_digest: bytes) -> bytes:
        return self._shared.endorse(entry, proof_digest)


@pytest.mark.parametrize("rank", [0, 1], ids=["parent", "child"])
@pytest.mark.parametrize("error", [ConfigurationError("the service is down"), AdmissionError("an odd answer")])
def test_unavailable_evidence_is_requested_again(rank: int, error: Exception) -> None:
    """An impostor at the parent's address makes a child ask for evidence, so this must not end anything."""
    moody = Moody(2, error)
    with World(2) as world:
        world.start(range(2), admission={rank: (Policy((SharedSecret(SECRET, "none"),)), moody)})
        assert len(world.members()) == 2
    assert moody.left < 0


@pytest.mark.parametrize("rank", [0, 1], ids=["parent", "child"])
def test_missing_evidence_is_reported_at_the_deadline(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, moody = Clock(monkeypatch), Moody(1000, ConfigurationError("the service is down\x1b"))
    with World(2) as world:
        world.start(range(2), admission={rank: (Policy((SharedSecret(SECRET, "none"),)), moody)})
        for _ in range(2):  # the second time it is asked, its first answer has been recorded
            assert moody.asked.acquire(timeout=HANG)
        clock.advance(FAR)
        assert f"rank {rank} could not collect a proof: the service is down\\x1b" in world.error(rank)


@pytest.mark.parametrize("rank", [0, 1], ids=["parent", "child"])
def test_missing_evidence_ends_the_join_before_the_deadline(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "EVIDENCE_SECONDS", 0.3)
    clock, moody = Clock(monkeypatch), Moody(1000, ConfigurationError("the service is down"))
    with World(2) as world:
        world.start(range(2), admission={rank: (Policy((SharedSecret(SECRET, "none"),)), moody)})
        assert world.error(rank).startswith(f"EvidenceError: rank {rank} could not collect a proof for")
        clock.advance(FAR)  # the other one waits for it


@pytest.mark.promise("Evidence that takes long to collect does not stop a run, and collections are limited.")
def test_a_worker_that_collects_serves_others_meanwhile() -> None:
    """Rank 0 collects for one child; the other comes, is verified, and is collected for as well, before the first is done."""
    quick, slow = Slow(), Slow()
    quick.may_answer.set()
    with World(3) as world:
        world.start([0], admission={0: (slow_policy(), slow)})
        world.start([1, 2], admission={rank: (slow_policy(), quick) for rank in (1, 2)})
        for _ in range(2):
            assert slow.asked.acquire(timeout=HANG), "the second child waits for the first one's evidence"
        slow.may_answer.set()
        assert len(world.members()) == 3


def test_an_unexpected_error_while_collecting_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, broken = Clock(monkeypatch), Slow(RuntimeError("nobody foresaw this"))
    broken.may_answer.set()
    with World(2) as world:
        world.start([1], admission={1: (slow_policy(), broken)})
        world.start([0], admission={0: (slow_policy(), Slow())})
        assert world.error(1) == "RuntimeError: nobody foresaw this"
        clock.advance(FAR)


class Rude(SharedSecret):
    """A verifier that quotes an unauthenticated peer as it is."""

    def verify(self, evidence: Evidence) -> None:
        raise AdmissionError("it says \x1b[2J\nrank 9: admitted")


def test_text_of_an_unauthenticated_peer_is_one_printable_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rude = Clock(monkeypatch), Rude(SECRET, "none")
    with Warnings() as logged, World(2) as world:
        world.start(range(2), admission={0: (Policy((rude,)), rude)})
        logged.wait_for(lambda texts: sum("refused" in text for text in texts) == 2)  # each worker says it once
        clock.advance(FAR)
        errors = [world.error(rank) for rank in range(2)]
    shown = [text for text in logged.texts if "refused" in text]
    assert len(shown) == 2
    for text in (*shown, *errors):
        assert r"it says \x1b[2J\nrank 9: admitted" in text
        assert text.isprintable()
