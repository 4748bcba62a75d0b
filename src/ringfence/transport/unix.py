"""Unix sockets: which process is at the other end."""

from __future__ import annotations

import socket
import struct
from typing import Final, NamedTuple

_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: process, user, group


class PeerProcess(NamedTuple):
    """A process, as the kernel knows it."""

    pid: int
    uid: int


def peer_process(connection: socket.socket) -> PeerProcess:
    """Return the process that connected, or that listens, at the other end of a Unix socket. Raises OSError."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return PeerProcess(*_CREDENTIALS.unpack(data)[:2])
