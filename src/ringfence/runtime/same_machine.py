"""Proof that two workers are on one machine: the link handshake over an abstract Unix socket (spec/link.md, section 12).

An abstract socket exists in one network namespace and thus in one kernel, unlike a path, which a shared file system would
carry elsewhere. Its name derives from the session key. Each end checks by SO_PEERCRED that the process at the other end has
its own user id, and then runs the link handshake, in a lane that no other socket accepts. So what is proved is this: a
process of this worker's user, in this worker's network namespace, holds the peer's private key of this session, or relays
for its holder. Under the threat model a process of the worker's own user is the worker.

Each end decides for itself. Roster and hints can prevent a proof, never make one.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from ringfence import keys
from ringfence.errors import AuthenticationError, ProtocolError
from ringfence.link.hello import CONFIRM_BYTES, HELLO_BYTES, REPLY_BYTES, Lane, LinkHello
from ringfence.runtime.link_keys import LinkKeys
from ringfence.transport.fork import register_fork_cleanup, unregister_fork_cleanup
from ringfence.transport.unix import identifies, peer_process
from ringfence.transport.unix import unix_socket as _socket

_BACKLOG: Final = 64
_PENDING: Final = 64
_REDIAL_SECONDS: Final = 0.01  # the listener's queue is full
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_NETWORK: Final = "/proc/self/ns/net"


def uid_of(connection: socket.socket) -> int:
    """Return the user id of the process that connected, or that listens, at the other end of a Unix socket."""
    return peer_process(connection).uid


def obstacle() -> str:
    """Return why this process can never prove to be on one machine with another; empty if it can."""
    uid = os.geteuid()
    if not identifies(uid):
        return f"it runs as user {uid}, which stands for unknown users: start workers as another user"
    try:
        with _socket() as probe:
            probe.bind(b"\0ringfence/1 probe " + os.urandom(8).hex().encode())
            probe.listen()
    except OSError as error:
        return f"this machine does not provide abstract Unix sockets ({error.strerror or error})"
    return ""


def place() -> bytes:
    """Return what tells this kernel, network namespace and user from others. It is compared as a hint and proves nothing."""
    try:
        network = os.stat(_NETWORK)
        boot = Path(_BOOT_ID).read_text().strip()
    except OSError:
        return os.urandom(keys.NONCE_BYTES)  # equal to no other
    return f"{boot} {network.st_dev} {network.st_ino} {os.geteuid()}".encode()


class MachineProof:
    """One worker's part in the proof that the members of a group are on one machine.

    The constructor listens, so that `run` of another member finds this one: members must run it after all have constructed
    theirs. Every pair has one connection, which the member with the higher rank dials.
    """

    def __init__(self, link_keys: LinkKeys, rank: int, members: Collection[int], digest: bytes) -> None:
        self.proved: dict[int, socket.socket] = {}  # by worker; open until `close`
        self.refusals: dict[int, str] = {}  # why a worker that this one dialled is not proved
        self._keys = link_keys
        self._rank = rank
        self._others = frozenset(members) - {rank}
        self._digest = digest
        self._uid = os.geteuid()
        self._pending: list[_Connection] = []
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        register_fork_cleanup(self)
        if identifies(self._uid):
            self._listen()

    def _listen(self) -> None:
        listener = _socket()
        try:
            listener.bind(self._keys.machine_socket(self._digest, self._rank))
            listener.listen(_BACKLOG)
        except OSError:  # this machine has no abstract sockets, or a sandbox forbids them
            listener.close()
            return
        self._listener = listener

    def run(self, seconds: float = keys.LINK_HELLO_SECONDS) -> frozenset[int]:
        """Return the workers that are on this machine, of those that are members. Takes at most `seconds`.

        It returns early once a member is known not to be: groups need all of them.
        """
        limit = time.monotonic() + seconds
        if self._listener is None:
            return frozenset()
        self._selector.register(self._listener, selectors.EVENT_READ)
        undialled = {worker for worker in self._others if worker < self._rank}
        while self.proved.keys() != self._others and not self.refusals and time.monotonic() < limit:
            undialled = {worker for worker in undialled if not self._dial(worker)}
            pause = 0.0 if self.refusals else max(0.0, limit - time.monotonic())
            for key, _ in self._selector.select(min(pause, _REDIAL_SECONDS) if undialled else pause):
                if key.data is None:
                    self._accept()
                else:
                    self._serve(key.data)
        return frozenset(self.proved)

    def close(self) -> None:
        """Close all sockets."""
        unregister_fork_cleanup(self)
        self.forget()

    def forget(self) -> None:
        """Close all descriptors, also in a forked child, whose parent keeps its own."""
        self._selector.close()
        for each in (*self.proved.values(), *(pending.socket for pending in self._pending), self._listener):
            if each is not None:
                each.close()
        self.proved.clear()
        self._pending.clear()
        self._listener = None

    # -- dialling ----------------------------------------------------------------------------------------------------

    def _dial(self, worker: int) -> bool:
        """Dial a worker and send a hello. Return False if its queue is full, so that it is dialled again."""
        connection = _socket()
        error = connection.connect_ex(self._keys.machine_socket(self._digest, worker))
        if error == errno.EAGAIN:
            connection.close()
            return False
        reason = f"it does not listen here ({os.strerror(error)})" if error else self._objection(connection)
        if reason:
            connection.close()
            self.refusals[worker] = reason
            return True
        hello = LinkHello(self._rank, worker, Lane.SAME_MACHINE, self._digest, os.urandom(keys.NONCE_BYTES))
        pending = _Connection(connection, REPLY_BYTES, worker)
        pending.hello = hello
        self._add(pending)
        try:
            self._send(pending, self._keys.hello_bytes(hello))
        except OSError as failure:
            self._drop(pending)
            self.refusals[worker] = str(failure)
        return True

    def _objection(self, connection: socket.socket) -> str:
        """Return why the process at the other end is not of this user; empty if it is."""
        uid = uid_of(connection)
        if not identifies(uid) or uid != self._uid:
            return f"the process there has the user id {uid}, and this one {self._uid}"
        return ""

    def _check_reply(self, pending: _Connection, reply: bytes) -> None:
        assert pending.hello is not None and pending.worker is not None
        self._send(pending, self._keys.confirm(pending.hello, reply)[0])
        self._conclude(pending, pending.worker)

    # -- accepting ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Accept a connection; one of another user is closed before a byte is read."""
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        accepted = [pending for pending in self._pending if pending.worker is None]
        if self._objection(connection):
            connection.close()
            return
        if len(accepted) >= _PENDING:
            self._drop(accepted[0])
        self._add(_Connection(connection, HELLO_BYTES))

    def _answer(self, pending: _Connection, received: bytes) -> None:
        hello = self._keys.read_hello(received)
        wanted = (self._rank, Lane.SAME_MACHINE, self._digest)
        if (hello.receiver, hello.lane, hello.group) != wanted or not self._expects(hello.sender):
            raise AuthenticationError("a hello that belongs to another proof")
        pending.nonce = os.urandom(keys.NONCE_BYTES)
        pending.hello, pending.wanted = hello, CONFIRM_BYTES
        self._send(pending, self._keys.reply(hello, pending.nonce))

    def _expects(self, worker: int) -> bool:
        return worker in self._others and worker > self._rank and worker not in self.proved

    def _check_confirm(self, pending: _Connection, received: bytes) -> None:
        assert pending.hello is not None
        self._keys.accept(pending.hello, pending.nonce, received)
        if not self._expects(pending.hello.sender):
            raise AuthenticationError("a second proof of one worker")
        self._conclude(pending, pending.hello.sender)

    # -- both --------------------------------------------------------------------------------------------------------

    def _add(self, pending: _Connection) -> None:
        self._pending.append(pending)
        self._selector.register(pending.socket, selectors.EVENT_READ, pending)

    def _serve(self, pending: _Connection) -> None:
        """Continue a handshake. A peer that fails it loses its connection, and nothing else happens."""
        try:
            received = pending.receive()
            if received is None:
                return
            if pending.worker is not None:
                self._check_reply(pending, received)
            elif pending.hello is None:
                self._answer(pending, received)
            else:
                self._check_confirm(pending, received)
        except (OSError, ProtocolError) as error:
            self._drop(pending)
            if pending.worker is not None:
                self.refusals[pending.worker] = str(error)

    def _send(self, pending: _Connection, data: bytes) -> None:
        """Send a message, which an empty socket buffer always takes whole."""
        if pending.socket.send(data) != len(data):
            raise ConnectionError("the socket takes no more bytes")

    def _conclude(self, pending: _Connection, worker: int) -> None:
        self._selector.unregister(pending.socket)
        self._pending.remove(pending)
        self.proved[worker] = pending.socket

    def _drop(self, pending: _Connection) -> None:
        if pending in self._pending:
            self._selector.unregister(pending.socket)
            self._pending.remove(pending)
        pending.socket.close()


class _Connection:
    """A connection that has proved nothing yet: it reads messages of fixed size only."""

    def __init__(self, connection: socket.socket, wanted: int, worker: int | None = None) -> None:
        self.socket = connection
        self.worker = worker  # that was dialled; None: accepted
        self.wanted = wanted  # bytes of the next message
        self.hello: LinkHello | None = None
        self.nonce = b""  # of the reply
        self._received = b""

    def receive(self) -> bytes | None:
        """Return the next message, or None until it is complete."""
        try:
            data = self.socket.recv(self.wanted - len(self._received))
        except BlockingIOError:
            return None
        if not data:
            raise AuthenticationError("the peer closed the connection")
        self._received += data
        if len(self._received) < self.wanted:
            return None
        message, self._received = self._received, b""
        return message
