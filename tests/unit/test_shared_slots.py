"""Slots of shared memory: each has one user at a time, none is lost, and no order of sends and returns ends in a deadlock."""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringfence import keys
from ringfence.collectives import Collective
from ringfence.dataplane import choice
from ringfence.dataplane.link_memory import ReceiveSlots, SendSlots
from ringfence.dataplane.native import COMPILED
from ringfence.dataplane.shared import map_peer
from ringfence.errors import MismatchError, ProtocolError
from ringfence.keys import SEGMENT_BYTES, SHARED_FROM_BYTES
from ringfence.link.frames import HEADER_BYTES
from ringfence.runtime import pending
from ringfence.runtime.links import Inbox
from ringfence.runtime.point_to_point import PointToPointLink, Transfer
from tests.local_cluster import LocalWorld
from tests.unit.runtime_calls import KINDS, Bound, recv, send, submit_everywhere

LARGEST = 5 * SEGMENT_BYTES // 8  # elements of a part


@contextmanager
def few_slots(size: int) -> Iterator[LocalWorld]:
    """A world whose memory has the fewest slots that links can work with: two for each."""
    with pytest.MonkeyPatch.context() as patch, LocalWorld(size) as world:
        patch.setattr(keys, "SHARED_SLOTS", 1)
        yield world


# -- collectives -------------------------------------------------------------------------------------------------------

calls = st.tuples(st.sampled_from(KINDS), st.integers(1, LARGEST), st.integers(0, 3))
orders = st.lists(st.integers(0, 3), max_size=60)


def assert_all_came_back(world: LocalWorld) -> None:
    """Every slot is free, or lent to a peer that has read it and has not told yet: less than half of a link's quota."""
    for rank in range(world.size):
        world.step(rank)  # reads what was returned last
    for communicator in world.communicators.values():
        outboxes = communicator.outboxes.values()
        region = next((link.shared for link in outboxes if link.shared is not None), None)
        if region is None:
            continue
        assert region.waiting == 0
        assert all(link.reserved == 0 and link.lent < max(1, region.quota // 2) for link in outboxes)
        assert region.count - sum(link.lent for link in outboxes) <= region.free <= region.count


@pytest.mark.slow
@given(st.integers(2, 4), st.lists(calls, min_size=1, max_size=4), orders)
@example(4, [(Collective.ALL_REDUCE, 53_248, 0), (Collective.ALL_GATHER, 16_385, 0)], [])  # lent a slot to a link twice
@settings(max_examples=40)
def test_collectives_in_any_order_of_workers(
    size: int, started: list[tuple[Collective, int, int]], order: list[int]
) -> None:
    """Several collectives at once; the workers take their turns as `order` says, then one after the other."""
    with few_slots(size) as world:
        bound: list[Bound] = []
        for kind, count, root in started:
            bound += submit_everywhere(world, kind, count, root % size)
        for rank in order:
            world.step(rank % size)
        world.drive([each.request for each in bound])
        assert all(each.request.error is None and each.right() for each in bound)
        assert_all_came_back(world)


def test_many_collectives_use_the_slots_again() -> None:
    with few_slots(3) as world:
        for _ in range(6):
            for kind in (Collective.ALL_REDUCE, Collective.BROADCAST, Collective.ALL_TO_ALL):
                bound = submit_everywhere(world, kind, LARGEST)
                world.drive([each.request for each in bound])
                assert all(each.right() for each in bound)
        assert_all_came_back(world)
        assert all(link.is_local and link.shared is not None for link in world.links())


class Piecewise:
    """A relay between an inbox and its socket that passes what arrives on in pieces of these sizes."""

    def __init__(self, link: Inbox, sizes: Sequence[int]) -> None:
        assert isinstance(link.stream, socket.socket)
        self._link, self._stream, self._sizes = link, link.stream, cycle(sizes)
        link.stream, self._near = socket.socketpair()
        for each in (link.stream, self._near):
            each.setblocking(False)
        self._arrived = bytearray()

    def pass_on(self) -> None:
        with suppress(BlockingIOError):
            self._stream.send(self._near.recv(1 << 16))
        with suppress(BlockingIOError):
            self._arrived += self._stream.recv(1 << 16)
        with suppress(BlockingIOError):  # the link waits for another one, and reads nothing
            del self._arrived[: self._near.send(self._arrived[: next(self._sizes)])]
        self._link.notify(True, True)


@given(st.lists(st.integers(24, 4 * HEADER_BYTES), min_size=1, max_size=6))
@example([HEADER_BYTES])
@example([8 * HEADER_BYTES + 1])
@settings(max_examples=10)
def test_headers_that_arrive_in_pieces_of_any_size(sizes: list[int]) -> None:
    """Several headers are written and read at once; what was read beyond a frame belongs to the next one, also a small one."""
    with LocalWorld(3) as world:
        bound = submit_everywhere(world, Collective.ALL_REDUCE, LARGEST)
        world.drive([each.request for each in bound])
        relays = [Piecewise(link, sizes) for link in world.links() if isinstance(link, Inbox)]
        assert relays
        kinds = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.BROADCAST, Collective.ALL_TO_ALL)
        bound = [one for count in (LARGEST, 9) for kind in kinds for one in submit_everywhere(world, kind, count)]
        for _ in range(200_000):
            if all(each.request.done for each in bound):
                break
            for relay in relays:
                relay.pass_on()
            for rank in range(world.size):
                world.step(rank)
        assert all(each.request.done and each.request.error is None and each.right() for each in bound)
        assert_all_came_back(world)


# -- point-to-point ----------------------------------------------------------------------------------------------------


messages = st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(0, 4 * LARGEST))  # from, how far, elements


