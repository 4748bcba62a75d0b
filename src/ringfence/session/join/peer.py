"""One connection of a join: an unauthenticated peer until both sides have admitted each other, then a neighbour."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Final

from ringfence import keys
from ringfence.admission.binding import TlsValues
from ringfence.admission.handshake import Handshake, State
from ringfence.admission.messages import HANDSHAKE, Message, MessageSplitter, encode
from ringfence.errors import PeerLostError, ProtocolError
from ringfence.runtime.control import ControlEdge
from ringfence.transport.outage import tolerate
from ringfence.transport.tls import TlsStream

_READ_BYTES: Final = 1 << 20  # from one neighbour before the others are served


class Peer:
    """One connection with its handshake. `rank` is None until both sides have admitted each other.

    `expires` is compared with the loop's waiting time, which stands still while the loop itself is busy.
    """

    def __init__(self, stream: TlsStream, handshake: Handshake, address: str, expires: float) -> None:
        self.stream = stream
        self.handshake = handshake
        self.address = address
        self.expires = expires
        self.cpu_seconds = 0.0  # used by the loop for this connection
        self._remaining = 0.0
        self.connecting = False
        self.presented_at = 0.0  # when this worker's own proof was sent, in seconds since 1970
        self.collecting_since = 0.0
        self.rank: int | None = None
        self.frames = MessageSplitter(HANDSHAKE, keys.ADMISSION_BYTES)

    @property
    def hello_accepted(self) -> bool:
        """Whether its hello names this run and an expected rank. That is a claim; any peer can make it."""
        return self.handshake.state not in (State.IDLE, State.HELLO)

    @property
    def proof_accepted(self) -> bool:
        """Whether its proof was verified and the policy admits it."""
        return self.handshake.admitted is not None

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed. May be read from other threads."""
        return self.stream.fileno() < 0

    def pause(self, now: float) -> None:
        """Stop the expiry clock while the peer waits for this worker."""
        self._remaining, self.expires = self.expires - now, float("inf")

    def resume(self, now: float) -> None:
        """Restart the expiry clock with the time that remained at `pause()`."""
        self.expires = now + self._remaining

    def fileno(self) -> int:
        return self.stream.fileno()

    def send(self, messages: Iterable[Message]) -> None:
        """Send messages. A failed write is not reported here: what the peer sent last is still to be read first."""
        with contextlib.suppress(PeerLostError):
            if data := b"".join(encode(message) for message in messages):
                self.stream.send(data)

    def flush(self) -> None:
        with contextlib.suppress(PeerLostError):
            self.stream.flush()

    def finish_connect(self) -> None:
        """Complete a non-blocking connect. Raises PeerLostError if it failed."""
        error = self.stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise PeerLostError(os.strerror(error))
        self.connecting = False
        self.flush()

    def read(self) -> None:
        """Read what has arrived, within the byte limits of an unauthenticated peer. Starts the handshake once TLS is up."""
        tls = self.stream.tls
        if self.rank is not None:
            limit = _READ_BYTES
        else:
            allowed = keys.ADMISSION_BYTES if tls.established else keys.TLS_HANDSHAKE_BYTES
            limit = allowed - self.stream.received
        data = self.stream.receive(limit, drain=False)
        if tls.established and self.handshake.state is State.IDLE:
            self.send(self.handshake.begin(TlsValues(tls.own_key_digest, tls.peer_key_digest, tls.exporter())))
        else:
            self.flush()  # TLS's own messages
        self.frames.feed(data)

    def check_cost(self) -> None:
        """Check the limits of an unauthenticated peer, after its messages were handled. Raises ProtocolError."""
        if self.proof_accepted:
            return
        if not self.stream.tls.established and self.stream.received >= keys.TLS_HANDSHAKE_BYTES:
            raise ProtocolError(f"sent {keys.TLS_HANDSHAKE_BYTES} bytes before TLS was established")
        if self.stream.received >= keys.ADMISSION_BYTES:
            raise ProtocolError(f"sent {keys.ADMISSION_BYTES} bytes before it was admitted")
        if self.cpu_seconds >= keys.ADMISSION_CPU_SECONDS:
            raise ProtocolError(f"used {keys.ADMISSION_CPU_SECONDS} s of CPU time before it was admitted")

    def admit(self, rank: int, types: Mapping[int, type[Message]], limit: int, outage: float) -> None:
        """Lift the limits of an unauthenticated peer, and allow other messages, of at most `limit` bytes.

        The kernel reports a host that does not answer for `outage` seconds; a process that is busy still answers.
        """
        self.rank = rank
        self.stream.tls.admit()
        self.frames.allow(types, limit)
        tolerate(self.stream.socket, outage)

    def become_edge(self, *, verified_again: bool = False) -> ControlEdge:
        """Hand the connection over to the control plane when the session begins."""
        assert self.rank is not None
        rest = self.frames.rest()
        return ControlEdge(self.rank, self.stream.socket, self.stream.tls, rest, verified_again=verified_again)
