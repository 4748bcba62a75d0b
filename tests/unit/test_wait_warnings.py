"""Warnings about waiting requests: once before the timeout, and again each time the wait has doubled."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
import torch

from ringfence.dataplane.request import CollectiveRequest, first_check
from ringfence.errors import CollectiveTimeoutError
from tests.memory_cluster import World, all_reduce
from tests.unit.runtime_calls import transfer

Logged = Callable[[], list[str]]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    """Return the warnings since the last call."""
    caplog.set_level(logging.WARNING, logger="ringfence")

    def new() -> list[str]:
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return texts

    return new


def call(world: World, rank: int, timeout: float) -> CollectiveRequest:
    """Submit an all-reduce on one worker."""
    request = all_reduce(world.communicators[rank], torch.ones(5), world.now + timeout)
    request.timeout, request.next_check = timeout, world.now + first_check(timeout)
    return world.submit(world.communicators[rank], request)


def alone(timeout: float) -> World:
    """Return two workers, of which only the first calls an all-reduce."""
    world = World(2)
    world.run([call(world, 0, timeout)])
    return world


def test_a_waiting_collective_is_logged_after_a_minute(logged: Logged) -> None:
    world = alone(timeout=1800.0)
    world.engines[0].requests.worker_names = ["this one", "node-b, 10.0.0.2:4000"]
    world.wait(59.9)
    assert logged() == []
    world.wait(0.1)
    assert logged() == [
        "worker 0: all_reduce #1 has waited 60 s for worker 1 (node-b, 10.0.0.2:4000) in group 'world' "
        "(5 x float32, sum); it fails after 1800 s"
    ]


def test_a_warning_is_repeated_when_the_wait_has_doubled(logged: Logged) -> None:
    world = alone(timeout=1800.0)
    seconds = []
    for _ in range(179):
        world.wait(10.0)
        seconds += [int(found[1]) for text in logged() if (found := re.search(r"has waited (\d+) s", text))]
    assert seconds == [60, 120, 240, 480, 960]


def test_a_short_timeout_is_warned_of_at_its_half(logged: Logged) -> None:
    world = alone(timeout=20.0)
    world.wait(9.9)
    assert logged() == []
    world.wait(0.1)
    (text,) = logged()
    assert "all_reduce #1 has waited 10 s for worker 1" in text and "it fails after 20 s" in text
    world.wait(10.0)
    assert logged() == []  # that is the timeout's to say
    assert isinstance(world.engines[0].failure, CollectiveTimeoutError)


def test_queued_collectives_are_not_logged(logged: Logged) -> None:
    world = World(2)
    for _ in range(20):
        call(world, 0, 1800.0)
    world.wait(60.0)
    (text,) = logged()
    assert "all_reduce #1 has waited" in text


def test_the_next_deadline_is_that_of_the_warning() -> None:
    world = alone(timeout=1800.0)
    assert world.engines[0].next_deadline() == 60.0
    world.wait(60.0)
    assert world.engines[0].next_deadline() == 120.0


def test_a_finished_collective_is_not_logged(logged: Logged) -> None:
    world = World(2)
    early = call(world, 0, 1800.0)
    world.wait(30.0)
    late = call(world, 1, 1800.0)
    world.run([early, late])
    assert early.done and late.done
    world.wait(300.0)
    assert logged() == []


def test_a_recv_is_logged_only_after_a_caller_waits(logged: Logged) -> None:
    world = World(2)
    posted = transfer(torch.zeros(3), deadline=float("inf"))
    world.engines[0].receive(world.communicators[0], posted, 1)
    world.run([posted])
    world.wait(500.0)
    assert logged() == []
    world.engines[0].requests.set_deadline(posted, world.now + 100.0, 100.0)
    world.wait(50.0)
    (text,) = logged()
    assert "send/recv #0 with tag 0 has waited 50 s for worker 1" in text
