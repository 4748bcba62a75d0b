"""Send and recv between engines in memory: any order of tags, any source, payloads that wait for their request."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.collectives import Collective
from ringfence.errors import AbortedError, AuthenticationError, MismatchError, PeerLostError, ProtocolError
from ringfence.keys import SEGMENT_BYTES
from ringfence.link.frames import Type
from ringfence.link.hello import CONFIRM_BYTES, HELLO_BYTES, REPLY_BYTES
from ringfence.runtime.point_to_point import PointToPointLink, Transfer
from tests.memory_cluster import World
from tests.unit.runtime_calls import bind, recv, send, transfer


def fine(*requests: Transfer) -> bool:
    return all(request.done and request.error is None for request in requests)


def filled(value: int, count: int = 5) -> torch.Tensor:
    return torch.full((count,), value)


def blank(count: int = 5) -> torch.Tensor:
    return torch.full((count,), -1)


# -- order -------------------------------------------------------------------------------------------------------------

halves = st.tuples(st.sampled_from(["send", "recv"]), st.integers(0, 1), st.integers(-1, 2), st.booleans())


@given(st.lists(halves, max_size=25))
@settings(max_examples=60, deadline=None)
def test_the_nth_send_of_a_tag_matches_the_nth_recv(actions: list[tuple[str, int, int, bool]]) -> None:
    """Sends and recvs of two workers with three tags in both directions; the network delivers at some points in between."""
    world = World(2)
    sent: dict[tuple[int, int], list[torch.Tensor]] = {}
    received: dict[tuple[int, int], list[torch.Tensor]] = {}
    requests = []

    def act(what: str, sender: int, tag: int) -> None:
        ours = (sent if what == "send" else received).setdefault((sender, tag), [])
        tensor = filled(len(ours) + 100 * tag, 3 + len(ours)) if what == "send" else blank(3 + len(ours))
        ours.append(tensor)
        move = (
            send(world, sender, 1 - sender, tensor, tag)
            if what == "send"
            else recv(world, 1 - sender, sender, tensor, tag)
        )
        requests.append(move)

    for what, sender, tag, moves in actions:
        act(what, sender, tag)
        if moves:
            world.run(requests)
    for place in {*sent, *received}:
        ahead = len(sent.get(place, [])) - len(received.get(place, []))
        for _ in range(abs(ahead)):
            act("recv" if ahead > 0 else "send", *place)
    world.run(requests)
    assert fine(*requests)
    for place, tensors in sent.items():
        assert all(torch.equal(*pair) for pair in zip(tensors, received[place], strict=True))


def test_tags_are_matched_in_any_order() -> None:
    """The requests arrive before the sends, so that the order on the wire is the sender's."""
    world = World(2)
    one, two, first = blank(), blank(), blank()
    recvs = [recv(world, 1, 0, one, 1), recv(world, 1, 0, two, 2), recv(world, 1, 0, first, 9)]
    opener = send(world, 0, 1, filled(9), 9)
    world.run([*recvs, opener])
    assert fine(opener, recvs[2]) and not recvs[0].done
    sends = [send(world, 0, 1, filled(2), 2), send(world, 0, 1, filled(1), 1)]
    world.run([*sends, *recvs])
    assert fine(*sends, *recvs) and torch.equal(one, filled(1)) and torch.equal(two, filled(2))


def test_a_late_recv_does_not_block_collectives() -> None:
    world = World(2)
    early = send(world, 0, 1, filled(3))
    bound = [bind(Collective.ALL_REDUCE, world.communicators[rank], 1000) for rank in range(2)]
    for rank, each in enumerate(bound):
        world.submit(world.communicators[rank], each.request)
    world.run([each.request for each in bound])
    assert all(each.request.done and each.right() for each in bound) and not early.done
    target = blank()
    late = recv(world, 1, 0, target)
    world.run([early, late])
    assert fine(early, late) and torch.equal(target, filled(3))


# -- payloads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, SEGMENT_BYTES // 8, 3 * SEGMENT_BYTES // 8 + 1])
@pytest.mark.parametrize("capacity", [5000, 1 << 22])
def test_payloads_of_any_length_in_both_directions_at_once(count: int, capacity: int) -> None:
    world = World(2, capacity=capacity)
    targets = [blank(count), blank(count)]
    moves = [send(world, rank, 1 - rank, torch.arange(count) + rank) for rank in range(2)]
    moves += [recv(world, rank, 1 - rank, targets[rank]) for rank in range(2)]
    world.run(moves, rounds=100_000)
    assert fine(*moves)
    assert torch.equal(targets[0], torch.arange(count) + 1) and torch.equal(targets[1], torch.arange(count))


def test_a_payload_is_sent_only_after_its_request() -> None:
    world = World(2)
    moved = [0]

    def count(pipe: object, data: bytes) -> bytes:
        moved[0] += len(data)
        return data

    sends = [send(world, 0, 1, filled(tag, 100_000), tag) for tag in range(3)]
    world.run(sends, count)
    handshake = HELLO_BYTES + REPLY_BYTES + CONFIRM_BYTES
    assert not any(request.done for request in sends) and moved[0] < handshake + 800
    target = blank(100_000)
    asked = recv(world, 1, 0, target, 1)
    world.run([asked], count)
    assert fine(asked, sends[1]) and torch.equal(target, filled(1, 100_000))
    assert not sends[0].done and 800_000 < moved[0] - handshake < 802_000