@pytest.mark.slow
@given(st.lists(messages, min_size=1, max_size=6), st.permutations(range(12)), orders)
@settings(max_examples=40)
def test_payloads_in_any_order_of_workers_tags_and_requests(
    sent: list[tuple[int, int, int]], turns: list[int], order: list[int]
) -> None:
    """Sends and receives of three workers are posted in an order that does not match, between turns of the workers."""
    with LocalWorld(3) as world:
        sources = [torch.arange(count) + 7 * number for number, (_, _, count) in enumerate(sent)]
        targets = [torch.full_like(source, -1) for source in sources]
        requests: list[Transfer] = []
        for turn in sorted(range(2 * len(sent)), key=lambda each: (turns[each], each)):
            number, receives = turn // 2, turn % 2
            source, target = sent[number][0], sum(sent[number][:2]) % 3
            if receives:
                requests.append(recv(world, target, source, targets[number], number))
            else:
                requests.append(send(world, source, target, sources[number], number))
            if order:
                world.step(order.pop() % 3)
        world.drive(requests)
        assert all(request.error is None for request in requests)
        assert all(torch.equal(*pair) for pair in zip(sources, targets, strict=True))


@pytest.mark.parametrize("elements", [SHARED_FROM_BYTES // 8 - 1, SHARED_FROM_BYTES // 8, 20 * SEGMENT_BYTES // 8 + 1])
def test_payloads_pass_through_shared_memory_from_a_size_on(elements: int) -> None:
    with LocalWorld(2) as world:
        target = torch.full((elements,), -1)
        requests = [recv(world, 1, 0, target), send(world, 0, 1, torch.arange(elements))]
        world.drive(requests)
        assert torch.equal(target, torch.arange(elements))
        (link,) = (link for link in world.engines[0].communicators.links() if isinstance(link, PointToPointLink))
        assert link.payload_sent == 8 * elements
        assert (link.wire_sent < 8 * elements) == (8 * elements >= SHARED_FROM_BYTES)


def test_a_wrong_size_is_a_mismatch_in_shared_memory_too() -> None:
    with LocalWorld(2) as world:
        requests = [recv(world, 1, 0, torch.zeros(200_000)), send(world, 0, 1, torch.zeros(100_000))]
        world.drive(requests)
        assert isinstance(requests[0].error, MismatchError)
        assert "100000" in str(requests[0].error) and "200000" in str(requests[0].error)


def test_links_beyond_the_limit_send_through_the_socket() -> None:
    with LocalWorld(2) as world:
        for engine in world.engines:
            assert engine.context.memory.take(keys.SHARED_LIMIT_BYTES)
        target = torch.zeros(100_000)
        requests = [recv(world, 1, 0, target), send(world, 0, 1, torch.ones(100_000))]
        world.drive(requests)
        assert bool((target == 1).all())
        (link,) = (link for link in world.engines[0].communicators.links() if isinstance(link, PointToPointLink))
        assert link.is_local and link.wire_sent > 400_000


def test_without_such_memory_all_passes_through_sockets_and_none_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, flags: int) -> int:
        raise PermissionError("a sandbox refuses it")

    monkeypatch.setattr(os, "memfd_create", refused)
    with LocalWorld(2) as world:
        bound = submit_everywhere(world, Collective.ALL_REDUCE, LARGEST)
        world.drive([each.request for each in bound])
        target = torch.zeros(100_000)
        requests = [recv(world, 1, 0, target), send(world, 0, 1, torch.ones(100_000))]
        world.drive(requests)
        assert all(each.right() for each in bound) and bool((target == 1).all())
        assert all(engine.context.memory.take(keys.SHARED_LIMIT_BYTES) for engine in world.engines)


def test_a_worker_that_returns_no_slot_is_waited_for() -> None:
    with few_slots(2) as world:
        bound = submit_everywhere(world, Collective.ALL_REDUCE, 9)
        world.drive([each.request for each in bound])
        submit_everywhere(world, Collective.BROADCAST, 8 * LARGEST)
        for _ in range(20):
            world.step(0)
        (communicator,) = world.engines[0].communicators.active.values()
        assert [link.worker for link in communicator.waiting_for()] == [1]
        assert not world.engines[0].blocked


def test_after_a_failure_only_what_was_lent_is_left() -> None:
    """A sum that waits in a slot for its turn to be sent is zeroed too."""
    with LocalWorld(3) as world:
        world.drive([each.request for each in submit_everywhere(world, Collective.ALL_REDUCE, LARGEST)])
        submit_everywhere(world, Collective.ALL_REDUCE, 4 * LARGEST)
        world.step(0)
        communicator = world.communicators[1]
        outboxes, memory = communicator.outboxes.values(), communicator._memory
        assert memory is not None
        view = memory.view
        world.networks[1].poll(0)
        choice.receive(communicator.inboxes[0])
        assert sum(link.reserved for link in outboxes) or not COMPILED
        lent = sum(link.lent for link in outboxes)
        world.engines[1].fail(ProtocolError("the end"))
        slots = [view[start : start + SEGMENT_BYTES] for start in range(0, len(view), SEGMENT_BYTES)]
        assert sum(any(slot) for slot in slots) <= lent


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENFILE])
def test_memory_that_cannot_be_mapped_ends_the_session_and_is_not_blamed_on_its_owner(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int, worker: int) -> memoryview:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(pending, "map_peer", refused)
    with LocalWorld(2) as world:
        bound = submit_everywhere(world, Collective.ALL_REDUCE, LARGEST)
        world.drive([each.request for each in bound[:1]])
        failures = [str(engine.failure) for engine in world.engines if engine.failed]
        assert failures and all("cannot map the memory that worker" in each for each in failures)


