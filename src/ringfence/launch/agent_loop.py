"""The thread of an agent: serves the processes of its own machine through a Unix socket, and passes their calls on.

The socket is in a folder that only this user can enter, and the user id of each client is checked as well.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import selectors
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ringfence import keys
from ringfence.admission.entry import WORLD_LIMIT
from ringfence.admission.messages import MessageSplitter, encode
from ringfence.errors import PeerLostError, ProtocolError
from ringfence.launch import agent_folder
from ringfence.launch.host import Host
from ringfence.launch.host_link import HostLink
from ringfence.launch.messages import (
    TO_HOST,
    AgentCall,
    Answer,
    CallResult,
    Notice,
    Operation,
    from_json,
    number_of,
    refused,
    to_json,
)
from ringfence.session.join.connections import Connections
from ringfence.session.join.peer import Peer
from ringfence.transport.fork import register_fork_cleanup, unregister_fork_cleanup
from ringfence.transport.unix import peer_process

_log = logging.getLogger(__name__)

_READ_BYTES: Final = 1 << 16
_BACKLOG: Final = 128
_LEAVE_SECONDS: Final = 5.0  # for the answer to the last call

Upstream = Host | HostLink  # what carries calls out: the host itself, or the connection to it
NewUpstream = Callable[[Connections, Callable[[Answer | Notice], None]], Upstream]


class _Client:
    """One connection of a process on this machine."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.frames = MessageSplitter(TO_HOST, keys.CALL_BYTES)
        self.unsent = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def read(self) -> None:
        """Read what has arrived. Raises PeerLostError at the end of the stream."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLostError(error.strerror or str(error)) from error
        if not data:
            raise PeerLostError("the process has closed its connection")
        self.frames.feed(data)

    def flush(self) -> None:
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise PeerLostError(error.strerror or str(error)) from error


class AgentLoop:
    """The thread of an agent. `path` is the Unix socket that its workers connect to."""

    def __init__(self, new_upstream: NewUpstream) -> None:
        self._folder = agent_folder.new_folder()
        self.path = os.path.join(self._folder, agent_folder.SOCKET)
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # by which other threads wake up the loop
        self._stop_at: float | None = None
        self._notice: Notice | None = None  # the last one
        # the client of a call that was passed on, and its number there
        self._calls: dict[int, tuple[_Client, int]] = {}
        self._last = 0
        self._clients: set[_Client] = set()
        self._lock = threading.Lock()  # for the two below, which the agent's main thread uses
        self._rejoins: dict[int, _Rejoin] = {}  # by local rank
        self._rejoined: dict[int, Mapping[str, str] | str] = {}
        self._connections = Connections()
        register_fork_cleanup(self)
        try:
            agent_folder.listen(self._door, self.path, _BACKLOG)
            self._door.setblocking(False)
            self._connections.add_source(self._door)
            self._connections.add_source(self._wake)
            self._upstream = new_upstream(self._connections, self._on_message)
        except BaseException:
            self._close()
            raise
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)  # if a signal ends this process
        self._thread = threading.Thread(target=self._run, name="ringfence agent", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, linger: float = 0.0) -> None:
        """End the thread; first wait for at most `linger` seconds until no other agent needs this one."""
        self._stop_at = time.monotonic() + linger
        self._wake_up()
        self._thread.join(linger + _LEAVE_SECONDS)

    def rejoining(self) -> dict[int, float]:
        """Return since when which workers wait for the next round in place, by local rank."""
        with self._lock:
            return {rank: each.since for rank, each in self._rejoins.items()}

    def answer_rejoins(self, answers: Mapping[int, Mapping[str, str] | str]) -> None:
        """Answer workers that wait in place, by local rank: with the variables of their round, or why there is none."""
        with self._lock:
            self._rejoined.update(answers)
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def forget(self) -> None:
        """Close all descriptors in a forked child, which has no thread. The folder belongs to the parent."""
        self._door.close()
        for client in self._clients:
            client.socket.close()
        self._connections.forget()

    # -- the loop ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._turn()
        except Exception:
            _log.exception("the agent's thread failed: its workers lose the store")
        finally:
            self._close()

    def _is_over(self) -> bool:
        return self._stop_at is not None and (self._upstream.is_left or time.monotonic() >= self._stop_at)

    def _turn(self) -> None:
        now = time.monotonic()
        self._upstream.settle(now)
        moment = min(self._upstream.next_at(now), float("inf") if self._stop_at is None else self._stop_at)
        self._connections.watch(reading=True)
        pending: list[tuple[Peer, int]] = []
        for key, events in self._connections.wait(min(max(0.0, moment - now), 3600.0)):
            if key.data is self._door:
                self._accept()
            elif isinstance(key.data, _Client):
                self._serve(key.data, events)
            elif key.data == self._wake:
                os.eventfd_read(self._wake)
                self._send_rejoined()
            elif not self._upstream.dispatch(key, events):
                pending.append((key.data, events))
        self._upstream.serve_pending(pending)

    def _close(self) -> None:
        self._door.close()
        for client in list(self._clients):
            client.socket.close()
        if hasattr(self, "_upstream"):
            self._upstream.close()
        self._connections.close_pending()
        os.close(self._wake)
        shutil.rmtree(self._folder, ignore_errors=True)
        unregister_fork_cleanup(self)

    # -- processes of this machine ----------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._door.accept()
        except OSError as error:
            _log.warning("cannot accept a connection of a worker: %s", error.strerror)
            return
        user = peer_process(connection).uid
        if user != os.geteuid():
            _log.warning("refused a process of user %d at the agent's socket", user)
            connection.close()
            return
        client = _Client(connection)
        self._clients.add(client)
        self._connections.add_source(client)

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                client.flush()
            if events & selectors.EVENT_READ:
                client.read()
                while (message := client.frames.next()) is not None:
                    assert isinstance(message, AgentCall)
                    self._pass_on(client, message)
        except (ProtocolError, PeerLostError):
            self._disconnect(client)
        else:
            self._watch(client)

    def _pass_on(self, client: _Client, call: AgentCall) -> None:
        if call.operation is Operation.STATUS:
            body = () if self._notice is None else (self._notice.body(),)
            self._answer(client, Answer(call.number, CallResult.OK, body))
            return
        if call.operation is Operation.REJOIN:
            with self._lock:
                self._rejoins[_local_rank(call)] = _Rejoin(client, call.number, time.monotonic())
            return
        self._last = self._last % 0xFFFFFFFF + 1
        self._calls[self._last] = client, call.number
        self._upstream.send(AgentCall(self._last, call.operation, call.scope, call.milliseconds, call.parts))

    def _send_rejoined(self) -> None:
        with self._lock:
            found = [(self._rejoins.pop(rank, None), answer) for rank, answer in self._rejoined.items()]
            self._rejoined.clear()
        for rejoin, answer in found:
            if rejoin is None:  # the worker has ended
                continue
            if isinstance(answer, str):
                self._answer(rejoin.client, refused(rejoin.number, answer))
            else:
                self._answer(rejoin.client, Answer(rejoin.number, CallResult.OK, (to_json(answer),)))

    def _on_message(self, message: Answer | Notice) -> None:
        """Take what the upstream has for this machine."""
        if isinstance(message, Notice):
            if message.cause and (self._notice is None or message.cause != self._notice.cause):
                _log.warning("a worker has failed: %s", message.cause)
            self._notice = message
            return
        client, number = self._calls.pop(message.number, (None, 0))
        if client is not None and client in self._clients:
            self._answer(client, Answer(number, message.result, message.parts))

    def _answer(self, client: _Client, answer: Answer) -> None:
        client.unsent += encode(answer)
        try:
            client.flush()
        except PeerLostError:
            self._disconnect(client)
        else:
            self._watch(client)

    def _watch(self, client: _Client) -> None:
        if client in self._clients:
            write = selectors.EVENT_WRITE if client.unsent else 0
            self._connections.set_events(client, selectors.EVENT_READ | write)

    def _disconnect(self, client: _Client) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._connections.set_events(client, 0)
            client.socket.close()
            self._calls = {number: each for number, each in self._calls.items() if each[0] is not client}
            with self._lock:
                self._rejoins = {rank: each for rank, each in self._rejoins.items() if each.client is not client}


@dataclass(frozen=True)
class _Rejoin:
    """A worker's call that waits for the next round in place."""

    client: _Client
    number: int
    since: float


def _local_rank(call: AgentCall) -> int:
    if len(call.parts) != 1:
        raise ProtocolError("a worker that rejoins names its local rank")
    return number_of(from_json(call.parts[0]), "local_rank", WORLD_LIMIT)
