"""Attacks on links inside a machine: other users, other machines, squatters, and admitted workers that lie."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from ringfence import keys
from ringfence.errors import RingfenceError
from ringfence.link.frames import HEADER_BYTES, HOP_OVERHEAD, NO_ORIGIN, Type
from ringfence.link.hello import REPLY_BYTES, Lane, LinkHello, write_hello
from ringfence.runtime.point_to_point import PointToPointLink, Transfer
from ringfence.transport.unix import LocalNetwork, unix_socket
from tests.attack.test_same_machine import other_network, other_user, unmapped_user
from tests.integration.netns import ADDRESSES, Hosts
from tests.integration.test_faults import raised
from tests.integration.test_faults_fork import in_a_child
from tests.limits import HANG
from tests.local_cluster import LocalWorld
from tests.pool import IN_SHARED_MEMORY, Pool, values
from tests.unit.runtime_calls import transfer

ELEMENTS: Final = 1 << 20  # of an all-reduce that uses shared memory
COUNTER: Final = slice(40, 48)  # in a header

pytestmark = pytest.mark.processes


# -- who is on this machine --------------------------------------------------------------------------------------------


def name_of(rank: int) -> bytes:
    return b"\0ringfence test %d %d" % (os.getppid() if IN_CHILD else os.getpid(), rank)


IN_CHILD = False


def elsewhere(pipe: Connection, enter: Callable[[], None]) -> None:
    """Worker 1, where `enter` leads: listens, and dials worker 0. Report whether a connection was made."""
    global IN_CHILD
    IN_CHILD = True
    enter()
    network = LocalNetwork(name_of, 1, ((0, 1),))
    pipe.send("listening")
    assert pipe.recv() == "dial"
    connection = network.dial(0)
    answer = None
    if connection is not None:
        connection.setblocking(True)
        answer = connection.recv(1)
    pipe.send(answer)
    network.close()


@pytest.mark.promise("A worker of another user, network namespace or machine shares no memory with this one.")
@pytest.mark.parametrize("enter", [other_user, other_network, unmapped_user], ids=lambda enter: enter.__name__)
def test_a_process_elsewhere_gets_no_connection(enter: Callable[[], None]) -> None:
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()
    network = LocalNetwork(name_of, 0, ((0, 1),))
    child = context.Process(target=elsewhere, args=(theirs, enter), daemon=True)
    child.start()
    theirs.close()
    assert pipe.recv() == "listening"
    assert network.dial(1) is None  # it is reached over TCP, and sealed
    pipe.send("dial")
    while not pipe.poll(0.05):  # a connection of another user is closed before a byte of it is read
        try:
            accepted = network.accept()
        except BlockingIOError:
            continue
        assert accepted is None
    assert pipe.recv() in (None, b"")
    child.join(HANG)
    network.close()


def squatter(pipe: Connection, user: int) -> None:
    """Listen at the name of worker 1, before it does."""
    global IN_CHILD
    IN_CHILD = True
    os.setresuid(user, user, user)
    listener = unix_socket()
    listener.bind(name_of(1))
    listener.listen()
    pipe.send("listening")
    pipe.recv()


def test_a_process_of_another_user_at_a_workers_name_gets_nothing() -> None:
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()
    child = context.Process(target=squatter, args=(theirs, 1234), daemon=True)
    child.start()
    theirs.close()
    assert pipe.recv() == "listening"
    mine, other = LocalNetwork(name_of, 0, ((0, 1),)), LocalNetwork(name_of, 1, ((0, 1),))
    assert mine.dial(1) is None
    assert other.listener is None  # its name is taken: others reach it over TCP
    pipe.send("end")
    child.join(HANG)
    mine.close()


# -- lanes -------------------------------------------------------------------------------------------------------------


def dial_with_lane(lane: int, over_tcp: bool) -> bytes | None:
    """On worker 0, which is admitted: dial worker 1 with a hello of this lane. Return its answer."""
    session = dist.group.WORLD._session
    engine = session.engine
    hello = LinkHello(0, 1, Lane(lane), engine.communicators.active.copy().popitem()[0], bytes(keys.NONCE_BYTES))
    if over_tcp:
        address = session.network._addresses[1]
        connection = socket.create_connection(address[:2], timeout=HANG)
    else:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(10)
        connection.connect(keys.local_socket(engine.keys.session_key, 1))
    with connection:
        connection.sendall(write_hello(engine.keys.session_key, hello))
        try:
            return connection.recv(REPLY_BYTES)
        except ConnectionResetError:
            return b""


def tries_lanes(lanes: list[tuple[int, bool]]) -> list[bool]:
    """Return for each lane whether worker 1 answered."""
    dist.barrier()
    answers = [bool(dial_with_lane(*lane)) for lane in lanes] if dist.get_rank() == 0 else []
    dist.barrier()
    return answers


@pytest.mark.promise("A link over the network is always sealed, whatever the roster says.")
def test_links_inside_a_machine_are_refused_over_tcp_and_the_reverse(pool: Pool) -> None:
    lanes = [(lane, over_tcp) for lane in (0, 1, 4, 5) for over_tcp in (True, False)]
    answered = pool.check(tries_lanes, 2, IN_SHARED_MEMORY, (lanes,), renew=True)[0]
    assert answered == [(lane < 4) == over_tcp for lane, over_tcp in lanes]


# -- an admitted worker that lies --------------------------------------------------------------------------------------


class Tampering:
    """A stream that changes the slot in frames of shared segments."""

    def __init__(self, stream: socket.socket, slot: int) -> None:
        self._stream = stream
        self._slot = slot

    def send(self, data: memoryview) -> int:
        changed = bytearray(data)
        for start in range(0, len(data), HEADER_BYTES) if len(data) % HEADER_BYTES == 0 else ():  # several at once
            if data[start] == Type.SHARED:
                changed[start + COUNTER.start : start + COUNTER.stop] = self._slot.to_bytes(8, "big")
        return self._stream.send(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def world_links(inboxes: bool) -> dict[int, Any]:
    (communicator,) = dist.group.WORLD._session.engine.communicators.active.values()
    links: dict[int, Any] = communicator.inboxes if inboxes else communicator.outboxes
    return links


def use_memory() -> None:
    tensor = torch.ones(ELEMENTS)
    dist.all_reduce(tensor)
    assert bool((tensor == dist.get_world_size()).all())


def name_another_slot(slot: int) -> None:
    use_memory()
    dist.barrier()
    if dist.get_rank() == 1:
        link = world_links(inboxes=False)[0]
        link.stream = Tampering(link.stream, slot)
    use_memory()


@pytest.mark.promise("No value in shared memory or about it makes a worker read or write outside it.")
@pytest.mark.parametrize("slot", [keys.SHARED_SLOTS, 256, 1 << 31, (1 << 64) - 1])
def test_a_slot_that_does_not_exist_is_refused(pool: Pool, slot: int) -> None:
    results = raised(pool.run(name_another_slot, 2, IN_SHARED_MEMORY, (slot,)), {"ProtocolError", "AbortedError"})
    assert any("a part of its shared memory that does not exist" in result.message for result in results)


def return_frame(count: int) -> bytes:
    frame = bytearray(HOP_OVERHEAD)
    frame[0], frame[28:32] = Type.RETURN, NO_ORIGIN.to_bytes(4, "big")
    frame[COUNTER] = count.to_bytes(8, "big")
    return bytes(frame)


def return_too_many(count: int) -> None:
    use_memory()
    dist.barrier()
    if dist.get_rank() == 1:
        world_links(inboxes=True)[0].stream.send(return_frame(count))
    for _ in range(3):
        use_memory()


@pytest.mark.promise("No value in shared memory or about it makes a worker read or write outside it.")
@pytest.mark.parametrize("count", [0, 1000, (1 << 64) - 1])
def test_a_return_of_more_or_less_than_was_lent_is_refused(pool: Pool, count: int) -> None:
    results = raised(pool.run(return_too_many, 2, IN_SHARED_MEMORY, (count,)), {"ProtocolError", "AbortedError"})
    assert any("returned shared memory that it was not lent" in result.message for result in results)


def give_memory_that_can_shrink() -> None:
    """Worker 1 seals nothing before it gives its memory away. What worker 0 gives, it looks at as ever."""
    if dist.get_rank() == 1:
        real = fcntl.fcntl
        fcntl.fcntl = lambda file, command, *seals: 0 if seals else real(file, command)  # type: ignore[assignment]
    use_memory()


@pytest.mark.promise("No value in shared memory or about it makes a worker read or write outside it.")
def test_memory_that_its_owner_can_shrink_is_refused(pool: Pool) -> None:
    with pool.fresh() as workers:
        results = workers.run(give_memory_that_can_shrink, 2, IN_SHARED_MEMORY)
    failures = raised(results, {"ProtocolError", "AbortedError"})
    assert any("worker 1 shares has another form than this release writes" in each.message for each in failures)


# -- the same on links of point-to-point transfers ---------------------------------------------------------------------


def pass_on(world: LocalWorld) -> list[Transfer]:
    """Send four segments from worker 0 to worker 1; return both ends of the transfer."""
    requests = [transfer(torch.zeros(1 << 17)), transfer(torch.ones(1 << 17))]
    world.engines[1].receive(world.communicators[1], requests[0], 0)
    world.engines[0].send(world.communicators[0], requests[1], 1)
    world.drive(requests)
    return requests


def one_to_one(world: LocalWorld, rank: int) -> PointToPointLink:
    (link,) = (each for each in world.communicators[rank].links() if isinstance(each, PointToPointLink))
    return link


@pytest.mark.promise("No value in shared memory or about it makes a worker read or write outside it.")
@pytest.mark.parametrize("slot", [0, keys.SHARED_LINK_SLOTS, 256, (1 << 64) - 1])
def test_a_payload_in_another_slot_than_the_next_is_refused(slot: int) -> None:
    with LocalWorld(2) as world:
        assert all(request.error is None for request in pass_on(world))
        link = one_to_one(world, 0)
        assert isinstance(link.stream, socket.socket)
        link.stream = Tampering(link.stream, slot)
        receiving, _ = pass_on(world)
        assert "a part of its shared memory that is not the next one" in str(receiving.error)


@pytest.mark.promise("No value in shared memory or about it makes a worker read or write outside it.")
@pytest.mark.parametrize("count", [0, 5, (1 << 64) - 1])
def test_a_return_of_payloads_that_were_not_lent_is_refused(count: int) -> None:
    with LocalWorld(2) as world:
        assert all(request.error is None for request in pass_on(world))
        link = one_to_one(world, 1)
        assert link.stream is not None
        link.stream.send(memoryview(return_frame(count)))
        _, sending = pass_on(world)
        assert "returned shared memory that it was not lent" in str(sending.error)


# -- machines ----------------------------------------------------------------------------------------------------------

SIDES = ("near", "near", "far", "far")


def shared_files() -> set[tuple[str, str]]:
    """The shared memory that this process has mapped or open, by device and inode."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:ringfence" in line:
            found.add((line.split()[3], line.split()[4]))
    return found


