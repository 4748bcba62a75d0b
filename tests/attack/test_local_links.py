"""Attacks on links inside a machine: processes without keys, a roster that lies, and what members of a group can read."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from ringfence import keys
from ringfence.errors import RingfenceError
from ringfence.link.hello import CONFIRM_BYTES, HELLO_BYTES, REPLY_BYTES, Lane, LinkHello, write_hello
from ringfence.link.seal import Opener, Sealer
from ringfence.link.unsealed import LocalOpener, LocalSealer
from ringfence.session.join import listener
from ringfence.transport import tcp
from ringfence.transport.tcp import TcpNetwork
from ringfence.transport.unix import LocalNetwork
from tests.attack.test_shared_memory import ELEMENTS, SIDES, newly_shared, shared_files, use_memory
from tests.integration.netns import ADDRESSES, Hosts
from tests.integration.test_faults import raised
from tests.limits import FAR, HANG
from tests.pool import IN_SHARED_MEMORY, Pool, values

PROCESS: Final = os.getpid()  # the gates of two clones may run at the same time
NAME: Final = "attack"  # of the memory that a peer without keys sends

pytestmark = pytest.mark.processes


def local_name(rank: int) -> bytes:
    return keys.local_socket(dist.group.WORLD._session.engine.keys.session_key, rank)


def memfd(size: int = keys.SEGMENT_BYTES) -> int:
    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


# -- other users -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("Another user of the machine has few of its connections looked at, and delays no other for long.")
def test_connections_of_another_user_are_accepted_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 at once, and then none for a while: a flood costs little, and a worker in the queue comes to its turn."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(tcp, "time", clock)
    local = LocalNetwork(abstract, 0, ((0, 1),))
    seen: list[bool] = []
    own = [False] * 100 + [True]
    monkeypatch.setattr(LocalNetwork, "_is_this_user", lambda *_: seen.append(own[len(seen)]) or seen[-1])
    accepted: list[socket.socket] = []
    network = TcpNetwork(None, (), local=local)
    network.serve(lambda stream, host, is_local: accepted.append(stream), lambda error: pytest.fail(str(error)))
    with contextlib.ExitStack() as stack:
        stack.callback(network.close)
        for _ in own:
            stack.enter_context(dialled := socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            dialled.connect(abstract(0))
        found = []
        for _ in range(4):
            for _ in range(3):
                network.poll(0)
            found.append((len(seen), len(accepted)))
            clock.now += tcp._LOCAL_PAUSE
        assert found == [(32, 0), (64, 0), (96, 0), (101, 1)]
        accepted[0].close()


# -- names of sockets --------------------------------------------------------------------------------------------------


def abstract(rank: int) -> bytes:
    return b"\0ringfence test of names %d %d" % (PROCESS, rank)


def listening(pipe: Connection) -> None:
    network = LocalNetwork(abstract, 1, ((0, 1),))
    pipe.send(network.listener is not None)
    pipe.recv()


def test_a_killed_worker_leaves_no_socket_behind() -> None:
    """Abstract sockets have no file: no stale path is left, and another process can take the name."""
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()
    child = context.Process(target=listening, args=(theirs,), daemon=True)
    child.start()
    assert pipe.recv()
    connection = LocalNetwork(abstract, 0, ((0, 1),)).dial(1)
    assert connection is not None
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join(HANG)
    connection.close()
    assert LocalNetwork(abstract, 0, ((0, 1),)).dial(1) is None
    assert LocalNetwork(abstract, 1, ((0, 1),)).listener is not None


def name_of_this_session() -> bytes:
    return local_name(0)


def test_a_name_of_an_earlier_session_is_not_dialled(pool: Pool) -> None:
    names = {name for _ in range(2) for name in pool.check(name_of_this_session, 2, IN_SHARED_MEMORY, renew=True)}
    assert len(names) == 2


# -- a process of the same user, without keys --------------------------------------------------------------------------


class Squatter(threading.Thread):
    """Listens at the name of a worker and answers with random bytes. Collects what a dialler sends."""

    def __init__(self, name: bytes) -> None:
        super().__init__(daemon=True)
        self.received = b""
        self.descriptors: list[int] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(name)
        self._listener.listen()
        self.start()

    def run(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(HANG)
        with connection, contextlib.suppress(OSError):
            while len(self.received) < HELLO_BYTES:
                self._read(connection)
            connection.sendall(os.urandom(REPLY_BYTES))
            while self._read(connection):
                pass

    def _read(self, connection: socket.socket) -> int:
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 16)
        self.received += data
        self.descriptors += descriptors
        return len(data)


def dial_a_squatter() -> tuple[int, int] | str:
    """Worker 0 dials worker 1, whose name a process without keys has taken. Return the error, or what that process got."""
    dist.barrier()
    squatter = None
    if dist.get_rank() == 1:
        dist.group.WORLD._session.network._local.listener.close()
        squatter = Squatter(local_name(1))
    dist.barrier()
    error = ""
    try:
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(ELEMENTS), group=group)
    except RingfenceError as raised_here:
        error = str(raised_here)
    if squatter is None:
        return error
    squatter.join(HANG)
    return len(squatter.received), len(squatter.descriptors)


@pytest.mark.promise("A process that does not hold a worker's key gets neither its shared memory nor a frame.")
def test_a_process_of_the_same_user_at_a_workers_name_gets_a_hello_only(pool: Pool) -> None:
    with pool.fresh() as workers:
        error, got = workers.check(dial_a_squatter, 2, IN_SHARED_MEMORY)
    assert "does not hold its key" in error
    assert got == (HELLO_BYTES, 0)


def open_memory() -> set[str]:
    """What this process has open of memory with the attack's name."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {name for name in found if f"memfd:{NAME}" in name}


