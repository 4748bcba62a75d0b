"""Links that are closed without a fault, or while no frame is due: they are dialled again, or the loss is noticed."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

from ringfence.dataplane.request import CollectiveRequest, Request
from ringfence.errors import AuthenticationError, PeerLostError
from ringfence.keys import (
    LINK_HELLO_SECONDS,
    LINK_PENDING_PER_ADDRESS,
    LINK_REDIAL_SECONDS,
    NONCE_BYTES,
    SUSPICION_SECONDS,
)
from ringfence.link.frames import HOP_OVERHEAD
from ringfence.link.hello import Lane, LinkHello
from tests.in_memory_network import Pipe
from tests.memory_cluster import World, all_reduce, broadcast
from tests.unit.runtime_calls import transfer
from tests.unit.test_pending import shake_hands
from tests.unit.test_runtime_failures import settle


def begin(world: World, rank: int) -> CollectiveRequest:
    """Submit a broadcast of ones from worker 0 on one worker."""
    communicator = world.communicators[rank]
    return world.submit(communicator, broadcast(communicator, torch.full((4,), 1.0 - rank), 0, 1e9))


def right(request: Request, result: torch.Tensor) -> bool:
    return request.done and request.error is None and bool((result == 1).all())


def drive_until_answered(world: World, acceptor: int = 1) -> None:
    """Drive until this worker has answered a hello and the answer is in the dialler's socket."""
    while not any(connection.known for connection in world.engines[acceptor].acceptor.pending):
        world.wires.deliver()
        for engine in world.engines:
            engine.run_ready()
    world.wires.deliver()


def answered() -> tuple[World, list[CollectiveRequest], torch.Tensor]:
    """Start a broadcast on both workers and deliver so often; return the requests and the result tensors."""
    world = World(2)
    requests = [begin(world, rank) for rank in range(2)]
    result = requests[1].keep
    drive_until_answered(world)
    return world, requests, result


# -- a worker that was stopped: by a signal, with its machine, or by a call that keeps the interpreter's lock --------------


def begin_onward(world: World, rank: int) -> CollectiveRequest:
    """Submit a broadcast of ones from worker 1 of three on one worker. The link from 1 to 2 does not exist yet."""
    communicator = world.communicators[rank]
    return world.submit(communicator, broadcast(communicator, torch.full((4,), float(rank == 1)), 1, 1e9))


def opened() -> World:
    """Return three workers whose group is open: the links of its tree exist."""
    world = World(3)
    world.run([begin(world, rank) for rank in range(3)])
    return world


def sent_onward() -> World:
    """Complete that broadcast on workers 0 and 1; worker 2 has not called it."""
    world = opened()
    sent = [begin_onward(world, rank) for rank in (0, 1)]
    settle(world)
    assert all(each.done for each in sent)
    return world


def begun_in_a_group_that_the_other_lacks() -> tuple[World, CollectiveRequest]:
    """Start a broadcast on rank 0 in a group that rank 1 has not created: without rank 1 it has no keys."""
    world = World(2)
    world.communicators = {0: world.engines[0].add_communicator("late", (0, 1))}
    sent = begin(world, 0)
    settle(world)
    assert not sent.done
    return world, sent


def test_a_stopped_acceptor_reads_what_arrived_in_time() -> None:
    world, requests, result = answered()
    world.engines[0].run_ready()
    world.wires.deliver()  # the confirmation has arrived and is not read
    world.now += LINK_HELLO_SECONDS + 1
    world.engines[1].expire()
    world.run(requests)
    assert all(engine.failure is None for engine in world.engines) and right(requests[1], result)


def test_a_dialler_that_was_stopped_dials_again() -> None:
    world, requests, result = answered()
    world.engines[1].run_ready()  # it was not stopped, and has confirmed the link that it dialled itself
    world.now += LINK_HELLO_SECONDS + 1
    world.engines[1].expire()
    world.wires.deliver()  # now it reads the answer, and that the peer has closed
    world.engines[0].run_ready()
    world.wait(LINK_REDIAL_SECONDS * 4)
    world.run(requests)
    assert all(engine.failure is None for engine in world.engines) and right(requests[1], result)