def memory_and_sums() -> set[tuple[str, str]]:
    for count in (10, 50_000, ELEMENTS):
        tensor = torch.full((count,), float(dist.get_rank() + 1))
        dist.all_reduce(tensor)
        assert bool((tensor == 10).all())
    gathered = torch.empty(4 * ELEMENTS)
    dist.all_gather_into_tensor(gathered, torch.full((ELEMENTS,), float(dist.get_rank())))
    assert bool((gathered.view(4, -1) == torch.arange(4.0)[:, None]).all())
    near = dist.new_group([0, 1])
    far = dist.new_group([2, 3])
    mine = near if dist.get_rank() < 2 else far
    tensor = torch.ones(ELEMENTS)
    dist.all_reduce(tensor, group=mine)
    assert bool((tensor == 2).all())
    return shared_files()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as both:
        yield both


@pytest.mark.promise("A worker of another user, network namespace or machine shares no memory with this one.")
def test_no_memory_is_shared_across_two_machines(hosts: Hosts) -> None:
    environments = [{"RINGFENCE_INTERFACE": ADDRESSES[side]} for side in SIDES]
    with Pool([hosts.prefix(side) for side in SIDES]) as pool:
        values(pool.join(IN_SHARED_MEMORY, 4, env=environments))
        mapped = values(pool.start(memory_and_sums, 4).wait(HANG))
    assert all(mapped)
    assert mapped[0] & mapped[1] and mapped[2] & mapped[3]  # without it, the next line would mean nothing
    assert not (mapped[0] | mapped[1]) & (mapped[2] | mapped[3])


