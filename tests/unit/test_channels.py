"""Channels: how a collective is cut, what all ranks agree on, and engines with several channels in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from random import Random
from struct import pack
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringfence.collectives import Collective, Thresholds
from ringfence.collectives.passes import OF_ONE_TENSOR, PASS_BYTES, SEGMENTS_PER_PASS, in_pass, passes
from ringfence.config.cores import default_channels, usable_cores
from ringfence.config.interfaces import speed_of
from ringfence.config.settings import Settings
from ringfence.dataplane.request import Request
from ringfence.errors import AuthenticationError, ConfigurationError, ProtocolError, RingfenceError
from ringfence.keys import (
    CHANNEL_LIMIT,
    DIGEST_BYTES,
    LINK_HELLO_SECONDS,
    NONCE_BYTES,
    SUSPICION_SECONDS,
    Secret,
    group_secret,
)
from ringfence.link.frames import Call
from ringfence.link.hello import Lane, LinkHello, LinkSecrets
from ringfence.link.segments import segment_count
from ringfence.machines import Machines
from ringfence.runtime.channels import ChannelEngine
from ringfence.runtime.engine import Engine
from ringfence.runtime.events import Network
from ringfence.runtime.link_keys import LinkKeys
from ringfence.runtime.links import Arrival
from ringfence.session import session
from ringfence.session.session import Session, _check_channels, _proposed
from tests.in_memory_network import Pipe
from tests.memory_cluster import World, all_reduce, broadcast

SMALL = 1 << 16  # channel_bytes of the clusters below


class Channelled(World):
    """A cluster in which every engine has further channels."""

    def __init__(self, size: int, channels: int, machines: Machines = (), **options: Any) -> None:
        self.further: list[ChannelEngine] = []
        self._count = channels
        self._machines = machines
        table = options.pop("table", Thresholds())
        super().__init__(size, table=replace(table, channels=channels, channel_bytes=SMALL), **options)
        self.engines += self.further  # the test drives them all

    def _networks(self, link_keys: Any) -> list[Network]:
        networks = [self.wires.network(rank) for rank in range(len(link_keys))]
        for network in networks:
            network.machines = self._machines
        return list(networks)

    def _serve(self, rank: int, engine: Engine) -> None:
        super()._serve(rank, engine)
        made = [ChannelEngine(engine, number, self.wires.network(rank)) for number in range(1, self._count)]
        engine.open_channels(made)
        self.further += made

    def settle(self) -> None:
        """Drive until nothing moves."""
        self.run([Request(Call(0), float("inf"))])

    def sent(self, rank: int) -> list[int]:
        """The payload that a worker has sent on each channel."""
        engines = [self.engines[rank], *(each for each in self.further if each.rank == rank)]
        return [sum(link.payload_sent for link in each.communicators.links()) for each in engines]


# -- the cut ---------------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(Collective),
    st.integers(0, 80 << 20),
    st.integers(1, 20_000),
    st.integers(1, CHANNEL_LIMIT),
    st.integers(0, 4 << 20),
)
def test_passes_cover_every_byte_once_on_alternating_channels(
    kind: Collective, longest: int, size: int, channels: int, single: int
) -> None:
    number, each, used = passes(kind, size, longest, channels, single)
    assert (number - used) * each < max(longest, 1) <= number * each
    assert number % used == 0 and each % 64 == 0
    if kind in (Collective.ALL_TO_ALL, Collective.BARRIER, Collective.GROUP_OPENING):
        assert (number, used) == (1, 1)
        return
    assert used == (channels if longest > single else 1)
    parts = 1 if kind in OF_ONE_TENSOR else size + 1
    assert parts * each <= PASS_BYTES  # the bound of memory holds
    assert segment_count(each) <= SEGMENTS_PER_PASS


@given(st.integers(0, 3000), st.integers(1, 9), st.integers(1, 900).map(lambda n: 64 * n), st.booleans())
def test_the_passes_of_a_buffer_are_all_of_it(elements: int, parts: int, each: int, one_tensor: bool) -> None:
    """Of one tensor, a pass is a range that is divided; otherwise it is a range of every part."""
    kind = Collective.ALL_REDUCE if one_tensor else Collective.ALL_GATHER
    tensor = memoryview(bytearray(Random(1).randbytes(4 * elements * (1 if one_tensor else parts))))
    found = [bytearray() for _ in range(1 if one_tensor else parts)]
    longest = len(tensor) // len(found)
    for start in range(0, max(longest, 1), each):
        for index, part in enumerate(in_pass(kind, [tensor], parts, 4, start, start + each)):
            assert len(part) % 4 == 0
            found[0 if one_tensor else index] += part
    assert b"".join(found) == tensor


# -- agreement -------------------------------------------------------------------------------------------------------------


@given(st.integers(1, CHANNEL_LIMIT), st.integers(0, 2**64 - 1))
def test_a_table_round_trip(channels: int, single: int) -> None:
    table = Thresholds(channels=channels, channel_bytes=single)
    assert table.to_bytes() == pack(">B12Q", 4, *astuple(table))
    assert Thresholds.from_bytes(table.to_bytes()) == table


@pytest.mark.parametrize("channels", [0, CHANNEL_LIMIT + 1, 2**64 - 1])
def test_a_table_with_a_number_that_no_link_has_is_refused(channels: int) -> None:
    with pytest.raises(ProtocolError, match="a link has 1 to 8"):
        Thresholds.from_bytes(replace(Thresholds(), channels=channels).to_bytes())


def test_a_table_of_another_version_is_refused() -> None:
    encoded = Thresholds().to_bytes()
    with pytest.raises(ProtocolError, match="version 1; this worker supports 4"):
        Thresholds.from_bytes(b"\1" + encoded[1:])
    with pytest.raises(ProtocolError, match="has 97 bytes, this one has 65"):
        Thresholds.from_bytes(b"\1" + encoded[1:65])


@pytest.mark.parametrize("value", ["0", "9", "two", "-1", "1.5", " 2", "1000000000000"])
def test_a_setting_that_no_link_has_is_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match=r"RINGFENCE_CHANNELS=.*: write a number from 1 to 8"):
        Settings.without_credentials({"RINGFENCE_CHANNELS": value})


def test_the_setting_of_rank_0_is_the_tables() -> None:
    table = _proposed(Session.table, Settings.without_credentials({"RINGFENCE_CHANNELS": "3"}), 2)
    assert table == Thresholds(channels=3)
    for same in ({}, {"RINGFENCE_CHANNELS": ""}, {"RINGFENCE_CHANNELS": "3"}):
        _check_channels(table, Settings.without_credentials(same))
    with pytest.raises(ConfigurationError, match="RINGFENCE_CHANNELS is 2 here, and rank 0 gave the run 3"):
        _check_channels(table, Settings.without_credentials({"RINGFENCE_CHANNELS": "2"}))


@pytest.mark.parametrize(
    ("cores", "workers", "mbit", "channels"),
    [(8, 2, 100_000, 2), (8, 2, None, 2), (8, 2, 10_000, 1), (7, 2, 100_000, 1), (3, 1, None, 1), (256, 1, 400_000, 2)],
)
def test_without_a_setting_cores_and_the_link_decide(cores: int, workers: int, mbit: int | None, channels: int) -> None:
    assert default_channels(cores, workers, mbit) == channels


@pytest.mark.parametrize(
    ("here", "world", "channels"), [("1", 8, 2), ("2", 8, 1), ("", 1, 2), ("", 2, 1), ("0", 2, 1), ("many", 2, 1)]
)
def test_the_launcher_says_how_many_workers_share_the_cores(
    here: str, world: int, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    monkeypatch.setattr(session, "usable_cores", lambda: 4)
    assert _proposed(Session.table, Settings(host="127.0.0.1"), world) == Thresholds(channels=channels)


def test_a_containers_limit_leaves_fewer_cores(tmp_path: Path) -> None:
    every = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == every
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:cpu:/\n0::/pod/one\n")
    (tmp_path / "sys/fs/cgroup/pod/one").mkdir(parents=True)
    for limit, cores in (("max 100000", every), ("100000 100000", 1), ("50000 100000", 1), ("9900000 100000", every)):
        (tmp_path / "sys/fs/cgroup/pod/one/cpu.max").write_text(limit + "\n")
        assert usable_cores(tmp_path) == cores


def test_the_speed_of_a_link_is_that_of_its_interface(tmp_path: Path) -> None:
    (tmp_path / "lo").mkdir()
    assert speed_of("127.0.0.1", tmp_path) is None
    for text, speed in (("25000\n", 25_000), ("-1\n", None), ("fast", None)):
        (tmp_path / "lo/speed").write_text(text)
        assert speed_of("127.0.0.1", tmp_path) == speed
    assert speed_of("192.0.2.1", tmp_path) is None


# -- engines in memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "channels"), [(2, 2), (2, 8), (3, 2), (5, 3)])
def test_an_all_reduce_over_channels(size: int, channels: int) -> None:
    world = Channelled(size, channels)
    tensors = [torch.arange(600_001, dtype=torch.float64) * (rank + 1) for rank in range(size)]
    expected = sum((each.clone() for each in tensors), torch.zeros(600_001, dtype=torch.float64))
    requests = [
        world.submit(world.communicators[rank], all_reduce(world.communicators[rank], tensors[rank]))
        for rank in range(size)
    ]
    world.run(requests)
    assert all(request.done and request.error is None for request in requests)
    assert all(torch.equal(tensor, expected) for tensor in tensors)
    for rank in range(size):
        sent = world.sent(rank)
        assert len(sent) == channels and max(sent) < 1.5 * min(sent)
        peers = world.engines[rank].counters().peers
        assert sum(peer.payload_sent for peer in peers) == sum(sent)


def test_each_channel_has_keys_and_an_instance_of_its_own() -> None:
    world = Channelled(2, 3)
    for communicator in world.communicators.values():
        world.submit(communicator, all_reduce(communicator, torch.ones(200_000)))
    world.settle()
    engines = [world.engines[0], *(each for each in world.further if each.rank == 0)]
    groups = [next(iter(engine.communicators.active.values())) for engine in engines]
    assert len({group.instance for group in groups}) == 3
    assert len({group.origin._instance.reveal() for group in groups if group.origin._instance}) == 3
    made: list[Any] = [link.sealer for group in groups for link in group.links()]
    sealers = [each._secret.reveal() for each in made]
    assert len(set(sealers)) == len(sealers) == 6
    assert {link._hello.channel for group in groups for link in group.outboxes.values()} == {0, 1, 2}


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), st.integers(0, 7), st.integers(0, 7))
def test_channels_never_share_an_instance_secret(drawn: bytes, digest: bytes, one: int, other: int) -> None:
    """Whatever members contribute, also if it is the same on both channels."""
    session = Secret(bytes(32))
    same = group_secret(session, drawn, digest, one) == group_secret(session, drawn, digest, other)
    assert same == (one == other)


def test_a_small_collective_uses_channel_0_only() -> None:
    world = Channelled(2, 2)
    requests = [world.submit(each, all_reduce(each, torch.ones(1000))) for each in world.communicators.values()]
    world.run(requests)
    assert all(request.done for request in requests)
    assert world.sent(0)[1] == 0 and not world.further[0].communicators.links()


def test_members_on_one_machine_have_one_channel() -> None:
    world = Channelled(3, 2, machines=((0, 1), (2,)))
    assert not any(communicator.channels for communicator in world.communicators.values())
    apart = world.add_communicator("apart", (0, 2))
    assert all(len(communicator.channels) == 1 for communicator in apart.values())


def test_a_removed_group_is_refused_on_every_channel() -> None:
    world = Channelled(2, 2)
    gone = world.add_communicator("gone", (0, 1))
    world.settle()
    world.engines[1].remove_communicator(gone[1])
    request = world.submit(gone[0], broadcast(gone[0], torch.ones(200_000)))
    world.run([request])
    assert "destroyed group 'gone'" in str(request.error)


def test_a_group_that_is_removed_leaves_no_pass_behind() -> None:
    world = Channelled(2, 2)
    world.run([world.submit(each, all_reduce(each, torch.ones(200_000))) for each in world.communicators.values()])
    request = world.submit(world.communicators[0], all_reduce(world.communicators[0], torch.ones(200_000)))
    world.settle()  # worker 1 has not called it
    channel = world.further[0]
    assert channel.passes == 1 and channel.busy() and not request.done
    world.engines[0].remove_communicator(world.communicators[0])
    assert "pending when its group was destroyed" in str(request.error)
    assert channel.passes == 0 and not any(link.open for link in channel.communicators.links())


@pytest.mark.promise("A failure of one channel makes every worker raise.")
@pytest.mark.parametrize("size", [2, 3])
def test_a_flipped_bit_on_any_channel_fails_all_workers(size: int) -> None:
    for channel in range(2):
        world = Channelled(size, 2)
        tensors = [torch.ones(200_000) for _ in range(size)]
        hit: list[Pipe] = []

        def flip(pipe: Pipe, data: bytes, world: Channelled = world, channel: int = channel, hit: Any = hit) -> bytes:
            streams: list[Any] = [
                link.stream
                for engine in world.engines
                if engine.channel == channel
                for link in engine.communicators.links()
            ]
            if not hit and len(data) > 40_000 and any(each is not None and each.outgoing is pipe for each in streams):
                hit.append(pipe)
                return data[:30_000] + bytes([data[30_000] ^ 1]) + data[30_001:]
            return data

        requests = [world.submit(each, all_reduce(each, tensors[rank])) for rank, each in world.communicators.items()]
        world.run(requests, flip)
        assert hit and all(request.error is not None for request in requests)
        assert sum("does not authenticate" in str(request.error) for request in requests) == size
        assert all(
            engine.failed and not any(link.open for link in engine.communicators.links()) for engine in world.engines
        )


def test_a_connection_that_ends_on_a_channel_fails_all_workers() -> None:
    world = Channelled(3, 2)
    first = [world.submit(each, all_reduce(each, torch.ones(300_000))) for each in world.communicators.values()]
    world.run(first)
    lost = next(iter(world.further[1].communicators.active.values())).outboxes[2]  # the next in the ring
    assert lost.stream is not None
    lost.stream.close()
    requests = [world.submit(each, all_reduce(each, torch.ones(300_000))) for each in world.communicators.values()]
    world.run(requests)
    world.wait(SUSPICION_SECONDS + 1)
    world.run(requests)
    assert all(isinstance(request.error, RingfenceError) for request in requests)


def test_a_channel_blames_nobody_while_another_worker_owes_channel_0_an_answer() -> None:
    world = Channelled(3, 2)
    requests = [world.submit(each, all_reduce(each, torch.ones(300_000))) for each in world.communicators.values()]
    world.run(requests)
    primary, channel = world.engines[0], next(each for each in world.further if each.rank == 0)
    lost = next(iter(channel.communicators.active.values())).outboxes[1]
    primary.on_unanswered(frozenset({2}))
    channel.suspect(lost, "worker 1 is gone")
    world.wait(SUSPICION_SECONDS + 0.1)
    world.settle()
    assert not channel.failed and not primary.failed
    primary.on_unanswered(frozenset())
    world.wait(SUSPICION_SECONDS + 0.1)
    world.settle()
    assert str(channel.failure) == "worker 1 is gone" and primary.failed


def test_a_worker_that_left_is_missed_on_every_channel() -> None:
    world = Channelled(3, 2)
    requests = [
        world.submit(world.communicators[rank], broadcast(world.communicators[rank], torch.ones(400_000), 2))
        for rank in (0, 1)
    ]
    world.engines[2].leave()
    world.run(requests)
    world.wait(LINK_HELLO_SECONDS + 1)
    world.run(requests)
    assert all("worker 2 left the run" in str(request.error) for request in requests)
    assert all(engine.failed for engine in world.engines)


def test_a_connection_on_its_way_to_a_channel_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has sent all and left is not lost, though the channel has not taken over its connection yet."""
    world = Channelled(2, 2)
    channel, posted = world.further[0], list[Callable[[], None]]()
    monkeypatch.setattr(channel, "post", posted.append)
    group = bytes(DIGEST_BYTES)  # one that this worker has not created yet
    hello = LinkHello(1, 0, Lane.COLLECTIVE, group, bytes(NONCE_BYTES), channel=1)
    channel.adopt(
        Arrival(hello, world.wires.connect(1, 0), LinkSecrets(Secret(bytes(32)), Secret(bytes(32)), bytes(32)))
    )
    assert channel.is_connecting(1, Lane.COLLECTIVE, group)
    assert not channel.is_connecting(1, Lane.COLLECTIVE, bytes([1]) * DIGEST_BYTES)
    posted.pop()()
    assert not channel.is_connecting(1, Lane.COLLECTIVE, group) and not posted