def test_a_flood_closes_no_connection_with_a_confirmation() -> None:
    world, requests, result = answered()
    world.engines[0].run_ready()
    world.now += 1  # the others come later: it is the oldest
    hellos = [
        LinkHello(0, 1, Lane.COLLECTIVE, world.communicators[0].digest, bytes([n]) * NONCE_BYTES) for n in range(256)
    ]
    for hello in hellos[: LINK_PENDING_PER_ADDRESS - 1]:
        stream = world.wires.connect(0, 1)
        stream.send(memoryview(world.engines[0].keys.hello_bytes(hello)))
    (honest,) = [connection for connection in world.engines[1].acceptor.pending if connection.known]
    for pipe in [stream.outgoing for stream in world.wires.streams if stream.outgoing.reader is not honest]:
        pipe.delivered += pipe.written
        pipe.written.clear()
    world.engines[1].run_ready()
    assert all(connection.known for connection in world.engines[1].acceptor.pending)
    world.wires.deliver()
    world.wires.connect(0, 1)  # one too many
    assert honest in world.engines[1].acceptor.pending
    world.run(requests)
    assert right(requests[1], result)


# -- the end of a stream that only its sender has left ---------------------------------------------------------------------


def test_a_dialler_notices_a_link_that_was_not_accepted() -> None:
    """Everything is written, so no further write would fail."""
    world, requests, _ = answered()
    world.engines[0].run_ready()
    (connection,) = world.engines[1].acceptor.pending
    connection.close()
    settle(world)
    assert world.engines[0].failure is None, "an abort that explains it may be on its way"
    world.wait(SUSPICION_SECONDS)
    settle(world)
    assert isinstance(world.engines[0].failure, PeerLostError) and "worker 1" in str(world.engines[0].failure)
    assert requests[1].done and requests[1].error is not None


def test_a_lost_link_waits_for_workers_that_owe_an_answer() -> None:
    """In an outage a worker that gives up first closes its links, and its abort may not get through."""
    world, _, _ = answered()
    engine = world.engines[0]
    engine.run_ready()
    engine.on_unanswered(frozenset({2}))
    (connection,) = world.engines[1].acceptor.pending
    connection.close()
    settle(world)
    for _ in range(3):
        world.wait(SUSPICION_SECONDS)
        settle(world)
        assert engine.failure is None, "the outage explains it"
    engine.on_unanswered(frozenset())
    world.wait(SUSPICION_SECONDS)
    settle(world)
    assert isinstance(engine.failure, PeerLostError) and "worker 1" in str(engine.failure)


def test_a_lost_link_waits_no_longer_than_the_outage_timeout() -> None:
    world, _, _ = answered()
    engine = world.engines[0]
    engine.run_ready()
    engine.on_unanswered(frozenset({2}))
    (connection,) = world.engines[1].acceptor.pending
    connection.close()
    settle(world)
    world.wait(engine.outage + SUSPICION_SECONDS)
    settle(world)
    assert isinstance(engine.failure, PeerLostError)


def test_a_lost_link_names_who_had_left_before() -> None:
    """A worker that fails because it needed one that has left: its abort does not arrive by way of that one."""
    world, _, _ = answered()
    engine = world.engines[0]
    engine.run_ready()
    engine.departed.add(2)
    (connection,) = world.engines[1].acceptor.pending
    connection.close()
    settle(world)
    world.wait(SUSPICION_SECONDS)
    settle(world)
    text = "worker 1 closed its connection without a goodbye, after worker 2 left the run"
    assert isinstance(engine.failure, PeerLostError) and text in str(engine.failure)


def test_an_expected_bye_is_no_failure_until_a_later_call() -> None:
    world = World(2)
    world.run([begin(world, rank) for rank in range(2)])
    world.engines[1].remove_communicator(world.communicators[1])
    settle(world)
    world.wait(SUSPICION_SECONDS)
    settle(world)
    assert world.engines[0].failure is None
    late = begin(world, 0)
    settle(world)
    assert isinstance(late.error, PeerLostError) and "destroyed group 'world' while broadcast #2" in str(late.error)


def test_a_worker_that_left_without_creating_a_group_is_named() -> None:
    world, sent = begun_in_a_group_that_the_other_lacks()
    world.engines[1].leave()
    settle(world)
    world.wait(SUSPICION_SECONDS)
    assert isinstance(sent.error, PeerLostError) and "worker 1 left the run" in str(sent.error)


def test_a_first_collective_waits_for_a_late_member() -> None:
    world, sent = begun_in_a_group_that_the_other_lacks()
    world.communicators[1] = world.engines[1].add_communicator("late", (0, 1))
    late = begin(world, 1)
    result = late.keep
    world.run([sent, late])
    assert sent.done and sent.error is None and right(late, result)