def send_descriptors(together: bool) -> bool:
    """Worker 0 dials worker 1 with a hello that authenticates, then sends descriptors with a confirm that does not.

    Return whether the acceptor closed the connection and has none of them open.
    """
    keys.LINK_HELLO_SECONDS = FAR  # type: ignore[misc]  # not because the connection was silent
    dist.barrier()
    if dist.get_rank() == 0:
        engine = dist.group.WORLD._session.engine
        group = next(iter(engine.communicators.active))
        hello = LinkHello(0, 1, Lane.COLLECTIVE_LOCAL, group, os.urandom(keys.NONCE_BYTES))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(ConnectionError):
            connection.settimeout(HANG)
            connection.connect(local_name(1))
            connection.sendall(write_hello(engine.keys.session_key, hello))
            answered = b""
            while len(answered) < REPLY_BYTES:
                answered += connection.recv(REPLY_BYTES - len(answered))
            if together:
                socket.send_fds(connection, [bytes(CONFIRM_BYTES)], [memfd()] * 8)
            else:
                for _ in range(100):
                    socket.send_fds(connection, [b"x"], [memfd()])
            assert not connection.recv(1)  # closed
    dist.barrier()
    return dist.get_rank() == 0 or not open_memory()


@pytest.mark.promise("A process that does not hold a worker's key gets neither its shared memory nor a frame.")
@pytest.mark.parametrize("together", [True, False], ids=["with a confirm", "with each byte"])
def test_descriptors_of_an_unauthenticated_dialler_are_closed(pool: Pool, together: bool) -> None:
    with pool.fresh() as workers:
        assert all(workers.check(send_descriptors, 2, IN_SHARED_MEMORY, (together,)))
        workers.check(use_memory, 2, IN_SHARED_MEMORY)


# -- a roster that lies ------------------------------------------------------------------------------------------------


def believe_that_all_are_here() -> None:
    """From now on the roster lists all workers at one host."""
    listener.spread = lambda hosts: (tuple(range(len(list(hosts)))),)  # type: ignore[attr-defined]


