"""Listen on the loopback interface, in a private network where the system allows one: what any eavesdropper sees."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Final

CLONE_NEWUSER: Final = 0x1000_0000
CLONE_NEWNET: Final = 0x4000_0000
SIOCSIFFLAGS: Final = 0x8914
IFF_UP_RUNNING: Final = 0x41
ETH_P_IP: Final = 0x0800
BUFFER_BYTES: Final = 16 << 20


def enter_private_network() -> bool:
    """Give this process, and those it starts, a network with a loopback and nothing else; False where not allowed.

    Must be called before any thread starts. A child tries it first: some systems grant the namespace and then no
    right in it, which would leave this process with a network that it cannot switch on.
    """
    child = os.fork()
    if child == 0:
        try:
            _enter()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status != 0:
        return False
    _enter()
    return True


def _enter() -> None:
    """Root needs no user namespace; others become nobody special in one, and own the network made in it."""
    user, group = os.geteuid(), os.getegid()
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    if unshare(CLONE_NEWNET) != 0:
        if unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP_RUNNING))


class Capture:
    """Every TCP payload that crosses the loopback interface from now on, by connection and direction."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_IP))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._socket.bind(("lo", ETH_P_IP))
        self._socket.setblocking(False)

    def streams(self) -> list[bytes]:
        """What has been captured since the last call."""
        flows: dict[bytes, bytearray] = {}
        while True:
            try:
                packet = self._socket.recv(1 << 16)
            except BlockingIOError:
                return [bytes(flow) for flow in flows.values()]
            parsed = tcp_payload(packet)
            if parsed is not None:
                flow, payload = parsed
                flows.setdefault(flow, bytearray()).extend(payload)


def tcp_payload(packet: bytes) -> tuple[bytes, bytes] | None:
    """The flow (addresses and ports, as they lie in the packet) and the payload of an IPv4 TCP packet."""
    if len(packet) < 20 or packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
        return None
    tcp = (packet[0] & 0x0F) * 4
    if len(packet) < tcp + 20:
        return None
    end = int.from_bytes(packet[2:4], "big") or len(packet)  # 0: larger than the field can say
    payload = packet[tcp + (packet[tcp + 12] >> 4) * 4 : end]
    return (packet[12:20] + packet[tcp : tcp + 4], payload) if payload else None


def open_capture() -> Capture | None:
    """A capture, or None where this process may not listen."""
    try:
        return Capture()
    except OSError:
        return None
