"""The kernel's counters of this process: bytes on its TCP connections, and resident memory."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

_BYTES: Final = Struct("@Q")
_RECEIVED_AT: Final = 128  # tcpi_bytes_received in struct tcp_info, since Linux 4.1
_SENT_AT: Final = 200  # tcpi_bytes_sent, since Linux 4.19
_SENT_AGAIN_AT: Final = 208  # tcpi_bytes_retrans, which tcpi_bytes_sent includes
_TCP_INFO_BYTES: Final = 232
_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"  # proc(5): the peak starts again from what is resident now


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


def resident_bytes() -> int:
    """Return the resident bytes, with mapped files and shared memory."""
    return _kibibytes("VmRSS") << 10


def peak_bytes() -> int:
    """Return the peak of the resident bytes since `reset_peak`."""
    return _kibibytes("VmHWM") << 10


def reset_peak() -> None:
    _CLEAR.write_text(_RESET_PEAK)


def _kibibytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise OSError(f"{_STATUS} has no {name}")