def test_a_worker_is_verified_before_a_channel_is_dialled() -> None:
    """The verification is channel 0's; the link of the other channel waits for it."""
    world = Channelled(2, 2)
    dialled: list[int] = []

    class Link:
        worker, needed = 1, True

        def dial(self) -> None:
            dialled.append(self.worker)

    channel, acceptor = world.further[0], world.engines[0].acceptor
    assert channel.may_dial(Link())
    acceptor.needs_no_verification = lambda worker: worker in acceptor.verified  # type: ignore[method-assign]
    waiting: list[Any] = []
    acceptor.may_dial = lambda link: waiting.append(link) or False  # type: ignore[method-assign,func-returns-value]
    assert not channel.may_dial(Link())
    world.settle()
    assert len(waiting) == 1 and waiting[0].needed and not dialled
    waiting[0].dial()
    world.settle()
    assert dialled == [1]


# -- hellos ----------------------------------------------------------------------------------------------------------------


def greet(world: Channelled, **changes: Any) -> Any:
    """Dial worker 1 as worker 0 would; return the reply, or None if the connection was closed."""
    hello = LinkHello(0, 1, Lane.COLLECTIVE, world.communicators[0].digest, bytes(NONCE_BYTES))._replace(**changes)
    stream = world.wires.connect(0, 1)
    stream.send(memoryview(world.engines[0].keys.hello_bytes(hello)))
    world.settle()
    reply = memoryview(bytearray(1248))
    try:
        return bytes(reply) if stream.recv_into(reply) == 1248 else None
    except BlockingIOError:
        return "nothing"