def test_a_leaver_that_only_had_to_receive_is_not_missed() -> None:
    world = sent_onward()
    world.engines[2].leave()
    settle(world)
    world.wait(SUSPICION_SECONDS)
    assert world.engines[1].failure is None and world.engines[1].departed == {2}


@pytest.mark.parametrize("lane", [Lane.COLLECTIVE, Lane.POINT_TO_POINT])
def test_dialling_a_destroyed_group_gets_a_bye(lane: Lane) -> None:
    """There was no link to send a BYE on; the call would have waited for its deadline."""
    world = World(2)
    other = world.add_communicator("other", (0, 1))
    world.engines[1].remove_communicator(other[1])
    call: Request
    if lane == Lane.COLLECTIVE:
        call = world.submit(other[0], all_reduce(other[0], torch.ones(4), 1e9))
    else:
        call = transfer(torch.ones(4), deadline=1e9)
        world.engines[0].send(other[0], call, 1)
    settle(world)
    assert isinstance(call.error, PeerLostError)
    assert "worker 1 left the run or destroyed group 'other'" in str(call.error)
    assert not world.engines[1].acceptor._parked and not world.engines[1].acceptor.pending
    assert all(stream.closing for stream in world.wires.streams)


@pytest.mark.parametrize("waits", [True, False], ids=["waiting call", "later call"])
def test_a_bye_on_one_link_ends_the_wait_for_another_link(waits: bool) -> None:
    world = World(2)
    world.run([begin(world, rank) for rank in range(2)])
    communicator = world.communicators[0]
    late = broadcast(communicator, torch.ones(4), 1, 1e9)
    if waits:
        world.submit(communicator, late)
    world.engines[1].remove_communicator(world.communicators[1])
    settle(world)
    if not waits:
        assert world.engines[0].failure is None
        world.submit(communicator, late)
        settle(world)
    assert isinstance(late.error, PeerLostError)
    assert "worker 1 left the run or destroyed group 'world'" in str(late.error)


def test_a_worker_that_leaves_with_a_busy_link_is_named() -> None:
    """Its link ends without a BYE, as after a handler that leaves; the BYE on the control edges counts."""
    for leaves_first in (True, False):
        world = World(2)
        world.run([begin(world, rank) for rank in range(2)])
        waiting = begin(world, 1)
        settle(world)
        for link in world.communicators[0].links():
            link.close()
        if leaves_first:
            world.engines[0].leave()
            settle(world)
            world.wait(0.0)
        else:
            while world.wires.deliver():
                pass
            world.engines[1].run_ready()
            world.engines[0].leave()
            settle(world)
        assert isinstance(waiting.error, PeerLostError) and "worker 0 left the run" in str(waiting.error)


def test_a_leaver_without_open_transfers_is_not_missed() -> None:
    world = World(2)
    received = transfer(torch.zeros(4))
    world.engines[0].send(world.communicators[0], transfer(torch.ones(4)), 1)
    world.engines[1].receive(world.communicators[1], received, 0)
    settle(world)
    assert received.done and received.error is None
    for link in world.communicators[0].links():
        link.close()
    world.engines[0].leave()
    settle(world)
    world.wait(SUSPICION_SECONDS)
    assert world.engines[1].failure is None and world.engines[1].departed == {0}


def test_running_out_of_files_does_not_blame_the_peer() -> None:
    world = World(2)
    engine, dial, dials = world.engines[0], world.engines[0].context.network.dial, 0

    def run_out(link: Any) -> None:
        nonlocal dials
        dials += 1
        if dials > 1:
            raise OSError(errno.EMFILE, "Too many open files")
        dial(link)

    engine.context.network.dial = run_out  # type: ignore[method-assign]
    world.wires.serve(1, lambda stream, address: stream.close())
    waiting = begin(world, 0)
    settle(world)
    world.wait(LINK_REDIAL_SECONDS * 4)
    assert dials == 2 and "worker 0: Too many open files. Raise the limit of open files" in str(waiting.error)


def test_a_bye_must_authenticate() -> None:
    world = World(2)
    world.run([begin(world, rank) for rank in range(2)])
    world.engines[1].remove_communicator(world.communicators[1])

    def change(pipe: Pipe, data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1])

    while world.wires.deliver(change):
        pass
    world.engines[0].run_ready()
    failure = world.engines[0].failure
    assert isinstance(failure, AuthenticationError) and "worker 1" in str(failure)


