"""What is recorded of the frames that pass, against a plain computation from the bytes on the wire (spec/record.md, 11)."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringfence import keys
from ringfence.collectives import Collective
from ringfence.dataplane.request import Request
from ringfence.errors import AuthenticationError
from ringfence.link.frames import HEADER_BYTES, Call, Type, frame_bytes, read_header
from ringfence.link.hello import CONFIRM_BYTES, HELLO_BYTES, REPLY_BYTES
from ringfence.link.tag_chain import TagChain, TagChains
from ringfence.record.agreement import Point, compare
from tests.in_memory_network import Pipe
from tests.memory_cluster import World
from tests.unit.runtime_calls import recv, send, submit_everywhere
from tests.unit.test_channels import Channelled

IDLE = float("inf")  # a deadline: such a request never ends, so that a cluster is driven until nothing moves


class Wire:
    """The bytes that passed in each pipe."""

    def __init__(self) -> None:
        self.seen: dict[Pipe, bytes] = {}

    def __call__(self, pipe: Pipe, data: bytes) -> bytes:
        self.seen[pipe] = self.seen.get(pipe, b"") + data
        return data

    def points(self, world: World) -> dict[int, set[Point]]:
        """What each worker should have recorded in the end, by the text of the specification alone."""
        found: dict[int, set[Point]] = defaultdict(set)
        for near, far in zip(world.wires.streams[::2], world.wires.streams[1::2], strict=True):
            forth, back = self.seen[near.outgoing], self.seen[far.outgoing]
            hello, nonce = forth[:HELLO_BYTES], back[:32]
            place = hello[6:48]  # lane, channel, dialler, acceptor, group
            start = hashlib.sha256(b"ringfence/1 record connection\0")
            for part in (place, hello[48:80] + nonce):
                start.update(len(part).to_bytes(8, "big") + part)
            ends = near.outgoing.sender, near.outgoing.receiver
            halves = (ends, forth[HELLO_BYTES + CONFIRM_BYTES :]), (ends[::-1], back[REPLY_BYTES:])
            for (sender, receiver), frames in halves:
                for count, digest in digests(start.digest(), frames):
                    same = start.hexdigest(), hello[7]
                    found[sender].add(Point(receiver, *same, 0, count, digest))
                    found[receiver].add(Point(sender, *same, 1, count, digest))
        return found


def tags(frames: bytes) -> list[bytes]:
    """The link's tag of every frame, but of those that need not be read."""
    found = []
    while frames:
        header = read_header(frames[:HEADER_BYTES])
        length = frame_bytes(header)
        if header.type not in (Type.BYE, Type.NOP):
            found.append(frames[length - 16 : length])
        frames = frames[length:]
    return found


def digests(connection: bytes, frames: bytes) -> list[tuple[int, str]]:
    every = tags(frames)
    fixed = {n for n in range(1, len(every) + 1) if n % 65_536 == 0 or (n.bit_count() == 1 and n < 65_536)}
    counts = sorted(fixed | {len(every)} - {0})
    label = b"ringfence/1 record frames\0"
    return [(n, hashlib.sha256(label + connection + b"".join(every[:n])).hexdigest()) for n in counts]


def recording(world: World) -> list[TagChains]:
    return [engine.keys.record_tags() for engine in world.engines[: world.size]]


def taken(chains: list[TagChains]) -> dict[int, set[Point]]:
    found: dict[int, list[Any]] = {rank: each.take() for rank, each in enumerate(chains)}
    points = {rank: {Point(*point) for point in each} for rank, each in found.items()}
    assert {rank: len(each) for rank, each in found.items()} == {rank: len(each) for rank, each in points.items()}
    return points


def leave(world: World, wire: Wire) -> None:
    for engine in world.engines[: world.size]:
        engine.leave()
        world.run([Request(Call(0), IDLE)], wire)


def collective(world: World, wire: Wire, kind: Collective, count: int) -> None:
    requests = [each.request for each in submit_everywhere(world, kind, count)]
    world.run(requests, wire)
    assert all(request.done and request.error is None for request in requests)


def reduce_and_broadcast(world: World, wire: Wire) -> None:
    for count in (10, 300_000, 10):
        collective(world, wire, Collective.ALL_REDUCE, count)
        collective(world, wire, Collective.BROADCAST, count)


