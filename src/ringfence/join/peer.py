"""One connection of a join: an unauthenticated peer until both sides have admitted, then a neighbour."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from typing import Final

from ringfence import keys
from ringfence.admission.binding import Channel
from ringfence.admission.handshake import Handshake, State
from ringfence.admission.messages import HANDSHAKE, TREE, Frames, Message, encode, tree_frame_limit
from ringfence.control import ControlEdge
from ringfence.errors import PeerLostError, ProtocolError
from ringfence.transport.outage import tolerate
from ringfence.transport.tls import TlsStream

_READ_BYTES: Final = 1 << 20  # off one neighbour before the others have their turn


class Peer:
    """`rank` is set once both sides have admitted."""

    def __init__(self, stream: TlsStream, handshake: Handshake, address: str, expires: float) -> None:
        self.stream = stream
        self.handshake = handshake
        self.address = address
        self.expires = expires  # by the clock that runs only while the loop waits
        self.cpu_seconds = 0.0  # that it has cost
        self._left = 0.0
        self.connecting = False
        self.watched = 0  # the events that the loop's selector watches it for
        self.shown_at = 0.0  # this worker's own proof: by the clock that proofs are verified by
        self.collecting_since = 0.0
        self.rank: int | None = None
        self.frames = Frames(HANDSHAKE, keys.ADMISSION_BYTES)

    @property
    def greeted(self) -> bool:
        """It claims this run and a rank that belongs here; anybody may."""
        return self.handshake.state not in (State.IDLE, State.HELLO)

    def pause(self, now: float) -> None:
        """Nothing is expected of it: its time stands still."""
        self._left, self.expires = self.expires - now, float("inf")

    def resume(self, now: float) -> None:
        self.expires = now + self._left

    @property
    def gone(self) -> bool:
        """Its connection is closed. Other threads may ask."""
        return self.stream.fileno() < 0

    @property
    def passed(self) -> bool:
        """Its proof has been verified and admits it."""
        return self.handshake.admitted is not None

    def fileno(self) -> int:
        return self.stream.fileno()

    def send(self, messages: Iterable[Message]) -> None:
        """A failed write is not reported here: what the peer said last is still to be read, and then the end."""
        with contextlib.suppress(PeerLostError):
            for message in messages:
                self.stream.send(encode(message))

    def flush(self) -> None:
        with contextlib.suppress(PeerLostError):
            self.stream.flush()

    def connected(self) -> None:
        """The attempt to connect has ended, one way or the other."""
        error = self.stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise PeerLostError(os.strerror(error))
        self.connecting = False
        self.flush()

    def read(self) -> None:
        """Read what has arrived, within the cost limits of an unauthenticated peer. The handshake begins once TLS is up."""
        tls = self.stream.tls
        if self.rank is not None:
            limit = _READ_BYTES
        else:
            allowed = keys.ADMISSION_BYTES if tls.established else keys.TLS_HANDSHAKE_BYTES
            limit = allowed - self.stream.received
        data = self.stream.receive(limit)
        self.flush()  # TLS's own answers
        if tls.established and self.handshake.state is State.IDLE:
            self.send(self.handshake.begin(Channel(tls.own_key_digest, tls.peer_key_digest, tls.exporter())))
        self.frames.feed(data)

    def check_cost(self) -> None:
        """After its messages were taken: an unauthenticated peer that has used up its bytes is sent away."""
        if not self.stream.tls.established and self.stream.received >= keys.TLS_HANDSHAKE_BYTES:
            raise ProtocolError(f"{keys.TLS_HANDSHAKE_BYTES} bytes, and TLS is not established")
        if self.rank is None and self.stream.received >= keys.ADMISSION_BYTES:
            raise ProtocolError(f"{keys.ADMISSION_BYTES} bytes, and still not admitted")
        if self.rank is None and self.cpu_seconds >= keys.ADMISSION_CPU_SECONDS:
            raise ProtocolError(f"it has cost {keys.ADMISSION_CPU_SECONDS} s of CPU time, and is still not admitted")

    def become_neighbour(self, rank: int, world_size: int, outage: float) -> None:
        """Both sides have admitted. The kernel notices a host that is silent for `outage` seconds; a busy Python answers."""
        self.rank = rank
        self.stream.tls.admit()
        self.frames.allow(TREE, tree_frame_limit(world_size))
        tolerate(self.stream.socket, outage)

    def become_edge(self) -> ControlEdge:
        """The session has begun."""
        assert self.rank is not None
        return ControlEdge(self.rank, self.stream.socket, self.stream.tls, self.frames.rest())