# -- workers that leave before their data is read ---------------------------------------------------------------------


def test_data_on_a_new_link_arrives_after_its_sender_left() -> None:
    world = sent_onward()
    world.engines[1].leave()
    settle(world)
    late = begin_onward(world, 2)
    result = late.keep
    world.run([late])
    assert right(late, result)
    more = begin_onward(world, 2)
    settle(world)
    assert isinstance(more.error, PeerLostError) and "worker 1 left the run" in str(more.error)


@pytest.mark.parametrize("waits", [True, False], ids=["waiting call", "later call"])
def test_a_bye_that_overtakes_the_confirmation_is_no_failure(waits: bool) -> None:
    """It arrives on another connection."""
    world = opened()
    sent = begin_onward(world, 1)
    late = begin_onward(world, 2) if waits else None
    drive_until_answered(world, acceptor=2)
    world.engines[1].run_ready()
    assert sent.done
    world.engines[1].leave()
    world.engines[0].run_ready()  # passes the goodbye on
    world.engines[2].run_ready()
    assert world.engines[2].departed == {1}
    late = late or begin_onward(world, 2)
    result = late.keep
    world.run([late])
    assert right(late, result)


def test_a_worker_that_leaves_during_a_handshake_is_named() -> None:
    world = World(2)
    late = begin(world, 1)
    settle(world)
    hello = LinkHello(0, 1, Lane.COLLECTIVE, world.communicators[0].digest, bytes(NONCE_BYTES))
    stream = world.wires.connect(0, 1)
    stream.send(memoryview(world.engines[0].keys.hello_bytes(hello)))
    settle(world)
    world.engines[0].leave()
    settle(world)
    assert not late.done, "its confirmation may be on its way"
    stream.close()
    settle(world)
    assert isinstance(late.error, PeerLostError) and "worker 0 left the run" in str(late.error)


def test_invalid_early_diallers_are_refused() -> None:
    """Worker 2 dials the group of two others before worker 1 has created it; then worker 0 dials it twice."""
    world = World(3)
    pair = world.engines[0].add_communicator("pair", (0, 1))
    unauthenticated_peer = shake_hands(world, 2, pair.digest)
    world.engines[1].add_communicator("pair", (0, 1))
    settle(world)
    assert unauthenticated_peer.recv_into(memoryview(bytearray(1))) == 0 and world.engines[1].failure is None

    other = world.engines[0].add_communicator("other", (0, 1))
    twice = [shake_hands(world, 0, other.digest) for _ in range(3)]
    world.engines[1].add_communicator("other", (0, 1))
    settle(world)
    assert "worker 0 dialled the same link twice" in str(world.engines[1].failure)
    assert [stream.recv_into(memoryview(bytearray(1))) for stream in twice] == [0, 0, 0]


# -- a receiver whose sender may have missed, in an outage, that it reads again ----------------------------------------------


def prompted() -> tuple[World, CollectiveRequest]:
    """Return a cluster in which worker 1 waits for worker 0, which does not answer, and has sent it a NOP."""
    world = World(2)
    world.run([begin(world, rank) for rank in range(2)])
    inbox = world.communicators[1].inboxes[0]
    world.engines[1].on_outage(inbox)
    assert inbox.sealer.counter == 0, "nothing waits for worker 0"
    waiting = begin(world, 1)
    world.engines[1].on_outage(inbox)
    assert inbox.sealer.counter == 1
    return world, waiting


def test_a_sender_continues_after_a_nop_and_reads_the_bye() -> None:
    world, waiting = prompted()
    result = waiting.keep
    world.run([begin(world, 0), waiting])
    world.engines[1].leave()
    settle(world)
    assert right(waiting, result) and world.engines[0].failure is None
    assert world.communicators[0].outboxes[1].bye_received


@pytest.mark.promise("A NOP frame that was changed in transit is rejected.")
def test_a_changed_nop_does_not_authenticate() -> None:
    world, waiting = prompted()

    def change(pipe: Pipe, data: bytes) -> bytes:
        return bytes([*data[:-1], data[-1] ^ 1]) if len(data) == HOP_OVERHEAD else data

    world.run([begin(world, 0), waiting], change)
    world.engines[1].leave()
    settle(world)
    assert isinstance(world.engines[0].failure, AuthenticationError)
