"""A blocking client of the agent on this machine, for its workers and for the agent's own main thread."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from typing import Final

from ringfence import keys
from ringfence.admission.messages import MessageSplitter, encode
from ringfence.errors import PeerLostError, ProtocolError
from ringfence.launch.messages import FROM_HOST, AgentCall, Answer, Operation
from ringfence.transport.fork import register_fork_cleanup
from ringfence.transport.unix import connected_to_own

_READ_BYTES: Final = 1 << 16
_GRACE_SECONDS: Final = 30.0  # for an answer, after the host should have given one


class AgentClient:
    """Calls the agent. Each call in progress has a connection of its own, so threads do not wait for each other."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()
        register_fork_cleanup(self)

    def ask(
        self, operation: Operation, parts: tuple[bytes, ...] = (), *, scope: str = "", seconds: float = 0.0
    ) -> Answer:
        """Make a call that may wait for `seconds` at the host. Raises PeerLostError if the agent is gone."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or _Connection(self._path)
        milliseconds = min(round(seconds * 1000), keys.CALL_LIMIT_MILLISECONDS)
        try:
            answer = connection.ask(operation, parts, scope, milliseconds)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        return answer

    def forget(self) -> None:
        """Close the connections in a forked child: answers to its calls would reach its parent."""
        self._lock = threading.Lock()
        for connection in self._idle:
            connection.close()
        self._idle = []


class _Connection:
    def __init__(self, path: str) -> None:
        try:
            self._socket = connected_to_own(path)
        except OSError as error:
            raise PeerLostError(f"the agent of this machine is gone ({path}: {error.strerror})") from error
        weakref.finalize(self, self._socket.close)  # also when this process ends, or Python warns of it
        self._frames = MessageSplitter(FROM_HOST, keys.CALL_BYTES)
        self._numbers = itertools.count(1)

    def ask(self, operation: Operation, parts: tuple[bytes, ...], scope: str, milliseconds: int) -> Answer:
        number = next(self._numbers)
        end = time.monotonic() + milliseconds / 1000 + _GRACE_SECONDS
        try:
            self._socket.settimeout(_GRACE_SECONDS)
            self._socket.sendall(encode(AgentCall(number, operation, scope, milliseconds, parts)))
            while (message := self._frames.next()) is None:
                self._socket.settimeout(max(0.001, end - time.monotonic()))
                data = self._socket.recv(_READ_BYTES)
                if not data:
                    raise PeerLostError("the agent of this machine has ended")
                self._frames.feed(data)
        except OSError as error:
            raise PeerLostError(f"the agent of this machine does not answer: {error.strerror or error}") from error
        if not isinstance(message, Answer) or message.number != number:
            raise ProtocolError("the agent of this machine gave an answer to another call")
        return message

    def close(self) -> None:
        self._socket.close()
