"""Ends of requests, groups and sessions: nothing is dialled, read or written afterwards, and sent data still arrives."""

from __future__ import annotations

import os
import socket
from functools import partial
from typing import Any

import pytest
import torch

from ringfence.dataplane.request import Request
from ringfence.errors import AbortedError, CollectiveTimeoutError, PeerLostError, ProtocolError
from ringfence.keys import LINK_DIALS, SUSPICION_SECONDS
from ringfence.link.frames import Call
from ringfence.link.hello import LinkHello, LinkSecrets
from ringfence.runtime.control import Abort
from ringfence.runtime.engine import Engine
from ringfence.runtime.progress import ProgressLoop, _Waker
from ringfence.transport.tcp import TcpNetwork
from tests.key_audit import fingerprints, keys_held
from tests.memory_cluster import World, all_reduce, broadcast
from tests.unit.runtime_calls import transfer
from tests.unit.test_runtime_failures import begin, settle


def drive(world: World, times: int = 300) -> None:
    for _ in range(times):
        for engine in world.engines:
            engine.run_ready()
        world.wires.deliver()


def test_no_link_is_dialled_after_the_session_failed() -> None:
    """It would read the tensor of a call that has raised, which the caller may have changed."""
    world = World(3)
    world.run(
        [
            world.submit(world.communicators[rank], broadcast(world.communicators[rank], torch.ones(4)))
            for rank in range(3)
        ]
    )
    seen: list[Any] = []
    accept = world.engines[1].acceptor.accept

    def hang_up_on_the_first(stream: Any, address: str) -> None:
        seen.append(address)
        if len(seen) == 1:
            stream.close()
        else:
            accept(stream, address)

    world.wires.serve(1, hang_up_on_the_first)
    tensors = [torch.full((1000,), float(rank)) for rank in range(3)]
    deadlines = (50.0, 50.0, 5.0)
    calls = [
        world.submit(world.communicators[rank], broadcast(world.communicators[rank], tensors[rank], 2, deadlines[rank]))
        for rank in range(3)
    ]
    drive(world)
    world.engines[2].edges = []  # no neighbour receives the abort
    world.now = 5.001
    world.engines[2].expire()  # the next dial and the deadline are due in the same moment
    assert isinstance(calls[2].error, CollectiveTimeoutError)
    tensors[2].fill_(777.0)  # its caller goes on with it
    drive(world)
    assert len(seen) == 1 and not calls[1].done and not (tensors[1] == 777).any()


