"""Peer verifications that are cut, stalled, crowded out or never answered are retried, or end the session by name."""

from __future__ import annotations

import errno
from typing import Any, NamedTuple

import pytest
import torch

from ringfence.dataplane.request import Request
from ringfence.errors import AbortedError, CollectiveTimeoutError
from ringfence.keys import LINK_DIALS, LINK_HELLO_SECONDS, NONCE_BYTES, Secret
from ringfence.link.evidence_frame import NO_GROUP, seal_presentation
from ringfence.link.hello import CONFIRM_BYTES, HELLO_BYTES, REPLY_BYTES, Lane, LinkHello
from ringfence.runtime import acceptor
from tests.attack.test_peer_verification import SIZE, honest, submit_all_reduce
from tests.in_memory_network import MemoryStream, Pipe
from tests.memory_cluster import World
from tests.unit.test_pending import answer, settle

NONCE = bytes(range(NONCE_BYTES))


def drive(world: World, requests: list[Any], seconds: float = 5.0) -> None:
    """Run a cluster, and advance time, until all requests are done."""
    for _ in range(int(seconds / 0.1)):
        world.run(requests)
        if all(request.done for request in requests):
            return
        for each in world.engines:  # unlike sockets, pipes in memory that carried nothing do not report their end
            links = [link for communicator in each.communicators.active.values() for link in communicator.links()]
            for link in (*links, *each.acceptor.verification_links.values()):
                if link.stream is not None and not link.open:
                    link.notify(True, False)
        world.wait(0.1)


class Torn:
    """A connection that is cut while its dialler writes: later writes raise."""

    def __init__(self, stream: MemoryStream, after: int, error: type[OSError]) -> None:
        self._stream = stream
        self._left = after
        self._error = error

    def send(self, data: memoryview) -> int:
        if not self._left:
            raise self._error(0, "cut")
        sent = self._stream.send(data[: self._left])
        self._left -= sent
        return sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tear(world: World, after: int, error: type[OSError], times: int = 1) -> list[int]:
    """Cut the first peer verifications of every worker; return the ranks that were cut."""
    cut: list[int] = []
    for each in world.engines:

        def dial(
            link: Any, network: Any = each.context.network, rank: int = each.rank, dial: Any = each.context.network.dial
        ) -> None:
            dial(link)
            if link.lane == Lane.PEER_VERIFICATION and cut.count(rank) < times:
                cut.append(rank)
                link.stream = Torn(link.stream, after, error)

        each.context.network.dial = dial  # type: ignore[method-assign]
    return cut


FORTH = HELLO_BYTES + CONFIRM_BYTES


@pytest.mark.promise("A peer verification that is cut, stalled or crowded out is retried, or ends the session by name.")
@pytest.mark.parametrize("error", [ConnectionResetError, BrokenPipeError])
@pytest.mark.parametrize(
    "after",
    [HELLO_BYTES, HELLO_BYTES + 10, FORTH, FORTH + 40, FORTH + 900],
    ids=["before confirm", "in confirm", "before the frame", "in its header", "in its proof"],
)
def test_a_peer_verification_cut_during_a_write_is_retried(after: int, error: type[OSError]) -> None:
    world = World(SIZE, verify_peers=honest)
    cut = tear(world, after, error)
    requests, tensors = submit_all_reduce(world)
    drive(world, requests)
    assert cut, "no connection was cut"
    assert [request.error for request in requests] == [None] * SIZE
    assert all(request.done for request in requests)
    assert all(torch.equal(each, torch.full((8,), 15.0)) for each in tensors)


@pytest.mark.promise("A peer verification that is cut, stalled or crowded out is retried, or ends the session by name.")
def test_a_peer_verification_that_is_always_cut_ends_the_session() -> None:
    world = World(SIZE, verify_peers=honest)
    tear(world, FORTH + 40, ConnectionResetError, times=LINK_DIALS)
    requests, _ = submit_all_reduce(world)
    drive(world, requests)
    assert all(request.error is not None for request in requests)
    assert any("closed a connection before answering it" in str(request.error) for request in requests)