def gather(world: World, wire: Wire) -> None:
    collective(world, wire, Collective.ALL_GATHER, 200_000)


def send_and_receive(world: World, wire: Wire) -> None:
    requests: list[Request] = []
    for number, count in enumerate((0, 5, 200_000)):
        requests += [send(world, 0, 1, torch.ones(count), number), recv(world, 1, 0, torch.ones(count), number)]
    world.run(requests, wire)
    assert all(request.done and request.error is None for request in requests)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("work", [reduce_and_broadcast, gather, send_and_receive])
def test_both_ends_record_the_tags_on_the_wire(size: int, channels: int, work: Callable[[World, Wire], None]) -> None:
    """With three workers, all-gather and broadcast forward frames: what counts is the tag of the hop."""
    world, wire = Channelled(size, channels), Wire()
    chains = recording(world)
    work(world, wire)
    leave(world, wire)
    found, expected = taken(chains), wire.points(world)
    assert found == {rank: expected[rank] for rank in range(size)}
    agreement = compare(found)
    assert (agreement.disagreements, agreement.partial, agreement.uncompared) == ([], 0, 0)
    assert agreement.compared >= 2
    if work is not send_and_receive:
        assert {point.channel for points in found.values() for point in points} == set(range(channels))
    assert taken(chains) == {rank: set() for rank in range(size)}


def test_a_worker_that_is_not_recorded_has_no_chain() -> None:
    world, wire = World(2), Wire()
    reduce_and_broadcast(world, wire)
    links = [link for engine in world.engines for link in engine.communicators.links()]
    assert links
    for link in links:
        for half in (getattr(link, "sealer", None), getattr(link, "opener", None)):
            assert half is None or half.chain is None


def test_a_frame_that_does_not_authenticate_is_not_recorded() -> None:
    world, wire = World(2), Wire()
    chains = recording(world)
    reduce_and_broadcast(world, wire)

    def change(pipe: Pipe, data: bytes) -> bytes:
        wire(pipe, data)
        return data if pipe.sender == 1 else data[:-1] + bytes([data[-1] ^ 1])

    requests = [each.request for each in submit_everywhere(world, Collective.ALL_REDUCE, 10)]
    world.run([Request(Call(0), IDLE)], change)
    assert isinstance(requests[1].error, AuthenticationError)
    assert all(engine.failed for engine in world.engines)
    found = taken(chains)
    agreement = compare(found)
    assert (agreement.disagreements, agreement.partial, agreement.uncompared) == ([], 1, 0)
    sent = max(point.frames for point in found[0] if point.direction == 0)
    received = max(point.frames for point in found[1] if point.direction == 1)
    assert sent == received + 1


def test_points_of_a_long_connection_are_at_fixed_counts_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever they are taken. Without a reader the latest remain, and the hash has everything."""
    monkeypatch.setattr(keys, "RECORD_POINT_FRAMES", 8)
    name = bytes(32)
    whole, often = TagChain(1, name, 0, 0), TagChain(1, name, 0, 0)
    state, expected, read = hashlib.sha256(b"ringfence/1 record frames\0" + name), [], []
    for number in range(1, 1004):
        tag = number.to_bytes(16, "big")
        for chain in (whole, often):
            chain.add(Type.NOP, bytes(16))
            chain.add(Type.HOP, tag)
        state.update(tag)
        if number in (1, 2, 4) or number % 8 == 0 or number == 1003:
            expected.append((number, state.hexdigest()))
        if number % 3 == 0:
            read += [often.points.popleft() for _ in range(len(often.points))]
    for chain in (whole, often):
        chain.end()
        chain.end()
    assert read + list(often.points) == expected
    assert list(whole.points) == expected[-keys.RECORD_POINTS :]


def test_a_chain_is_taken_until_its_connection_has_ended() -> None:
    chains = TagChains()
    sent, received = chains.add(5, bytes(32), 1)
    assert chains.take() == []
    sent.add(Type.HOP, bytes(16))
    place: list[Any] = [5, "00" * 32, 1, 0, 1]
    (point,) = chains.take()
    assert point[:5] == place
    sent.add(Type.HOP, bytes(16))
    sent.add(Type.HOP, bytes(16))
    sent.end()
    received.end()
    assert [each[4] for each in chains.take()] == [2, 3]
    assert not chains._chains