def test_a_hello_for_a_channel_of_the_run_is_answered() -> None:
    world = Channelled(2, 3)
    assert all(isinstance(greet(world, channel=number), bytes) for number in range(3))


@pytest.mark.promise("A hello for a channel that the run does not have is refused before anything is computed for it.")
@pytest.mark.parametrize("change", [{"channel": 3}, {"channel": 7}, {"channel": 8}, {"channel": 255}])
def test_a_hello_for_another_channel_is_refused(change: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    world = Channelled(2, 3)
    answered: list[LinkHello] = []
    monkeypatch.setattr(LinkKeys, "reply", lambda self, hello, nonce: answered.append(hello))
    assert greet(world, **change) is None
    assert greet(Channelled(2, 1), channel=1) is None
    assert not answered


@pytest.mark.parametrize("lane", [lane for lane in Lane if lane is not Lane.COLLECTIVE])
def test_only_collective_links_have_channels(lane: Lane) -> None:
    keys = World(2).engines[0].keys
    with pytest.raises(AuthenticationError, match="a channel that no link has"):
        keys.read_hello(keys.hello_bytes(LinkHello(0, 1, lane, bytes(32), bytes(32), 1)))


def test_a_second_connection_for_a_channel_is_an_error() -> None:
    world = Channelled(2, 2)
    requests = [world.submit(each, all_reduce(each, torch.ones(200_000))) for each in world.communicators.values()]
    world.run(requests)
    again = next(iter(next(iter(world.further[0].communicators.active.values())).outboxes.values()))
    again.close()
    again.dial()
    world.settle()
    assert "dialled the same link twice" in str(world.engines[1].failure)
