"""Signal handlers that leave the run: wherever they run, no thread deadlocks and no waiter is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from ringfence.dataplane.request import CollectiveRequest
from ringfence.errors import ProtocolError
from tests.memory_cluster import World, all_reduce


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """Raise an alarm if the test deadlocks: a blocked thread still receives signals."""

    waited = False

    def give_up(*_: Any) -> None:
        nonlocal waited
        waited = True
        raise TimeoutError  # which the engine may take for a mistake of its own

    before = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGUSR1)}
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    yield
    signal.alarm(0)
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not waited, "the test deadlocked"


class Rings:
    """A lock whose release raises the signal: Python runs the handler as soon as the release has returned."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.acquire = lock.acquire

    def release(self) -> None:
        self._lock.release()
        signal.raise_signal(signal.SIGUSR1)


def test_leaving_in_a_handler_during_completion_does_not_deadlock() -> None:
    world = World(2)
    calls = [all_reduce(world.communicators[rank], torch.ones(4)) for rank in range(2)]
    waiting = all_reduce(world.communicators[0], torch.ones(4))
    told: list[CollectiveRequest] = []
    for call in (calls[0], waiting):
        call.when_done(partial(told.append, call))
    signal.signal(signal.SIGUSR1, lambda *_: world.engines[0].leave())
    calls[0]._done_lock = Rings(calls[0]._done_lock)  # type: ignore[assignment]
    for call, rank in ((calls[0], 0), (calls[1], 1), (waiting, 0)):
        world.submit(world.communicators[rank], call)
    world.run([*calls, waiting])
    assert calls[0].done and calls[0].error is None, "it had ended when the signal came"
    assert waiting.done and isinstance(waiting.error, ProtocolError)
    assert told == [calls[0], waiting] and not world.engines[0].requests.unfinished


def test_leaving_in_a_handler_fails_an_unfinished_request() -> None:
    world = World(2)
    calls = [all_reduce(world.communicators[rank], torch.ones(4)) for rank in range(2)]
    signal.signal(signal.SIGUSR1, lambda *_: world.engines[0].leave())
    calls[0].copy_out = lambda: signal.raise_signal(signal.SIGUSR1)
    for rank in range(2):
        world.submit(world.communicators[rank], calls[rank])
    world.run(calls)
    assert isinstance(calls[0].error, ProtocolError) and calls[0].block(0)


def test_a_callback_added_during_a_handler_is_called_once() -> None:
    world = World(2)
    call = world.submit(world.communicators[0], all_reduce(world.communicators[0], torch.ones(4)))
    signal.signal(signal.SIGUSR1, lambda *_: world.engines[0].leave())
    told: list[str] = []

    class Rung(list[Any]):
        def append(self, item: Any) -> None:
            super().append(item)
            signal.raise_signal(signal.SIGUSR1)

    call._callbacks = Rung()
    call.when_done(lambda: told.append("ended"))
    assert told == ["ended"] and isinstance(call.error, ProtocolError)