def test_point_to_point_needs_few_segments() -> None:
    world = World(2, capacity=1 << 18)
    target = blank(10 * SEGMENT_BYTES // 8)
    moves = [send(world, 0, 1, torch.arange(len(target))), recv(world, 1, 0, target)]
    world.run(moves)
    assert fine(*moves) and torch.equal(target, torch.arange(len(target)))
    assert max(engine.pool.made for engine in world.engines) <= 2


# -- any source --------------------------------------------------------------------------------------------------------


def test_a_recv_from_any_source_reports_its_source() -> None:
    world = World(4)
    targets = [blank() for _ in range(3)]
    recvs = [recv(world, 0, None, target, 5) for target in targets]
    other = send(world, 1, 0, filled(77), 6)  # another tag is not for them
    sends = [send(world, rank, 0, filled(rank), 5) for rank in (3, 1, 2)]
    world.run([*recvs, *sends])
    assert fine(*recvs, *sends) and not other.done
    assert sorted(request.source for request in recvs) == [1, 2, 3]
    for request, target in zip(recvs, targets, strict=True):
        assert torch.equal(target, filled(request.source))


def test_recvs_with_a_source_are_matched_first() -> None:
    world = World(2)
    named, anyone = blank(), blank()
    moves = [recv(world, 1, 0, named), recv(world, 1, None, anyone)]
    moves += [send(world, 0, 1, filled(1)), send(world, 0, 1, filled(2))]
    world.run(moves)
    assert fine(*moves) and torch.equal(named, filled(1)) and torch.equal(anyone, filled(2))


@pytest.mark.parametrize("posted", ["before", "after"])
def test_a_recv_from_any_source_fails_if_all_others_left(posted: str) -> None:
    world = World(3)
    pending = [recv(world, 0, None, blank(), 5)] if posted == "before" else []
    for leaver in (1, 2):
        assert world.engines[0].failure is None
        world.engines[leaver].leave()
        world.run(pending)
    pending = pending or [recv(world, 0, None, blank(), 5)]
    assert isinstance(pending[0].error, PeerLostError) and "no other member" in str(pending[0].error)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", [torch.zeros(4, dtype=torch.int64), torch.zeros(5, dtype=torch.int32)], ids=["count", "dtype"]
)
def test_a_mismatch_names_both_endpoints(target: torch.Tensor) -> None:
    world = World(2)
    moves = [send(world, 0, 1, filled(1)), recv(world, 1, 0, target)]
    world.run(moves)
    assert isinstance(moves[1].error, MismatchError)
    text = str(moves[1].error)
    assert "worker 1 receives" in text and "from worker 0" in text and "5 x int64" in text
    assert not target.any()
    follow_up = send(world, 0, 1, filled(2))
    world.run([follow_up])
    assert isinstance(follow_up.error, AbortedError) and "MismatchError" in str(follow_up.error)


def test_a_changed_payload_is_refused_and_wiped() -> None:
    world = World(2)
    target = blank(1000)

    def flip(pipe: object, data: bytes) -> bytes:
        return data if len(data) < 8000 else data[:500] + bytes([data[500] ^ 1]) + data[501:]

    moves = [send(world, 0, 1, filled(1, 1000)), recv(world, 1, 0, target)]
    world.run(moves, flip)
    assert isinstance(moves[1].error, AuthenticationError) and "worker 0" in str(moves[1].error)
    assert not target.any()


def test_a_recv_from_a_worker_that_left_raises() -> None:
    world = World(2)
    pending = recv(world, 1, 0, blank())
    world.run([pending])
    world.engines[0].leave()
    world.run([pending])
    assert isinstance(pending.error, PeerLostError) and "worker 0" in str(pending.error)


def test_a_send_whose_receiver_leaves_raises() -> None:
    world = World(2)
    pending = send(world, 0, 1, filled(1))
    world.run([pending])
    world.engines[1].leave()
    world.run([pending])
    assert isinstance(pending.error, PeerLostError) and "worker 1" in str(pending.error)


def test_a_worker_without_open_transfers_may_leave() -> None:
    world = World(2)
    moves = [send(world, 0, 1, filled(1)), recv(world, 1, 0, blank())]
    world.run(moves)
    world.engines[0].leave()
    never = transfer(blank())
    world.run([never])
    assert fine(*moves) and world.engines[1].failure is None


@pytest.mark.parametrize(
    ("kind", "ordinals", "words"),
    [
        (Type.OFFER, [0, 0], "offered a payload of tag 3 twice"),
        (Type.WANT, [1], "out of order"),
        (Type.HOP, [0], "does not authenticate"),
        (Type.NOP, [0], "does not authenticate"),
    ],
)
def test_a_member_that_violates_the_protocol_is_named(kind: Type, ordinals: list[int], words: str) -> None:
    world = World(2)
    moves = [send(world, 0, 1, filled(1)), recv(world, 1, 0, blank())]
    world.run(moves)
    (link,) = [each for each in world.communicators[0].links() if isinstance(each, PointToPointLink)]
    for ordinal in ordinals:
        link._controls.append((kind, transfer(blank(), 3).call.pack(), ordinal))
    link.wake()
    world.run([transfer(blank())])
    failure = world.engines[1].failure
    assert isinstance(failure, ProtocolError) and words in str(failure) and "worker 0" in str(failure)


def test_a_payload_without_a_request_is_refused() -> None:
    world = World(2)
    moves = [send(world, 0, 1, filled(1)), recv(world, 1, 0, blank())]
    world.run(moves)
    (link,) = [each for each in world.communicators[0].links() if isinstance(each, PointToPointLink)]
    link._payloads.append(transfer(filled(1), 4))
    link.wake()
    world.run([transfer(blank())])
    assert "was not requested" in str(world.engines[1].failure)
