"""A network namespace, and a capture of every byte on one of its interfaces."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x4000_0000
ETH_P_ALL = 0x0003
SOL_PACKET = 263
PACKET_STATISTICS = 6
SO_RCVBUFFORCE = 33
BUFFER_BYTES = 64 << 20


@contextlib.contextmanager
def namespace(name: str) -> Iterator[str]:
    """A namespace with nothing but a loopback interface."""
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def within(namespace: str, work: Callable[[], T]) -> T:
    """Call `work` in a thread that enters a namespace, so that sockets that it opens belong there."""

    def enter() -> T:
        with open(f"/run/netns/{namespace}") as place:
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        return work()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(enter).result()


def packet_socket(namespace: str, interface: str = "lo") -> socket.socket:
    """Return a socket that captures an interface of a namespace."""

    def make() -> socket.socket:
        packets = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
        packets.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        packets.bind((interface, ETH_P_ALL))
        return packets

    return within(namespace, make)


class Capture:
    """Every packet on an interface of a namespace between `with` and its end, by default on its loopback."""

    def __init__(self, namespace: str, interface: str = "lo") -> None:
        self._namespace = namespace
        self._interface = interface
        self._packets: list[bytes] = []
        self._cut_short = 0

    def __enter__(self) -> Capture:
        self._socket = packet_socket(self._namespace, self._interface)
        self._before = self._counted()
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sent = self._counted() - self._before
        os.close(self._stopped)
        self._thread.join()
        os.close(self._stop)
        statistics = self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)
        self._dropped = struct.unpack("II", statistics)[1]
        self._socket.close()

    def _read(self) -> None:
        """Read until stopped and nothing is left. Loopback shows each packet twice: outgoing and incoming."""
        buffer = bytearray(1 << 17)
        while True:
            ready, _, _ = select.select([self._socket.fileno(), self._stop], [], [])
            if self._socket.fileno() in ready:
                length, _, _, (_, _, direction, *_) = self._socket.recvmsg_into([buffer])
                if direction == socket.PACKET_OUTGOING or self._interface != "lo":
                    self._packets.append(bytes(buffer[:length]))
                    self._cut_short += length == len(buffer)
            else:
                return

    def _counted(self) -> int:
        """What the kernel counts: bytes that the loopback sent, or packets that another interface sent and received.

        The bytes of other interfaces include headers that the capture does not.
        """
        names = ["tx_bytes"] if self._interface == "lo" else ["tx_packets", "rx_packets"]
        files = [f"/sys/class/net/{self._interface}/statistics/{name}" for name in names]
        command = ["ip", "netns", "exec", self._namespace, "cat", *files]
        return sum(map(int, subprocess.run(command, check=True, capture_output=True).stdout.split()))

    def assert_complete(self) -> None:
        """Assert that the capture holds as much as the kernel has counted."""
        assert self._dropped == 0
        assert self._cut_short == 0
        assert (self.size if self._interface == "lo" else len(self._packets)) >= self._sent

    @property
    def size(self) -> int:
        return sum(map(len, self._packets))

    def flows(self) -> list[bytes]:
        """The payload of each TCP flow, in the order of its sequence numbers: a segment may be sent twice, or late."""
        found: dict[bytes, dict[int, bytes]] = {}
        for packet in self._packets:
            flow, sequence, payload = _tcp_payload(packet)
            segments = found.setdefault(flow, {})
            if len(payload) > len(segments.get(sequence, b"")):  # the SYN has a number, but no payload
                segments[sequence] = payload
        return [_in_order(segments) for segments in found.values()]

    def contains(self, patterns: list[bytes]) -> bool:
        """Whether a pattern is in a packet, or in a flow."""
        return any(pattern in data for pattern in patterns for data in (*self._packets, *self.flows()))


def _in_order(segments: dict[int, bytes]) -> bytes:
    """Segments by their sequence numbers, which wrap at 32 bits; what overlaps is the same bytes again."""
    first = next(iter(segments), 0)
    placed = sorted(((sequence - first + (1 << 31)) % (1 << 32), payload) for sequence, payload in segments.items())
    whole, start = bytearray(), placed[0][0] if placed else 0
    for place, payload in placed:
        assert place - start <= len(whole), "a segment is missing"
        whole += payload[len(whole) - (place - start) :]
    return bytes(whole)


def _tcp_payload(packet: bytes) -> tuple[bytes, int, bytes]:
    """Addresses and ports, the first byte's number, and what follows the TCP header; other packets are one flow each."""
    if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
        return packet, 0, packet
    tcp = (packet[0] & 0x0F) * 4
    (sequence,) = struct.unpack_from(">I", packet, tcp + 4)
    return packet[12:20] + packet[tcp : tcp + 4], sequence, packet[tcp + (packet[tcp + 12] >> 4) * 4 :]
