"""The data plane interrupted in the middle of its work: by Ctrl-C, by a handler that leaves, by a stalled peer."""

from __future__ import annotations

import socket
import weakref
from collections import deque
from typing import Any

import pytest
import torch

from ringfence.collectives import Thresholds
from ringfence.collectives.schedule import Action, Step
from ringfence.dataplane import _core, native
from ringfence.errors import AbortedError, PeerLostError, ProtocolError
from ringfence.keys import KEY_PHASE_SHIFT, SUSPICION_SECONDS, Secret
from ringfence.link import seal
from ringfence.link.seal import OriginKeys, Sealer
from tests.memory_cluster import World, all_reduce

COUNT = 600_000
GROUPS = {
    "ring": (3, Thresholds()),
    "halving": (5, Thresholds(ring_group=3, apart_bytes=1 << 30)),
    "halving apart": (5, Thresholds(ring_group=3, apart_bytes=0)),
}


def begin(world: World, tensors: list[torch.Tensor]) -> list[Any]:
    return [
        world.submit(world.communicators[rank], all_reduce(world.communicators[rank], tensors[rank]))
        for rank in range(world.size)
    ]


def drive(world: World, rounds: int = 300) -> int:
    """Continue to drive after interrupts; return how many there were."""
    interrupted = 0
    for _ in range(rounds):
        for engine in world.engines:
            try:
                engine.run_ready()
            except KeyboardInterrupt:
                interrupted += 1
                for link in world.communicators[engine.rank].links():
                    link.wake()
        world.wires.deliver(None)
    return interrupted


@pytest.mark.parametrize("when", range(1, 40, 3))
@pytest.mark.parametrize("group", GROUPS)
def test_an_interrupted_seal_causes_no_wrong_sum(monkeypatch: pytest.MonkeyPatch, group: str, when: int) -> None:
    """A fused sum exists only in the buffer to be sealed: if sealing is interrupted, the execution must not continue."""
    size, table = GROUPS[group]
    world = World(size, table=table)
    tensors = [torch.full((COUNT,), float(10**rank)) for rank in range(size)]
    genuine, calls = Sealer.seal_into, 0

    def seal_into(self: Sealer, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == when:
            raise KeyboardInterrupt
        genuine(self, *arguments)

    requests = begin(world, tensors)
    monkeypatch.setattr(seal.Sealer, "seal_into", seal_into)
    drive(world)
    for tensor, request in zip(tensors, requests, strict=True):
        if request.done and request.error is None:
            assert bool(tensor.eq((10**size - 1) // 9).all())
    if native.COMPILED and calls >= when:
        assert not all(request.done for request in requests)


@pytest.mark.parametrize("when", range(1, 9))
def test_leaving_in_a_handler_during_a_seal_is_no_forgery(monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    """The interrupted frame has used its counter and is not written, so a BYE after it would not authenticate."""
    world = World(3)
    world.run(begin(world, [torch.ones(4) for _ in range(3)]))
    requests = begin(world, [torch.ones(COUNT) for _ in range(3)])
    genuine, calls = Sealer.seal_into, 0

    def seal_into(self: Sealer, *arguments: Any) -> None:
        nonlocal calls
        genuine(self, *arguments)
        if self in mine:
            calls += 1
            if calls == when:
                world.engines[0].leave()

    mine = [link.sealer for link in world.communicators[0].outboxes.values()]
    monkeypatch.setattr(seal.Sealer, "seal_into", seal_into)
    drive(world)
    world.wait(SUSPICION_SECONDS)
    drive(world)
    assert calls >= when
    errors = [request.error for request in requests]
    assert isinstance(errors[0], ProtocolError) and "has left the run" in str(errors[0])
    assert all(isinstance(error, PeerLostError | AbortedError) for error in errors[1:]), errors
    assert all("worker 0 left the run" in str(error) for error in errors[1:]), errors


def test_an_execution_keeps_its_memory_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler leaves the run while a segment is opened into a tensor that only the request refers to."""
    world = World(3)
    tensors = [torch.full((COUNT,), float(10**rank)) for rank in range(3)]
    requests = begin(world, tensors)
    tensor = weakref.ref(tensors[1])
    del tensors
    genuine = OriginKeys.open_into
    alive: list[Any] = []

    def open_into(self: OriginKeys, *arguments: Any) -> None:
        if self is world.communicators[1].__dict__.get("origin") and not alive:
            world.engines[1].leave()
            alive.append(tensor() is not None)
        genuine(self, *arguments)

    monkeypatch.setattr(seal.OriginKeys, "open_into", open_into)
    del requests[1]
    drive(world)
    assert alive == [True]


def test_a_stalled_peer_costs_a_bounded_number_of_segments() -> None:
    size = 8
    world = World(size)
    world.run(begin(world, [torch.ones(size * 65_536) for _ in range(size)]))
    before = world.engines[1].pool.made

    class Stuck:
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def send(self, data: memoryview) -> int:
            raise BlockingIOError

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

    link = world.communicators[1].outboxes[2]
    link.stream = Stuck(link.stream)
    world.run(begin(world, [torch.ones(size << 20) for _ in range(size)]))
    assert world.engines[1].pool.made - before <= 4 * 32  # four passes, of whose parts half are forwarded


def test_an_unexpected_frame_is_not_overwritten() -> None:
    """The unexpected frame is shorter than what has been read, and an interrupt prevents the close of the link."""
    here, there = socket.socketpair()
    there.setblocking(False)

    class Receiver(_core.Endpoint):  # type: ignore[misc,name-defined]
        def length_of_other(self, header: bytes) -> int:
            return 104

    class Counter:
        counter = 0

    class Communicator:
        def inbox(self, peer: int) -> Any:
            return end

    pool = _core.Pool()
    end = Receiver(deque(), set(), pool)
    program = _core.compile((Step(Action.RECV, 0, peer=1),), ((),), ((),), (0,), ((),), (-1,), 1)
    memory = memoryview(bytearray(100))
    run = _core.Execution(
        Communicator(), program, 1, bytes(24), [memory], None, None, None, 0, lambda: None, 0, bytes(16), pool, 1
    )
    end.stream, end.open, end.readable, end.opener = there, True, True, Counter()
    run.start()
    with here, there:
        here.send(b"\6" * 204)
        assert len(_core.receive(end) or b"") == 104
        here.send(b"A" * 100_000)
        end.readable = True
        with pytest.raises(RuntimeError, match="has not been handled"):
            _core.receive(end)


def test_an_interrupted_key_phase_change_reuses_no_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    sealer = Sealer(Secret(bytes(32)))
    sealer.counter = (1 << KEY_PHASE_SHIFT) - 1
    nonces: list[bytes] = [sealer._nonce()]
    genuine = seal._cipher

    def interrupted(secret: Secret) -> Any:
        monkeypatch.setattr(seal, "_cipher", genuine)
        nonces.append(sealer._nonce())
        return genuine(secret)

    monkeypatch.setattr(seal, "_cipher", interrupted)
    nonces.append(sealer._nonce())
    assert sealer.counter == (1 << KEY_PHASE_SHIFT) + 2 and sealer.key_phase == 1
    assert len(set(nonces[1:])) == 2
