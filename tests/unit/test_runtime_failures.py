"""Failures of a session: every worker raises an error that names worker and call; nothing is sent afterwards."""

from __future__ import annotations

import pytest
import torch

from ringfence.collectives import Collective
from ringfence.dataplane.request import CollectiveRequest, Request
from ringfence.errors import (
    AbortedError,
    AuthenticationError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    RingfenceError,
)
from ringfence.keys import LINK_DIALS, SUSPICION_SECONDS
from ringfence.link.frames import Call
from ringfence.runtime.control import Bye, Closed, ControlMessage
from tests.in_memory_network import Pipe
from tests.memory_cluster import World, all_reduce, broadcast
from tests.unit.runtime_calls import TABLES, Bound, bind, submit_everywhere


def settle(world: World) -> None:
    """Drive until no byte moves and no work is due."""
    world.run([Request(Call(0), float("inf"))])


def begin(world: World, rank: int, kind: Collective = Collective.ALL_REDUCE, **options: float) -> Bound:
    bound = bind(kind, world.communicators[rank], 10, **options)  # type: ignore[arg-type]
    world.submit(world.communicators[rank], bound.request)
    return bound


def error_of(request: Request) -> RingfenceError:
    assert request.done and request.error is not None, "it has not failed"
    return request.error


@pytest.mark.promise("A worker with a public key of low order gets no link.")
def test_a_key_of_low_order_names_its_worker() -> None:
    """Its shared secret with every worker would be zero."""
    world = World(3)
    for engine in world.engines:
        engine.keys._public_keys = [*engine.keys._public_keys[:2], bytes(32)]
    bound = [begin(world, rank) for rank in range(3)]
    settle(world)
    failures = [engine.failure for engine in world.engines]
    assert any(isinstance(failure, AuthenticationError) for failure in failures[:2])
    assert all("worker 2 has a key of low order" in str(error_of(each.request)) for each in bound)


# -- tampering ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("kind", [Collective.ALL_REDUCE, Collective.BROADCAST], ids=["all_reduce", "broadcast"])
def test_a_flipped_bit_is_reported_to_every_worker(kind: Collective, table: str) -> None:
    world = World(3, table=TABLES[table])
    warm = submit_everywhere(world, kind, 10)
    world.run([each.request for each in warm])
    bound = [bind(kind, world.communicators[rank], 5000) for rank in range(3)]
    for rank, each in enumerate(bound):
        world.submit(world.communicators[rank], each.request)
    struck: list[Pipe] = []

    def flip(pipe: Pipe, data: bytes) -> bytes:
        if struck:
            return data
        struck.append(pipe)
        return data[:300] + bytes([data[300] ^ 4]) + data[301:]

    world.run([each.request for each in bound], flip)
    settle(world)
    victim = struck[0].receiver
    for rank, each in enumerate(bound):
        if each.request.error is None:
            assert each.right(), "it ended before the attack, with the right number"
        elif rank == victim:
            assert isinstance(each.request.error, AuthenticationError)
            assert f"worker {struck[0].sender}" in str(each.request.error)
        else:
            assert isinstance(each.request.error, AbortedError)
            assert f"worker {victim} reported AuthenticationError" in str(each.request.error)
    assert isinstance(bound[victim].request.error, AuthenticationError)


# -- ranks that disagree -----------------------------------------------------------------------------------------------