def test_an_interrupted_failure_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2)
    world.run(
        [
            world.submit(world.communicators[rank], all_reduce(world.communicators[rank], torch.ones(9)))
            for rank in range(2)
        ]
    )
    waiting = world.submit(world.communicators[0], all_reduce(world.communicators[0], torch.ones(9)))
    engine = world.engines[0]
    engine.run_ready()
    (edge,) = engine.edges
    send = edge.send
    monkeypatch.setattr(edge, "send", lambda message: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.fail(AbortedError("first"))
    assert not any(link.open for link in world.communicators[0].links()), (
        "nothing may be read into memory that is given back"
    )
    told: list[Any] = []
    monkeypatch.setattr(edge, "send", lambda message: (told.append(message), send(message)))
    engine.fail(AbortedError("second"))
    assert waiting.done and str(waiting.error) == "first"
    assert [type(message) for message in told] == [Abort]


@pytest.mark.parametrize("when", ["at the end of a call", "at the end of all calls"])
def test_a_request_whose_completion_is_interrupted_completes(when: str) -> None:
    world = World(2)
    calls = [all_reduce(world.communicators[rank], torch.ones(4)) for rank in range(2)]
    more = all_reduce(world.communicators[0], torch.ones(4))
    told: list[str] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    if when == "at the end of a call":
        calls[0].copy_out = interrupt
    else:
        calls[0].when_done(interrupt)
    calls[0].when_done(lambda: told.append("first"))
    more.when_done(lambda: told.append("second"))
    for rank in range(2):
        world.submit(world.communicators[rank], calls[rank])
    world.submit(world.communicators[0], more)
    engine = world.engines[0]
    if when == "at the end of a call":
        with pytest.raises(KeyboardInterrupt):
            world.run([*calls, more])
    else:
        with pytest.raises(KeyboardInterrupt):
            engine.fail(AbortedError("interrupted"))
    engine.fail(AbortedError("interrupted"))  # as the progress loop does
    assert all(call.done and call.block(0) and str(call.error) == "interrupted" for call in (calls[0], more))
    assert told == ["first", "second"] and not engine.requests.unfinished


def test_an_interrupted_submission_fails_with_the_session() -> None:
    """Another thread may wait for it."""
    world = World(2)
    engine, call, times = world.engines[0], all_reduce(world.communicators[0], torch.ones(4)), 0
    loop = ProgressLoop(engine, TcpNetwork(socket.create_server(("127.0.0.1", 0)), []), [])

    def submit() -> None:
        nonlocal times
        times += 1
        if times == 1:
            raise KeyboardInterrupt
        engine.submit(world.communicators[0], call)

    loop.call_soon_threadsafe(submit)
    with pytest.raises(KeyboardInterrupt):
        loop.wait(Request(Call(0), float("inf")))  # drives the work of other threads, too
    assert call.block(20) and isinstance(call.error, AbortedError) and times == 2
    loop.leave(0)


def test_work_queued_behind_a_failing_call_fails_with_it() -> None:
    world = World(1)
    engine, communicator = world.engines[0], world.communicators[0]
    loop = ProgressLoop(engine, TcpNetwork(socket.create_server(("127.0.0.1", 0)), []), [])
    first, second = (all_reduce(communicator, torch.ones(4), 1e9) for _ in range(2))

    def before() -> None:
        raise RuntimeError("setStorage: its memory was freed")  # as torch says of a tensor that FSDP has sharded again

    first.copy_in = before
    for call in (first, second):
        loop.call_soon_threadsafe(partial(engine.submit, communicator, call))
    loop.wake()  # one wake for both, as if two threads submitted at once
    assert first.block(20) and "its memory was freed" in str(first.error)
    assert second.block(20) and second.error is engine.failure
    loop.leave(0)
    assert not loop._submitted, "they would keep the tensors alive"


def test_a_destroyed_group_delivers_what_it_reported_as_sent() -> None:
    world = World(2, capacity=200_000)
    tensors = [torch.full((1_000_000,), float(rank + 1)) for rank in range(2)]
    sent, received = (
        world.submit(world.communicators[rank], broadcast(world.communicators[rank], tensors[rank], 0, 50.0))
        for rank in range(2)
    )
    while not sent.done:
        world.engines[0].run_ready()
        if not sent.done:
            world.wires.deliver()
            world.engines[1].run_ready()
    assert world.engines[0].blocked, "part of the last frame waits for the kernel"
    world.engines[0].remove_communicator(world.communicators[0])
    drive(world)
    assert received.done and received.error is None and (tensors[1] == 1).all()
    assert not world.engines[0].blocked and not any(link.open for link in world.communicators[0].links())


def test_pending_requests_of_a_destroyed_group_fail() -> None:
    world = World(2)
    other = world.add_communicator("other", (0, 1))
    pending = world.submit(other[0], all_reduce(other[0], torch.ones(9)))
    settle(world)
    world.engines[0].remove_communicator(other[0])
    assert isinstance(pending.error, ProtocolError) and "destroyed" in str(pending.error)
    world.now = 1e6
    world.engines[0].expire()
    assert world.engines[0].failure is None


def test_a_worker_that_closes_every_dial_is_named() -> None:
    world = World(2)
    world.wires.serve(1, lambda stream, address: stream.close())
    waiting = begin(world, 0)
    for _ in range(LINK_DIALS + 1):
        settle(world)
        world.wait(SUSPICION_SECONDS)
    assert isinstance(waiting.request.error, PeerLostError) and "worker 1" in str(waiting.request.error)


def test_a_closed_waker_writes_nothing(tmp_path: Any) -> None:
    waker = _Waker()
    number = waker.descriptor
    waker.close()
    file = os.open(tmp_path / "checkpoint", os.O_CREAT | os.O_WRONLY)
    if file != number:
        os.dup2(file, number)
    waker.wake()  # the descriptor number has been reused
    assert (tmp_path / "checkpoint").read_bytes() == b""
    for descriptor in {file, number}:
        os.close(descriptor)


def test_a_forked_child_holds_no_key() -> None:
    world = World(2)
    world.run(
        [
            world.submit(world.communicators[rank], all_reduce(world.communicators[rank], torch.ones(9)))
            for rank in range(2)
        ]
    )
    engine = world.engines[0]
    engine.forget()  # what the fork hook calls in the child
    assert engine.keys.session_key.reveal() == b"" and not engine.communicators.all() and not engine.keys._shared
    assert engine.keys._private_key is None


def test_a_destroyed_group_gives_up_after_the_drain_timeout() -> None:
    """It waits for the other members for a limited time; then the run continues without the group."""
    world = World(2)
    part = world.add_communicator("part", range(2))
    lonely = world.submit(part[0], all_reduce(part[0], torch.ones(10), deadline=1000.0))
    world.engines[0].destroy_communicator(part[0])
    world.run([lonely])
    assert not lonely.done
    late = world.submit(part[0], all_reduce(part[0], torch.ones(10)))
    assert isinstance(late.error, ProtocolError) and "was destroyed" in str(late.error)
    world.wait(world.engines[0].drain_timeout)
    assert isinstance(lonely.error, ProtocolError) and "was pending when its group was destroyed" in str(lonely.error)
    assert all(engine.failure is None for engine in world.engines)


def test_a_member_that_needs_a_destroyed_group_gets_an_error() -> None:
    world = World(2)
    part = world.add_communicator("part", range(2))
    world.run([world.submit(part[rank], all_reduce(part[rank], torch.ones(10))) for rank in range(2)])
    needy = world.submit(part[1], all_reduce(part[1], torch.ones(10)))
    world.engines[0].destroy_communicator(part[0])
    world.run([needy])
    assert isinstance(needy.error, PeerLostError)
    assert "worker 0 left the run or destroyed group 'part' while all_reduce #2" in str(needy.error)


def test_a_destroyed_group_is_removed_after_its_last_collective() -> None:
    world = World(2)
    part = world.add_communicator("part", range(2))
    tensors = [torch.ones(10), torch.ones(10)]
    first = world.submit(part[0], all_reduce(part[0], tensors[0]))
    world.engines[0].destroy_communicator(part[0])
    world.run([first])
    second = world.submit(part[1], all_reduce(part[1], tensors[1]))
    world.run([first, second, transfer(torch.ones(1))])
    assert first.error is None and second.error is None
    assert all((tensor == 2).all() for tensor in tensors)
    assert part[0].removed and not world.engines[0].busy()


def end_by(ending: str, world: World, rank: int = 0) -> None:
    engine, communicator = world.engines[rank], world.communicators[rank]
    match ending:
        case "failure":
            engine.fail(AbortedError("enough"))
        case "leaving":
            engine.leave()
        case "fork":
            engine.forget()
        case "removal":
            engine.remove_communicator(communicator)


@pytest.mark.promise("A worker that left a session, or saw it fail, holds no key that opens a recorded link.")
@pytest.mark.parametrize("ending", ["failure", "leaving", "fork", "removal"])
def test_objects_of_an_ended_session_hold_no_key(ending: str) -> None:
    """A process group, a request or interrupted C code may refer to such objects: they exist, without keys."""
    world = World(3)
    calls = [
        all_reduce(world.communicators[rank], torch.ones(600_000)) for rank in range(3)
    ]  # sealed once and forwarded, too
    world.run([world.submit(world.communicators[rank], call) for rank, call in enumerate(calls)])
    communicator = world.communicators[0]
    links = [link for link in communicator.links() if link.open]
    assert links and communicator.origin._ciphers
    end_by(ending, world)
    room = memoryview(bytearray(26))
    for half in (half for link in links for half in (link.sealer, link.opener)):
        assert not any(hasattr(half, name) for name in ("_secret", "_cipher", "_iv"))
    for link in links:
        with pytest.raises(ProtocolError):
            link.sealer.seal_into(b"header", b"ten bytes.", room)
        with pytest.raises(ProtocolError):
            link.opener.open_into(b"header", bytes(26), room[:10])
    assert communicator.origin._instance is None and not communicator.origin._ciphers
    with pytest.raises(ProtocolError):
        communicator.origin.seal_into(0, b"header", b"ten bytes.", room)
    with pytest.raises(ProtocolError):
        communicator.origin.open_into(1, 0, b"header", bytes(26), room[:10])
    assert (world.engines[0].keys._private_key is None) == (ending != "removal")
    drive(world, 10)


def record_secrets(engine: Engine, into: list[LinkSecrets]) -> None:
    """Record the secrets of every connection that this engine opens or accepts."""
    confirm, accept = engine.keys.confirm, engine.keys.accept

    def noting_confirm(hello: LinkHello, received: bytes) -> tuple[bytes, LinkSecrets]:
        found, secrets = confirm(hello, received)
        into.append(secrets)
        return found, secrets

    def noting_accept(hello: LinkHello, nonce: bytes, received: bytes) -> LinkSecrets:
        into.append(accept(hello, nonce, received))
        return into[-1]

    engine.keys.confirm, engine.keys.accept = noting_confirm, noting_accept  # type: ignore[method-assign]


@pytest.mark.promise("A worker that left a session, or saw it fail, holds no key that opens a recorded link.")
@pytest.mark.slow
@pytest.mark.parametrize(
    "ending",
    ["failure", pytest.param("leaving", marks=pytest.mark.nightly), pytest.param("fork", marks=pytest.mark.nightly)],
)
def test_no_link_secret_remains_in_memory_after_the_session(ending: str) -> None:
    """Nonces are sent in plaintext: the shared X25519 secret and the session key would decrypt a recorded link."""
    world = World(2)
    secrets: list[LinkSecrets] = []
    record_secrets(world.engines[0], secrets)
    communicators = [world.communicators, world.add_communicator("other", range(2))]
    calls = [all_reduce(communicator[rank], torch.ones(9)) for communicator in communicators for rank in range(2)]
    world.run([world.submit(communicators[place // 2][place % 2], call) for place, call in enumerate(calls)])
    for engine in world.engines:
        engine.remove_communicator(communicators[1][engine.rank])
    own = world.engines[0]
    roots = fingerprints([own.keys.session_key.reveal(), *own.keys._shared.values()])
    links = fingerprints(half.reveal() for each in secrets for half in (each.forth, each.back))
    secrets.clear()
    assert len(roots) == 2 and len(links) >= 4
    assert keys_held(roots)["bytes"] >= 2, "until the session ends, what links derive from is there"
    for rank in range(2):  # both endpoints are in this process and have the same keys
        end_by(ending, world, rank)
    drive(world, 10)
    assert keys_held(roots | links)["bytes"] == 0
    assert calls and communicators  # these objects are still referenced and hold no key


@pytest.mark.parametrize("ending", ["failure", "leaving", "fork", "removal"])
def test_an_aborted_opening_leaves_no_instance_secret(ending: str) -> None:
    world = World(2)
    waiting = world.submit(world.communicators[0], all_reduce(world.communicators[0], torch.ones(9)))
    world.engines[0].run_ready()
    assert any(world.communicators[0]._drawn)
    end_by(ending, world)
    assert not any(world.communicators[0]._drawn)
    drive(world, 10)
    assert ending == "fork" or waiting.error is not None


def test_unsent_data_does_not_keep_a_link_of_a_leaver_open() -> None:
    world = World(2, capacity=200_000)
    calls = [broadcast(world.communicators[rank], torch.ones(1_000_000), 0, 50.0) for rank in range(2)]
    sent, _ = (world.submit(world.communicators[rank], call) for rank, call in enumerate(calls))
    while not sent.done:
        world.engines[0].run_ready()
        if not sent.done:
            world.wires.deliver()
            world.engines[1].run_ready()
    assert world.engines[0].blocked
    links = world.communicators[0].links()
    world.engines[0].leave()
    assert not world.engines[0].blocked and all(link.stream is None for link in links)
