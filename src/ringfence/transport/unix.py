"""Unix sockets: which process is at the other end, and connections between workers of one machine."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from ringfence.machines import Machines

OVERFLOW_UID: Final = 65534  # how the kernel shows a user that this user namespace has no number for
_OVERFLOW: Final = "/proc/sys/kernel/overflowuid"
_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: process, user, group
_BACKLOG: Final = 512


class PeerProcess(NamedTuple):
    """A process, as the kernel knows it."""

    pid: int
    uid: int


def peer_process(connection: socket.socket) -> PeerProcess:
    """Return the process that connected, or that listens, at the other end of a Unix socket. Raises OSError."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return PeerProcess(*_CREDENTIALS.unpack(data)[:2])


def identifies(uid: int) -> bool:
    """Return whether a user id stands for one user. The overflow id stands for all that the namespace does not know."""
    overflow = {OVERFLOW_UID}
    with contextlib.suppress(OSError, ValueError):
        overflow.add(int(Path(_OVERFLOW).read_text()))
    return uid not in overflow


def connected_to_own(path: str) -> socket.socket:
    """Connect to a process of this user. Raises OSError, also if another user's process listens there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.connect(path)
        user = peer_process(connection).uid
        if user != os.geteuid():
            raise PermissionError(errno.EPERM, f"user {user} listens there, and this process is of user {os.geteuid()}")
    except BaseException:
        connection.close()
        raise
    return connection


def unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


class LocalNetwork:
    """Dials workers of this machine, and listens for them, at abstract Unix sockets.

    Args:
        name_of: the name of a worker's socket. Only members of the session can compute it.
        rank: of this worker.
        machines: which workers may share one. Those that are not on this one do not listen here, or are of another user.
    """

    def __init__(self, name_of: Callable[[int], bytes], rank: int, machines: Machines) -> None:
        self.machines = machines
        self.workers = frozenset(next((workers for workers in machines if rank in workers), ())) - {rank}
        self._names = {worker: name_of(worker) for worker in self.workers}
        self._uid = os.geteuid()
        self._absent: set[int] = set()  # workers that are known not to listen here
        self.listener: socket.socket | None = None
        if self.workers and identifies(self._uid):
            listener = unix_socket()
            try:
                listener.bind(name_of(rank))
                listener.listen(_BACKLOG)
            except OSError:  # a sandbox forbids it: this worker is reached over TCP
                listener.close()
            else:
                self.listener = listener

    def dial(self, worker: int) -> socket.socket | None:
        """Connect to a worker. Returns None if it does not listen on this machine."""
        if worker not in self.workers or worker in self._absent or self.listener is None:
            return None
        connection = unix_socket()
        error = connection.connect_ex(self._names[worker])
        if not error and self._is_this_user(connection):
            return connection
        connection.close()
        if error != errno.EAGAIN:  # EAGAIN: its queue is full; over TCP this time
            self._absent.add(worker)
        return None

    def accept(self) -> socket.socket | None:
        """Accept a connection. One of another user is closed before a byte of it is read, and None returned."""
        assert self.listener is not None
        connection, _ = self.listener.accept()
        if self._is_this_user(connection):
            connection.setblocking(False)
            return connection
        connection.close()
        return None

    def _is_this_user(self, connection: socket.socket) -> bool:
        return peer_process(connection).uid == self._uid

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