def tensor(count: int = 10, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def different_calls(world: World, what: str) -> tuple[CollectiveRequest, CollectiveRequest, str, str]:
    here, there = world.communicators[0], world.communicators[1]
    if what == "operation":
        return all_reduce(here, tensor()), broadcast(there, tensor(), 0), "all_reduce #1", "broadcast #1"
    if what == "count":
        return all_reduce(here, tensor(10)), all_reduce(there, tensor(11)), "10 x int64", "11 x int64"
    if what == "dtype":
        short = tensor(20, torch.int32)
        return all_reduce(here, tensor(10)), all_reduce(there, short), "10 x int64", "20 x int32"
    other = torch.distributed.ReduceOp.MAX
    return all_reduce(here, tensor()), all_reduce(there, tensor(), reduction=other), "sum", "max"


@pytest.mark.parametrize("what", ["operation", "count", "dtype", "reduction"])
def test_an_error_names_both_of_two_different_collectives(what: str) -> None:
    world = World(2)
    one, other, mine, theirs = different_calls(world, what)
    world.submit(world.communicators[0], one)
    world.submit(world.communicators[1], other)
    world.run([one, other])
    errors = [error_of(one), error_of(other)]
    (named,) = [error for error in errors if isinstance(error, MismatchError)]
    assert mine in str(named) and theirs in str(named) and "worker 0" in str(named) and "worker 1" in str(named)
    (told,) = [error for error in errors if isinstance(error, AbortedError)]
    assert mine in str(told) and theirs in str(told)


def test_different_roots_are_named_when_all_ranks_wait() -> None:
    """Both wait for the other to send. The deadline ends it, and the abort names the call of each."""
    world = World(2)
    one, other = broadcast(world.communicators[0], tensor(), 1), broadcast(world.communicators[1], tensor(), 0)
    settle(world)
    opened = [begin(world, rank) for rank in range(2)]
    world.run([each.request for each in opened])
    world.submit(world.communicators[0], one)
    world.submit(world.communicators[1], other)
    settle(world)
    assert not one.done and not other.done
    world.now = 11.0
    world.engines[0].expire()
    settle(world)
    assert isinstance(error_of(one), CollectiveTimeoutError)
    told = str(error_of(other))
    assert "root 1" in told and "root 0" in told and "worker 0 reported CollectiveTimeoutError" in told


# -- deadlines ---------------------------------------------------------------------------------------------------------


def test_a_timeout_names_the_late_worker_and_fails_all() -> None:
    world = World(4)
    waiting = [begin(world, rank) for rank in (0, 1, 2)]
    settle(world)
    assert not any(each.request.done for each in waiting)
    world.wait(9.9)
    assert not any(each.request.done for each in waiting)
    world.wait(0.2)
    errors = [error_of(each.request) for each in waiting]
    assert any(isinstance(error, CollectiveTimeoutError) and "3" in str(error) for error in errors)
    late = begin(world, 3)
    settle(world)
    assert isinstance(error_of(late.request), AbortedError)


def test_a_late_worker_causes_no_failure() -> None:
    world = World(2)
    early = begin(world, 0, deadline=100.0)
    settle(world)
    world.wait(60.0)
    late = begin(world, 1, deadline=160.0)
    world.run([early.request, late.request])
    assert early.right() and late.right() and early.request.error is None


def test_the_next_deadline_is_the_earliest() -> None:
    world = World(2)
    assert world.engines[0].next_deadline() == float("inf") and not world.engines[0].busy()
    begin(world, 0, deadline=30.0)
    begin(world, 0, deadline=20.0)
    assert world.engines[0].next_deadline() == 20.0 and world.engines[0].busy()


# -- departures --------------------------------------------------------------------------------------------------------


def test_leaving_after_all_collectives_is_not_a_failure() -> None:
    world = World(3)
    bound = submit_everywhere(world, Collective.ALL_REDUCE, 10)
    world.run([each.request for each in bound])
    for engine in world.engines:
        engine.leave()
    settle(world)
    world.wait(5.0)
    for each in bound:
        assert each.right() and each.request.error is None
    again = begin(world, 1)
    assert isinstance(error_of(again.request), ProtocolError) and "left the run" in str(again.request.error)


@pytest.mark.parametrize("when", ["before the others begin", "while they wait"])
def test_a_worker_that_leaves_while_needed_is_named(when: str) -> None:
    world = World(3)
    bound = submit_everywhere(world, Collective.ALL_REDUCE, 10)
    world.run([each.request for each in bound])
    waiting = [begin(world, rank) for rank in (0, 2)] if when == "while they wait" else []
    settle(world)
    world.engines[1].leave()
    settle(world)
    waiting = waiting or [begin(world, rank) for rank in (0, 2)]
    settle(world)
    errors = [error_of(each.request) for each in waiting]
    assert any(isinstance(error, PeerLostError) for error in errors)
    assert all("worker 1 left the run" in str(error) for error in errors)


def test_a_worker_that_left_before_its_first_link_is_named() -> None:
    world = World(3)
    world.engines[2].leave()
    settle(world)
    waiting = [begin(world, rank) for rank in (0, 1)]
    settle(world)
    world.wait(SUSPICION_SECONDS)
    settle(world)
    assert all("worker 2" in str(error_of(each.request)) for each in waiting)


def test_a_connection_that_ends_without_bye_is_a_lost_worker() -> None:
    world = World(2)
    bound = submit_everywhere(world, Collective.ALL_REDUCE, 10)
    world.run([each.request for each in bound])
    waiting = begin(world, 0)
    for link in world.communicators[1].links():
        link.close()
    settle(world)
    assert not waiting.request.done, "an abort that explains the closed connection may still arrive"
    world.wait(SUSPICION_SECONDS)
    assert isinstance(error_of(waiting.request), PeerLostError) and "worker 1" in str(waiting.request.error)


def test_an_abort_takes_precedence_over_a_closed_connection() -> None:
    world = World(2)
    bound = submit_everywhere(world, Collective.ALL_REDUCE, 10)
    world.run([each.request for each in bound])
    waiting = begin(world, 0)
    world.engines[1].fail(AuthenticationError("a made-up reason"), 0)
    settle(world)
    assert isinstance(error_of(waiting.request), AbortedError) and "a made-up reason" in str(waiting.request.error)


def test_a_control_edge_that_ends_without_bye_is_a_lost_worker() -> None:
    world = World(3)
    waiting = [begin(world, rank) for rank in (0, 1)]
    (edge,) = [edge for edge in world.engines[0].edges if edge.peer == 2]
    arrived: list[ControlMessage] = [Closed("reset")]
    edge._arrived = arrived  # type: ignore[attr-defined]
    world.engines[0].on_control(edge)
    settle(world)
    assert isinstance(error_of(waiting[0].request), PeerLostError)
    assert "worker 2 is gone" in str(error_of(waiting[1].request))


def test_a_goodbye_counts_only_for_the_worker_that_it_names() -> None:
    world = World(3)
    (edge,) = [edge for edge in world.engines[0].edges if edge.peer == 2]
    arrived: list[ControlMessage] = [Bye(1), Closed("reset")]  # the tree passes on the goodbyes of others
    edge._arrived = arrived  # type: ignore[attr-defined]
    world.engines[0].on_control(edge)
    assert isinstance(world.engines[0].failure, PeerLostError)
    assert "worker 2 is gone" in str(world.engines[0].failure)


# -- afterwards --------------------------------------------------------------------------------------------------------


def test_every_call_after_a_failure_raises_that_failure() -> None:
    world = World(2)
    world.engines[0].fail(PeerLostError("worker 1 is gone"), 1)
    settle(world)
    assert str(error_of(begin(world, 0).request)) == "worker 1 is gone"
    assert isinstance(error_of(begin(world, 1).request), AbortedError)


def test_a_late_frame_is_not_written_into_a_failed_call() -> None:
    """The memory of a failed call belongs to the caller again: opening a frame into it would corrupt data."""
    world = World(3)
    given_up = begin(world, 0, deadline=5.0)
    settle(world)
    mine = given_up.results[0].clone()
    world.engines[0].edges = []  # no neighbour receives the abort
    world.now = 6.0
    world.engines[0].expire()
    assert isinstance(error_of(given_up.request), CollectiveTimeoutError)
    late = [begin(world, rank, deadline=50.0) for rank in (1, 2)]
    settle(world)
    assert torch.equal(given_up.results[0], mine)
    for _ in range(LINK_DIALS):  # they dial again before they give it up
        world.wait(SUSPICION_SECONDS)
        settle(world)
        assert torch.equal(given_up.results[0], mine)
    assert all("worker 0" in str(error_of(each.request)) for each in late)


def test_a_failure_during_the_opening_starts_no_collective() -> None:
    world = World(2)
    bound = [begin(world, rank, Collective.ALL_GATHER) for rank in range(2)]
    engine, communicator = world.engines[1], world.communicators[1]
    while not communicator._opened:
        world.engines[0].run_ready()
        world.wires.deliver()
        while engine.ready and not communicator._opened:
            next_up = engine.ready.popleft()
            next_up.queued = False
            next_up.work()
    before = [tensor.clone() for tensor in bound[1].results]
    engine.fail(PeerLostError("worker 0 is gone"), 0)
    engine.run_ready()
    assert all(torch.equal(*pair) for pair in zip(bound[1].results, before, strict=True))


def test_an_internal_error_aborts_the_session_on_all_workers() -> None:
    world = World(2)
    waiting = [begin(world, rank) for rank in range(2)]

    def mistake() -> None:
        raise ZeroDivisionError("oops")

    world.engines[0].call_soon(mistake)
    settle(world)
    assert "internal error ZeroDivisionError: oops" in str(error_of(waiting[0].request))
    assert "worker 0" in str(error_of(waiting[1].request))