def newly_shared() -> set[tuple[str, str]]:
    before = shared_files()  # of earlier sessions, which a traceback may still refer to
    use_memory()
    return shared_files() - before


def test_a_worker_that_is_told_to_seal_shares_nothing(pool: Pool) -> None:
    assert pool.check(newly_shared, 2, "ringfence") == [set(), set()]


def held() -> tuple[set[tuple[str, str]], set[str]]:
    """The shared memory that this process has mapped, and what it has open of it."""
    opened = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the folder itself
            opened.add(os.readlink(f"/proc/self/fd/{number}"))
    return shared_files(), {name for name in opened if "memfd:ringfence" in name}


def fork_and_look() -> tuple[set[tuple[str, str]], set[str]]:
    use_memory()
    assert all(held())
    found: tuple[set[tuple[str, str]], set[str]] = in_a_child(held)
    use_memory()
    return found


@pytest.mark.promise("A child that Python forks holds no key and no connection, and can neither seal nor open.")
def test_a_forked_child_has_none_of_the_memory(pool: Pool) -> None:
    assert pool.check(fork_and_look, 2, IN_SHARED_MEMORY) == [(set(), set())] * 2


# -- ends of groups ----------------------------------------------------------------------------------------------------


def dial_a_destroyed_group() -> str:
    """Worker 1 destroys a group before worker 0 dials it. Return the error of either worker."""
    group = dist.new_group()
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
    dist.barrier()
    try:
        dist.all_reduce(torch.ones(ELEMENTS), group=group if dist.get_rank() == 0 else None)
    except RingfenceError as error:
        return str(error)
    return ""


def test_memory_for_a_destroyed_group_is_dropped(pool: Pool) -> None:
    """The dialler is told that the group is gone; what it shared on the way is no error."""
    for message in pool.check(dial_a_destroyed_group, 2, IN_SHARED_MEMORY, renew=True):
        assert "worker 1" in message and "shares memory" not in message
