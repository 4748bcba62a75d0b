"""The relay of long links: no packet is early, out of order or lost beyond what was asked, and it never outlives its parent."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ringfence.errors import ConfigurationError
from ringfence_lab.bench.link import socket_in
from ringfence_lab.bench.netns import Hosts
from ringfence_lab.bench.relay import Counters, LongLink, Relay
from tests.limits import HANG

STAMP = struct.Struct("<QQ")
PACKETS = 2000
TOGETHER = 50  # less than any socket's buffer


def ended(counters: Counters) -> int:
    """Return how many packets the relay has passed on or lost."""
    return counters.packets + counters.lost + counters.dropped


def send(hosts: Hosts, first: int = 0, second: int = 1) -> list[tuple[int, float]]:
    """Send numbered packets from a host to another, a few at a time; return the number and the delay of each that arrived."""
    assert hosts.relay is not None
    source, sink = (socket_in(hosts.ends[host][0], socket.SOCK_DGRAM) for host in (first, second))
    found = []
    with source, sink:
        sink.bind((hosts.ends[second][1], 0))
        source.connect(sink.getsockname())
        for begin in range(0, PACKETS, TOGETHER):
            before = hosts.relay.counters()
            for number in range(begin, begin + TOGETHER):
                source.send(STAMP.pack(number, time.monotonic_ns()))
            while ended(hosts.relay.counters()) < ended(before) + TOGETHER:
                select.select([], [], [], 0.001)
            sink.setblocking(False)
            while select.select([sink], [], [], 0)[0]:
                number, sent = STAMP.unpack(sink.recv(STAMP.size))
                found.append((number, (time.monotonic_ns() - sent) / 1e9))
    return found


@pytest.mark.parametrize("link", [LongLink(), LongLink(0.02), LongLink(0.02, 0.02)], ids=LongLink.text)
def test_every_packet_arrives_in_order_and_none_early(link: LongLink) -> None:
    with Hosts(2, None, link) as hosts:
        found = send(hosts)
        assert [number for number, _ in found] == list(range(PACKETS))
        assert min(delay for _, delay in found) >= link.delay - link.jitter
        assert hosts.relay is not None and hosts.relay.counters()[2:4] == (0, 0)


def test_hosts_of_one_relay_reach_each_other() -> None:
    with Hosts(3, None, LongLink(0.001)) as hosts:
        for pair in ((0, 1), (1, 2), (2, 0)):
            assert len(send(hosts, *pair)) == PACKETS


def test_as_many_packets_are_lost_as_asked() -> None:
    with Hosts(2, "1gbit", LongLink(loss=0.1)) as hosts:
        found = send(hosts)
        assert hosts.relay is not None
        assert PACKETS - len(found) == hosts.relay.counters().lost
        assert 0.07 < hosts.relay.counters().lost / PACKETS < 0.13  # the relay's random numbers are the same each time


def test_jitter_cannot_exceed_the_delay() -> None:
    with pytest.raises(ConfigurationError, match="must not be longer than --delay"):
        Hosts(2, None, LongLink(0.01, 0.02)).__enter__()


def test_a_relay_without_its_namespace_says_so() -> None:
    with pytest.raises(ConfigurationError, match="namespace rf-none"):
        Relay([("rf-none", "10.83.0.1")], "rf", LongLink())


PARENT = """
from ringfence_lab.bench.netns import Hosts
from ringfence_lab.bench.relay import LongLink
with Hosts(2, None, LongLink(0.01)) as hosts:
    print(hosts.relay._process.pid, flush=True)
    input()
"""


@pytest.fixture
def parent() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process with a relay, and a descriptor of the relay's process."""
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    relay = os.pidfd_open(int(process.stdout.readline()))
    yield process, relay
    process.kill()
    process.communicate()
    os.close(relay)


def test_the_relay_ends_with_its_parent(parent: tuple[subprocess.Popen[str], int]) -> None:
    process, relay = parent
    os.kill(process.pid, signal.SIGKILL)
    assert select.select([relay], [], [], HANG)[0]
    Hosts(1, None, LongLink()).__enter__().__exit__()  # removes what the killed one has left


def test_the_relay_ends_if_a_device_is_removed(parent: tuple[subprocess.Popen[str], int]) -> None:
    process, relay = parent
    subprocess.run(["ip", "-n", f"rfb{process.pid}-0", "link", "delete", "rf"], check=True)
    assert select.select([relay], [], [], HANG)[0]
    process.communicate("\n", timeout=HANG)
