"""Attacks on the keys of a group by members that repeat or choose their random numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ringfence import keys
from ringfence.collectives import Thresholds
from ringfence.link.frames import HEADER_BYTES, Type
from tests.attack.wire_messages import Kind, MessageSplitter
from tests.in_memory_network import Pipe
from tests.memory_cluster import World, broadcast

SIZE, HONEST = 4, 1
ORIGIN_SEALS = Thresholds(small=64, chain_slice=32)  # broadcasts are sealed once by their root and forwarded


def draw_of(worker: int) -> Callable[[int], bytes]:
    return lambda length: bytes([worker + 1]) * length


def repeat_draws(world: World, workers: range | list[int]) -> None:
    """Make these workers draw the same bytes in every session."""
    for worker in workers:
        world.randoms[worker] = draw_of(worker)


def instance_secret(world: World) -> bytes:
    """Open the group with a first broadcast; return the secret that all its members then hold."""
    requests = [
        world.submit(communicator, broadcast(communicator, torch.zeros(64)))
        for communicator in world.communicators.values()
    ]
    world.run(requests)
    assert all(request.done and request.error is None for request in requests)
    (secret,) = {
        held.reveal()
        for communicator in world.communicators.values()
        if (held := communicator.origin._instance) is not None
    }
    return secret


class Wiretap:
    """Collects the ciphertext that a worker seals as an origin."""

    def __init__(self, sender: int) -> None:
        self._sender = sender
        self._splitters: dict[int, MessageSplitter] = {}
        self.sealed: dict[int, bytes] = {}  # by the origin's counter

    def tap(self, pipe: Pipe, data: bytes) -> bytes:
        if pipe.sender == self._sender:
            from_dialler = data[:4] == b"RFL1" or id(pipe) in self._splitters
            if from_dialler:
                for message in self._splitters.setdefault(id(pipe), MessageSplitter(True)).feed(data):
                    if message.kind is Kind.FRAME and message.header.type == Type.FORWARD:
                        self.sealed[message.header.counter] = message.data[HEADER_BYTES:][: message.header.length]
        return data


def xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))


@pytest.mark.promise("Workers that repeat or choose their random numbers cannot make another repeat a key and nonce.")
@pytest.mark.parametrize("careless", [[0], [0, 2, 3]], ids=["rank 0", "all others"])
def test_repeated_draws_repeat_no_keystream_of_an_honest_worker(careless: list[int]) -> None:
    """Two sessions. Key and nonce would repeat if the XOR of two ciphertexts were that of the plaintexts."""
    seen = []
    for seed in (1, 2):
        world, tap = World(SIZE, seed=seed, table=ORIGIN_SEALS), Wiretap(HONEST)
        repeat_draws(world, careless)
        text = torch.full((64,), float(seed))
        tensors = [text.clone() if rank == HONEST else torch.zeros(64) for rank in range(SIZE)]
        requests = [
            world.submit(communicator, broadcast(communicator, tensors[rank], root=HONEST))
            for rank, communicator in world.communicators.items()
        ]
        world.run(requests, tap.tap)
        assert all(torch.equal(tensor, text) for tensor in tensors)
        seen.append((tap.sealed[0], text.numpy().tobytes()))
    (one, plain_one), (two, plain_two) = seen
    assert len(one) == len(plain_one) == 256
    assert xor(one, two) != xor(plain_one, plain_two)


def test_equal_draws_give_different_secrets_in_two_sessions() -> None:
    worlds = [World(SIZE, seed=seed, table=ORIGIN_SEALS) for seed in (1, 2)]
    for world in worlds:
        repeat_draws(world, range(SIZE))
    assert instance_secret(worlds[0]) != instance_secret(worlds[1])


@pytest.mark.promise("Workers that repeat or choose their random numbers cannot make another repeat a key and nonce.")
def test_equal_draws_give_different_secrets_to_two_groups() -> None:
    world = World(SIZE, table=ORIGIN_SEALS)
    repeat_draws(world, range(SIZE))
    first = instance_secret(world)
    world.communicators = world.add_communicator("another", range(SIZE))
    assert instance_secret(world) != first


@pytest.mark.promise("Every member contributes to the keys of a group.")
@pytest.mark.parametrize("member", range(SIZE))
def test_every_member_contributes_to_the_secret_of_a_group(member: int) -> None:
    worlds = [World(SIZE, table=ORIGIN_SEALS) for _ in range(2)]  # the same session keys
    for world in worlds:
        repeat_draws(world, range(SIZE))
    worlds[1].randoms[member] = lambda length: b"\xee" * length
    assert instance_secret(worlds[0]) != instance_secret(worlds[1])


@pytest.mark.promise("Workers that repeat or choose their random numbers cannot make another repeat a key and nonce.")
def test_a_member_that_cancels_the_others_draws_gains_no_repetition() -> None:
    """The last contributor can choose the XOR of all draws, but no key, within a session or across sessions."""
    chosen = bytes(keys.SECRET_BYTES)
    sessions, communicators = [keys.Secret(bytes([n]) * 32) for n in range(3)], [bytes([n]) * 32 for n in range(3, 6)]
    secrets = {
        keys.group_secret(session, chosen, communicator).reveal()
        for session in sessions
        for communicator in communicators
    }
    assert len(secrets) == len(sessions) * len(communicators)