def test_closed_links_give_their_memory_back() -> None:
    with LocalWorld(2) as world:
        for number in range(50):  # of 2 MiB each
            world.communicators = world.add_communicator(f"group {number}", range(2))
            target = torch.zeros(100_000)
            requests = [recv(world, 1, 0, target), send(world, 0, 1, torch.ones(100_000))]
            world.drive(requests)
            (link,) = (each for each in world.communicators[0].links() if isinstance(each, PointToPointLink))
            assert link.wire_sent < 100_000
            for rank in range(2):
                world.engines[rank].destroy_communicator(world.communicators[rank])


# -- the ring of a point-to-point link ---------------------------------------------------------------------------------


@given(st.integers(1, 9), st.lists(st.sampled_from(["write", "read", "report", "hear"]), max_size=300))
@settings(max_examples=60)
def test_a_slot_of_a_ring_has_one_user_at_a_time(count: int, actions: list[str]) -> None:
    """The sender writes and hears of returns, the receiver reads and reports, each when it comes to it."""
    sender = SendSlots(count)
    receiver = ReceiveSlots(map_peer(sender.descriptor, 1))
    announced: deque[tuple[int, int]] = deque()  # slot and content
    reports: deque[int] = deque()
    written = 0

    def act(action: str) -> bool:
        nonlocal written
        if action == "write" and sender.has_room:
            written += 1
            announced.append((sender.write(memoryview(written.to_bytes(8, "big"))), written))
        elif action == "read" and announced:
            slot, content = announced.popleft()
            target = memoryview(bytearray(8))
            receiver.read(slot, target)
            assert int.from_bytes(target, "big") == content
        elif action == "report" and receiver.due:
            reports.append(receiver.due)
            receiver.reported(receiver.due)
        elif action == "hear" and reports:
            sender.take_back(reports.popleft())
        else:
            return False
        return True

    while act("write"):
        continue
    assert len(announced) == count  # all slots are lent, each once
    for action in actions:
        act(action)
    while any([act("read"), act("report"), act("hear")]):
        continue
    assert sender.has_room  # whatever happened before, the sender goes on
    for _ in range(3 * count):
        assert any([act("write"), act("read"), act("report"), act("hear")])
    sender.close()


@pytest.mark.parametrize("total", [0, 3, (1 << 64) - 1])
def test_a_return_of_more_or_less_than_was_lent_is_refused(total: int) -> None:
    sender = SendSlots(4)
    for _ in range(2):
        sender.write(memoryview(b"x"))
    sender.take_back(1)
    with pytest.raises(ProtocolError, match="that it was not lent"):
        sender.take_back(total)
    sender.close()


@pytest.mark.parametrize("slot", [1, 4, (1 << 64) - 1])
def test_another_slot_than_the_next_one_is_refused(slot: int) -> None:
    sender = SendSlots(4)
    receiver = ReceiveSlots(map_peer(sender.descriptor, 1))
    with pytest.raises(ProtocolError, match="not the next one"):
        receiver.read(slot, memoryview(bytearray(8)))
    sender.close()


def test_a_closed_ring_keeps_only_what_the_receiver_has() -> None:
    sender = SendSlots(4)
    mapped = map_peer(sender.descriptor, 1)
    for content in b"abc":
        sender.write(memoryview(bytes([content])))
    sender.take_back(2)
    sender.close()
    assert [mapped[slot * SEGMENT_BYTES] for slot in range(4)] == [0, 0, ord("c"), 0]
