"""Bytes on the wire: the kernel's counters of the TCP connections of this process."""

from __future__ import annotations

import contextlib
import os
import socket
from struct import Struct
from typing import Final, NamedTuple

_BYTES: Final = Struct("@Q")
_RECEIVED_AT: Final = 128  # tcpi_bytes_received in struct tcp_info, since Linux 4.1
_SENT_AT: Final = 200  # tcpi_bytes_sent, since Linux 4.19
_SENT_AGAIN_AT: Final = 208  # tcpi_bytes_retrans, which tcpi_bytes_sent includes
_TCP_INFO_BYTES: Final = 232


class Connection(NamedTuple):
    """One TCP connection: its payload in both directions, each byte counted once, and the sizes of its buffers."""

    sent: int
    received: int
    buffers: int


def connections() -> dict[str, Connection]:
    """Return all open connections, also those of other libraries, by the kernel's name of the socket."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # not TCP, or closed since
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:") and (connection := _look_at(int(name))):
                found[target] = connection
    return found


def bytes_sent() -> int:
    """Return the bytes that all open connections have sent."""
    return sum(connection.sent for connection in connections().values())


def _look_at(descriptor: int) -> Connection | None:
    with socket.socket(fileno=os.dup(descriptor)) as stream:
        if stream.type != socket.SOCK_STREAM or stream.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        info = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        sent, again, received = (_BYTES.unpack_from(info, at)[0] for at in (_SENT_AT, _SENT_AGAIN_AT, _RECEIVED_AT))
        room = (stream.getsockopt(socket.SOL_SOCKET, option) for option in (socket.SO_SNDBUF, socket.SO_RCVBUF))
        return Connection(sent - again, received, sum(room))