def sums_and_links() -> tuple[set[tuple[str, str]], dict[int, tuple[bool, str, str]]]:
    """Return the memory that this worker has mapped, and of each link whether it is local, its sealer and its opener."""
    for _ in range(2):
        tensor = torch.ones(ELEMENTS)
        dist.all_reduce(tensor)
        assert bool((tensor == 4).all())
    gathered = torch.empty(4 * ELEMENTS)
    dist.all_gather_into_tensor(gathered, torch.full((ELEMENTS,), float(dist.get_rank())))
    assert bool((gathered.view(4, -1) == torch.arange(4.0)[:, None]).all())
    (communicator,) = dist.group.WORLD._session.engine.communicators.active.values()
    assert len(communicator.machines) == 1  # it uses the schedules of one machine
    links = {
        link.worker: (link.is_local, type(link.sealer).__name__, type(link.opener).__name__)
        for link in communicator.links()
        if link.open
    }
    return shared_files(), links


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as both:
        yield both


@pytest.mark.promise("A link over the network is always sealed, whatever the roster says.")
@pytest.mark.promise("A worker of another user, network namespace or machine shares no memory with this one.")
def test_a_roster_that_puts_two_machines_into_one_unseals_nothing(hosts: Hosts) -> None:
    environments = [{"RINGFENCE_INTERFACE": ADDRESSES[side]} for side in SIDES]
    with Pool([hosts.prefix(side) for side in SIDES]) as pool:
        pool.check(believe_that_all_are_here, 4, None)
        values(pool.join(IN_SHARED_MEMORY, 4, env=environments))
        found: list[Any] = values(pool.start(sums_and_links, 4).wait(HANG))
    near = (True, LocalSealer.__name__, LocalOpener.__name__)
    far = (False, Sealer.__name__, Opener.__name__)
    for rank, (_, links) in enumerate(found):
        assert len(links) == 3
        assert links == {worker: near if SIDES[worker] == SIDES[rank] else far for worker in links}
    memory = [mapped for mapped, _ in found]
    assert memory[0] & memory[1] and memory[2] & memory[3]
    assert not (memory[0] | memory[1]) & (memory[2] | memory[3])


# -- who can read which memory -----------------------------------------------------------------------------------------


def share_in_a_group() -> set[tuple[str, str]]:
    before = shared_files()
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.all_reduce(torch.ones(ELEMENTS), group=group)
    dist.barrier()
    return shared_files() - before


@pytest.mark.promise("Only members of a group map its shared memory.")
def test_workers_outside_a_group_do_not_map_its_memory(pool: Pool) -> None:
    pool.check(newly_shared, 3, IN_SHARED_MEMORY, renew=True)
    first, second, outside = pool.check(share_in_a_group, 3, IN_SHARED_MEMORY)
    assert first & second and not outside & (first | second)


def contains(pattern: bytes) -> bool:
    """Whether memory that other workers share with this one, which it can read only, contains a pattern."""
    with Path("/proc/self/mem").open("rb") as memory:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "memfd:ringfence" in line and line.split()[1].startswith("r-"):
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                memory.seek(start)
                if pattern in memory.read(end - start):
                    return True
    return False


def scatter_and_look() -> bool:
    """Worker 0 scatters; return whether worker 2 finds the part of worker 1."""
    use_memory()
    parts = [torch.full((ELEMENTS,), 1000.5 + rank) for rank in range(3)] if dist.get_rank() == 0 else None
    mine = torch.empty(ELEMENTS)
    dist.scatter(mine, parts)
    assert bool((mine == 1000.5 + dist.get_rank()).all())
    return dist.get_rank() == 2 and contains(struct.pack("<f", 1001.5) * 1024)


@pytest.mark.promise("A member of a group can read what others of its machine send each other in that group.")
def test_a_member_reads_what_a_worker_sends_to_another_member(pool: Pool) -> None:
    assert pool.check(scatter_and_look, 3, IN_SHARED_MEMORY, renew=True) == [False, False, True]


# -- calls that differ -------------------------------------------------------------------------------------------------


def differ() -> None:
    use_memory()
    dist.all_reduce(torch.ones(ELEMENTS + 65536 * dist.get_rank()))


def test_calls_that_differ_are_named_also_in_shared_memory(pool: Pool) -> None:
    with pool.fresh() as workers:
        results = raised(workers.run(differ, 2, IN_SHARED_MEMORY), {"MismatchError", "AbortedError"})
    assert any(
        f"{ELEMENTS} x float32" in result.message and f"{ELEMENTS + 65536} x" in result.message for result in results
    )
