"""Pending connections: accepted connections whose dialler has not been authenticated yet."""

from __future__ import annotations

import os
import socket
from typing import Protocol

from ringfence import keys
from ringfence.dataplane.endpoint import Stream
from ringfence.dataplane.shared import map_peer
from ringfence.errors import AdmissionError, AuthenticationError, PeerLostError, RingfenceError
from ringfence.link.evidence_frame import NO_GROUP, seal_presentation
from ringfence.link.hello import CONFIRM_BYTES, HELLO_BYTES, LOCAL, Lane, LinkHello, LinkSecrets
from ringfence.runtime.events import LinkContext
from ringfence.runtime.links import Arrival
from ringfence.runtime.peer_verification import LinkVerifier, PresentationReader
from ringfence.transport.tcp import refusal


class PendingOwner(Protocol):
    """Keeps the pending connections: the acceptor."""

    @property
    def peer_verifier(self) -> LinkVerifier | None: ...
    @property
    def channels(self) -> int: ...
    def on_presentation(self, worker: int, /) -> None: ...
    def on_authenticated(self, connection: PendingConnection, arrival: Arrival, /) -> None: ...
    def on_closed(self, connection: PendingConnection, worker: int | None, /) -> None: ...


class PendingConnection:
    """An accepted connection. Before authentication it costs two reads of fixed size."""

    served_always = True

    def __init__(
        self, context: LinkContext, owner: PendingOwner, stream: Stream, address: str, is_local: bool = False
    ) -> None:
        self.context = context
        self._is_local = is_local
        self._descriptors: list[int] = []  # of shared memory; closed unless the dialler authenticates
        self.stream: Stream | None = stream
        self.address = address
        self.deadline = context.platform.clock() + keys.LINK_HELLO_SECONDS
        self.queued = False
        self.worker = -1
        self._owner = owner
        self._buffer = memoryview(bytearray(max(HELLO_BYTES, CONFIRM_BYTES)))
        self._have = 0
        self._hello: LinkHello | None = None
        self._nonce = b""
        self._secrets: LinkSecrets | None = None
        self._unsent: memoryview | None = None
        self._reader: PresentationReader | None = None  # set if this is a peer verification
        self._answered = False

    def wake(self) -> None:
        """Schedule a call of `work`."""
        if not self.queued:
            self.queued = True
            self.context.ready.append(self)

    @property
    def known(self) -> bool:
        """Whether it has sent a hello that authenticates."""
        return self._hello is not None

    @property
    def presenting_worker(self) -> int | None:
        """The worker that has proved possession of its key and presents its proof; None for any other connection."""
        return None if self._reader is None or self._hello is None else self._hello.sender

    def is_for(self, worker: int, lane: int, digest: bytes, channel: int = 0) -> bool:
        """Return whether its hello is from this worker, for this lane, group and channel."""
        hello = self._hello
        lanes = (lane, LOCAL.get(Lane(lane)))
        if hello is None or hello.lane not in lanes:
            return False
        return (hello.sender, hello.group, hello.channel) == (worker, digest, channel)

    def notify(self, readable: bool, writable: bool, ended: bool = False) -> None:
        self.wake()

    def work(self) -> None:
        """Continue the handshake. An error of an unauthenticated peer only closes its own connection."""
        try:
            self._work()
        except (OSError, AuthenticationError, PeerLostError):
            self.close()

    def _work(self) -> None:
        if self.stream is None:
            return
        if self._unsent is not None:
            self._write()
        if self._reader is not None:
            self._verify_peer(self._reader)
            return
        want = HELLO_BYTES if self._hello is None else CONFIRM_BYTES
        while self._have < want:
            try:
                got = self._receive(self._buffer[self._have : want])
            except BlockingIOError:
                return
            if not got:
                raise AuthenticationError("an unauthenticated peer closed its connection")
            self._have += got
        received, self._have = bytes(self._buffer[:want]), 0
        if self._hello is None:
            self._answer(received)
            self.wake()
        else:
            self._authenticate(received)

    def _receive(self, target: memoryview) -> int:
        """Read bytes of the handshake, and the descriptor that comes with the confirmation of a worker on this machine."""
        assert self.stream is not None
        if not self._is_local or self._hello is None:
            return self.stream.recv_into(target)
        assert isinstance(self.stream, socket.socket)
        data, descriptors, _, _ = socket.recv_fds(self.stream, len(target), 1, socket.MSG_CMSG_CLOEXEC)
        self._descriptors += descriptors
        if len(self._descriptors) > 1:
            raise AuthenticationError("a handshake with more than one descriptor")
        target[: len(data)] = data
        return len(data)

    def _answer(self, received: bytes) -> None:
        context = self.context
        hello = context.keys.read_hello(received)
        if hello.channel >= self._owner.channels:
            raise AuthenticationError("a hello for a channel that this run does not have")
        if hello.receiver != context.rank or not 0 <= hello.sender < context.world_size:
            raise AuthenticationError("a hello for another worker")
        if hello.lane == Lane.SAME_MACHINE:
            raise AuthenticationError("a proof of one machine that came over the network")
        if (hello.lane in LOCAL.values()) != self._is_local:
            raise AuthenticationError("a link inside a machine that came over the network, or the reverse")
        if hello.lane == Lane.PEER_VERIFICATION:
            verifier = self._owner.peer_verifier
            if hello.group != NO_GROUP or verifier is None or not verifier.due(hello.sender):
                raise AuthenticationError("a peer verification that is not needed")
        self._nonce = context.platform.random(keys.NONCE_BYTES)
        self._hello = hello
        self._unsent = memoryview(context.keys.reply(hello, self._nonce))
        self._write()

    def _write(self) -> None:
        assert self.stream is not None and self._unsent is not None
        try:
            sent = self.stream.send(self._unsent)
        except BlockingIOError:
            return
        self._unsent = self._unsent[sent:] if sent < len(self._unsent) else None

    def _authenticate(self, received: bytes) -> None:
        assert self._hello is not None and self.stream is not None
        self._secrets = self.context.keys.accept(self._hello, self._nonce, received)
        if self._hello.lane == Lane.PEER_VERIFICATION:
            self._owner.on_presentation(self._hello.sender)
            self._reader = PresentationReader(self.context.keys.opener(self._secrets.forth), self._hello.sender)
            self.deadline = self.context.platform.clock() + keys.LINK_HELLO_SECONDS
            self.wake()
            return
        self.worker = self._hello.sender  # it has authenticated: what it does wrong now ends the session
        try:
            memory = self._memory()
        except OSError as error:  # of this machine, and not of the connection
            text = f"cannot map the memory that worker {self.worker} shares: {refusal(error)}"
            self.context.events.fail(RingfenceError(f"worker {self.context.rank}: {text}"), self.context.rank)
            return
        arrival = Arrival(self._hello, self.stream, self._secrets, memory)
        self.stream = self._secrets = None
        self._owner.on_authenticated(self, arrival)

    def _memory(self) -> memoryview | None:
        """Map the shared memory of an authenticated dialler."""
        try:
            return map_peer(self._descriptors[0], self.worker) if self._descriptors else None
        finally:
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _verify_peer(self, reader: PresentationReader) -> None:
        """Verify the proof of a worker of the roster. A failure from here on aborts the session."""
        assert self._hello is not None and self._secrets is not None and self.stream is not None
        verifier = self._owner.peer_verifier
        assert verifier is not None
        if not self._answered:
            try:
                presentation = reader.read(self.stream)
                if presentation is None:
                    return
                verifier.verify(self._hello.sender, presentation)
            except (AuthenticationError, AdmissionError) as error:
                self.context.events.fail(error, self._hello.sender)
                return
            self._answered = True
            sealer = self.context.keys.sealer(self._secrets.back)
            self._unsent = memoryview(seal_presentation(sealer, verifier.presentation))
            self._write()
        if self._unsent is None:
            self.close()

    def close(self) -> None:
        """Close the stream and drop the keys."""
        if self.stream is not None:
            self.context.network.forget(self.stream)
            self.stream.close()
            self.stream = None
        self._owner.on_closed(self, None if self._hello is None else self._hello.sender)
        self.forget()

    def forget(self) -> None:
        """Drop the keys of this connection, and descriptors that came with it."""
        self._secrets = self._reader = None
        self._close_descriptors()