def test_a_worker_out_of_descriptors_does_not_blame_its_peer() -> None:
    world = World(SIZE, verify_peers=honest)
    engine, dial, refused = world.engines[4], world.engines[4].context.network.dial, 0

    def run_out(link: Any) -> None:
        nonlocal refused
        if link.lane != Lane.PEER_VERIFICATION and engine.acceptor.verified:
            refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        dial(link)

    engine.context.network.dial = run_out  # type: ignore[method-assign]
    requests, _ = submit_all_reduce(world)
    drive(world, requests)
    assert refused and "worker 4: Too many open files. Raise the limit" in str(engine.failure)


# -- step by step: worker 5 dials worker 4 -----------------------------------------------------------------------


class Shaken(NamedTuple):
    """The confirm that worker 5 has to send, and the secrets of the connection."""

    confirm: bytes
    forth: Secret
    back: Secret


def send_hello(world: World) -> tuple[MemoryStream, Shaken]:
    """Send a hello and read the reply."""
    greeting = LinkHello(5, 4, Lane.PEER_VERIFICATION, NO_GROUP, NONCE)
    stream = world.wires.connect(5, 4)
    stream.send(memoryview(world.engines[5].keys.hello_bytes(greeting)))
    settle(world)
    reply = answer(stream)
    assert reply is not None and len(reply) == REPLY_BYTES
    found, secrets = world.engines[5].keys.confirm(greeting, reply)
    return stream, Shaken(found, secrets.forth, secrets.back)


def confirm(world: World, stream: MemoryStream, secrets: Shaken) -> bytes:
    """Confirm; return the frame that has to follow."""
    stream.send(memoryview(secrets.confirm))
    settle(world)
    known = world.engines[5].acceptor.peer_verifier
    assert known is not None
    return seal_presentation(world.engines[5].keys.sealer(secrets.forth), known.presentation)


def send(world: World, stream: MemoryStream, data: bytes) -> None:
    stream.send(memoryview(data))
    settle(world)


def verified(world: World) -> bool:
    known = world.engines[4].acceptor.peer_verifier
    assert known is not None
    return known.verified(5)


def no_worker_failed(world: World) -> bool:
    return all(each.failure is None for each in world.engines)


@pytest.mark.promise("A peer verification that is cut, stalled or crowded out is retried, or ends the session by name.")
def test_a_dialler_that_stalls_in_its_proof_may_dial_again() -> None:
    world = World(SIZE, verify_peers=honest)
    stream, secrets = send_hello(world)
    send(world, stream, confirm(world, stream, secrets)[:500])
    world.wait(LINK_HELLO_SECONDS - 0.1)
    assert len(world.engines[4].acceptor.pending) == 1
    world.wait(0.2)
    settle(world)
    assert answer(stream) is None and not world.engines[4].acceptor.pending
    assert no_worker_failed(world) and not verified(world)
    stream, secrets = send_hello(world)
    send(world, stream, confirm(world, stream, secrets))
    assert verified(world)


def test_the_deadline_for_the_proof_begins_with_the_confirm() -> None:
    world = World(SIZE, verify_peers=honest)
    stream, secrets = send_hello(world)
    world.wait(LINK_HELLO_SECONDS - 1)
    frame = confirm(world, stream, secrets)
    world.wait(LINK_HELLO_SECONDS - 1)
    send(world, stream, frame)
    assert verified(world)


@pytest.mark.promise("A peer verification that is cut, stalled or crowded out is retried, or ends the session by name.")
def test_a_flood_does_not_displace_a_presented_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a flood of replayed hellos."""
    monkeypatch.setattr(acceptor, "LINK_PENDING", 2)
    world = World(SIZE, verify_peers=honest)
    stream, secrets = send_hello(world)
    frame = confirm(world, stream, secrets)
    send(world, stream, frame[:500])
    replayed = world.engines[5].keys.hello_bytes(LinkHello(5, 4, Lane.PEER_VERIFICATION, NO_GROUP, NONCE))
    for number in range(10):
        world.wait(0.1)
        send(world, world.wires.connect(100 + number, 4), replayed)
        assert len(world.engines[4].acceptor.pending) <= 2 + 1
    send(world, stream, frame[500:])
    assert verified(world)


def test_a_worker_presents_its_proof_on_one_connection_at_a_time() -> None:
    """Confirmed connections do not count towards the limit, so each worker may have one."""
    world = World(SIZE, verify_peers=honest)
    streams = []
    for _ in range(5):
        stream, secrets = send_hello(world)
        send(world, stream, confirm(world, stream, secrets)[:500])
        streams.append(stream)
    settle(world)
    assert len(world.engines[4].acceptor.pending) == 1
    assert [answer(each) for each in streams] == [None] * 4 + [b""]
    assert no_worker_failed(world)


# -- all workers --------------------------------------------------------------------------------------------------


class Caller:
    """Waits for permission to dial a worker."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.done = False

    def dial(self) -> None:
        self.done = True


