"""A worker in the admission tree lies, and the first worker that links with its child detects it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ringfence.admission.peer_verification import PeerVerifier
from ringfence.dataplane.request import CollectiveRequest
from ringfence.errors import AbortedError, AdmissionError, AuthenticationError, ProtocolError
from ringfence.link.frames import Type
from ringfence.link.hello import CONFIRM_BYTES, HELLO_BYTES, REPLY_BYTES
from tests.in_memory_network import Pipe
from tests.memory_cluster import World, all_reduce
from tests.unit.peer_verification_samples import LIES, Circle, Lie, circle

SIZE = 6


def submit_all_reduce(world: World) -> tuple[list[CollectiveRequest], list[torch.Tensor]]:
    tensors = [torch.full((8,), float(rank)) for rank in range(SIZE)]
    made = [all_reduce(world.communicators[rank], tensor) for rank, tensor in enumerate(tensors)]
    return [world.submit(world.communicators[rank], request) for rank, request in enumerate(made)], tensors


def honest(public: list[bytes]) -> list[PeerVerifier]:
    made = circle(public)
    return [made.peer_verifier(rank) for rank in range(SIZE)]


def test_unconnected_workers_present_their_proofs_once() -> None:
    known: list[PeerVerifier] = []

    def verify_peers(public: list[bytes]) -> list[PeerVerifier]:
        known.extend(honest(public))
        return known

    world = World(SIZE, verify_peers=verify_peers)
    lengths = []
    for _ in range(3):
        before = len(world.wires.streams)
        requests, tensors = submit_all_reduce(world)
        world.run(requests)
        assert all(request.error is None for request in requests)
        assert all(torch.equal(each, torch.full((8,), 15.0)) for each in tensors)
        lengths.append(len(world.wires.streams) - before)
    assert lengths[1:] == [0, 0], "workers verified each other again"
    assert any(known[4].verified(rank) for rank in (1, 2, 3, 5))


@pytest.mark.promise("A worker listed by evidence or a token is verified again by each worker that links with it.")
@pytest.mark.parametrize("lie", LIES, ids=lambda each: each.__name__)
def test_a_lie_in_the_tree_is_detected_at_peer_verification(lie: Lie) -> None:
    """Every worker raises an error that names the worker, and no result includes its data."""

    def verify_peers(public: list[bytes]) -> Sequence[PeerVerifier]:
        made = circle(public)
        shown = lie(made)
        return [made.peer_verifier(rank, shown if rank == 5 else None) for rank in range(SIZE)]

    world = World(SIZE, verify_peers=verify_peers)
    requests, _ = submit_all_reduce(world)
    world.run(requests)
    errors = [request.error for request in requests]
    assert all(isinstance(error, AdmissionError | AbortedError) for error in errors), errors
    assert any(isinstance(error, AdmissionError) for error in errors)
    named = [str(error) for error in errors]
    assert all("worker 5, which worker 1 admitted, failed peer verification" in text for text in named), named


@pytest.mark.promise("A worker listed by evidence or a token is verified again by each worker that links with it.")
def test_a_link_without_a_presented_proof_is_refused() -> None:
    world = World(SIZE, verify_peers=honest)
    world.engines[5].acceptor.verified.add(4)  # the lie
    world.communicators[5].outbox(4)
    requests, _ = submit_all_reduce(world)
    world.run(requests)
    found = [request.error for request in requests]
    assert all(error is not None for error in found)
    assert any(
        type(error) is ProtocolError and "worker 5 dialled a link before it had presented its proof" in str(error)
        for error in found
    ), found


class Flip:
    """Flips one bit of a presentation in transit, after hello and confirm, or after the reply."""

    def __init__(self, place: int, forth: bool) -> None:
        self._begin = HELLO_BYTES + CONFIRM_BYTES if forth else REPLY_BYTES
        self._place = place + self._begin
        self._passed: dict[int, int] = {}
        self.done = False

    def __call__(self, pipe: Pipe, data: bytes) -> bytes:
        before = self._passed.get(id(pipe), 0)
        self._passed[id(pipe)] = before + len(data)
        first = max(0, self._begin - before)  # where the frame begins in this data
        presentation = before + len(data) > self._place + 500 and data[first] == Type.PAYLOAD
        if self.done or not presentation or not before <= self._place < before + len(data):
            return data
        self.done = True
        changed = bytearray(data)
        changed[self._place - before] ^= 1
        return bytes(changed)


@pytest.mark.promise("A worker listed by evidence or a token is verified again by each worker that links with it.")
@pytest.mark.parametrize("forth", [True, False], ids=["the dialler's", "the acceptor's"])
@pytest.mark.parametrize("place", [0, 16, 90, 400], ids=["type", "length", "kind", "proof"])
def test_a_proof_that_is_changed_on_the_wire_ends_the_session(place: int, forth: bool) -> None:
    flip = Flip(place, forth)
    world = World(SIZE, verify_peers=honest)
    requests, tensors = submit_all_reduce(world)
    world.run(requests, flip)
    assert flip.done
    assert all(request.error is not None for request in requests)
    assert any(isinstance(request.error, AuthenticationError) for request in requests)
    assert not any(torch.equal(each, torch.full((8,), 15.0)) for each in tensors)


def test_the_circle_without_a_lie_passes() -> None:
    """The control for the tests above."""
    made: Circle = circle([bytes([rank]) * 32 for rank in range(SIZE)])
    made.peer_verifier(4).verify(5, made.presentations[5].encode())