def test_all_pairs_verify_each_other_with_a_short_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pairs at once, proofs take many writes, and the queue has room for two pending connections."""
    monkeypatch.setattr(acceptor, "LINK_PENDING", 2)
    world = World(SIZE, capacity=600, verify_peers=honest)
    callers: list[Any] = []
    for each in world.engines:
        new = [Caller(worker) for worker in range(SIZE) if worker != each.rank]
        callers += [caller for caller in new if not each.acceptor.may_dial(caller)]  # type: ignore[arg-type]
    assert len(callers) == 20, "all but parents and children"
    drive(world, callers)
    assert no_worker_failed(world)
    assert all(caller.done for caller in callers)


def test_two_workers_that_dial_each_other_at_once_both_pass() -> None:
    world = World(SIZE, verify_peers=honest)
    pair = world.add_communicator("pair", (4, 5))
    pair[4].outbox(1)
    pair[5].outbox(0)
    settle(world)
    assert no_worker_failed(world)
    for one, two in ((4, 5), (5, 4)):
        known = world.engines[one].acceptor.peer_verifier
        assert known is not None and known.verified(two) and two in world.engines[one].acceptor.verified
        assert not world.engines[one].acceptor.verification_links and not world.engines[one].acceptor.pending
    assert pair[4].outbox(1).open and pair[5].outbox(0).open


def silence(pipe: Pipe, data: bytes) -> bytes:
    """Drop all data after the confirm: no acceptor receives a proof, and none answers."""
    return data[:CONFIRM_BYTES] if len(data) > REPLY_BYTES else data


@pytest.mark.promise("A peer verification that is cut, stalled or crowded out is retried, or ends the session by name.")
def test_a_silent_acceptor_is_waited_for_until_the_timeout() -> None:
    world = World(SIZE, verify_peers=honest)
    requests, _ = submit_all_reduce(world)
    world.run(requests, silence)
    assert not any(request.done for request in requests) and no_worker_failed(world)
    world.wait(10.1)  # the operations' timeout
    world.run(requests)
    errors = [request.error for request in requests]
    assert all(isinstance(error, CollectiveTimeoutError | AbortedError) for error in errors), errors
    assert any("did not finish within its timeout; it waits for worker" in str(error) for error in errors)


@pytest.mark.parametrize("reporter", [4, 5, 0], ids=["acceptor", "dialler", "another worker"])
def test_an_abort_during_peer_verification_leaves_nothing_behind(reporter: int) -> None:
    world = World(SIZE, verify_peers=honest)
    world.communicators[5].outbox(4)
    for each in world.engines:
        each.run_ready()
    world.wires.deliver()
    world.engines[4].run_ready()
    assert world.engines[5].acceptor.verification_links and world.engines[4].acceptor.pending
    waiting, _ = submit_all_reduce(world)
    world.engines[reporter].fail(AbortedError("enough"), reporter)
    world.run([*waiting, Request(waiting[0].call, float("inf"))])
    for each in world.engines:
        assert each.failure is not None and "enough" in str(each.failure)
        assert not each.acceptor.pending and not each.blocked
        assert all(peer_verification.stream is None for peer_verification in each.acceptor.verification_links.values())
    assert all(request.error is not None for request in waiting)


@pytest.mark.promise("A child that Python forks holds no key and no connection, and can neither seal nor open.")
def test_a_forked_child_keeps_no_peer_verifier() -> None:
    world = World(SIZE, verify_peers=honest)
    world.engines[5].forget()
    assert world.engines[5].acceptor.peer_verifier is None
