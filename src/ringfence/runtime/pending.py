"""Pending connections: accepted connections whose dialler has not been authenticated yet."""

from __future__ import annotations

from typing import Protocol

from ringfence import keys
from ringfence.dataplane.endpoint import Stream
from ringfence.errors import AdmissionError, AuthenticationError, PeerLostError
from ringfence.link.evidence_frame import NO_GROUP, seal_presentation
from ringfence.link.hello import CONFIRM_BYTES, HELLO_BYTES, Hello, Lane, LinkSecrets
from ringfence.runtime.events import LinkContext
from ringfence.runtime.peer_verification import PeerVerifier, PresentationReader


class PendingOwner(Protocol):
    """Keeps the pending connections: the acceptor."""

    @property
    def peer_verifier(self) -> PeerVerifier | None: ...
    def on_presentation(self, worker: int, /) -> None: ...
    def on_authenticated(
        self, connection: PendingConnection, stream: Stream, hello: Hello, secrets: LinkSecrets, /
    ) -> None: ...
    def on_closed(self, connection: PendingConnection, worker: int | None, /) -> None: ...


class PendingConnection:
    """An accepted connection. Before authentication it costs two reads of fixed size."""

    served_always = True

    def __init__(self, context: LinkContext, owner: PendingOwner, stream: Stream, address: str) -> None:
        self.context = context
        self.stream: Stream | None = stream
        self.address = address
        self.deadline = context.platform.clock() + keys.LINK_HELLO_SECONDS
        self.queued = False
        self.worker = -1
        self._owner = owner
        self._buffer = memoryview(bytearray(HELLO_BYTES))
        self._have = 0
        self._hello: Hello | None = None
        self._secrets: LinkSecrets | None = None
        self._unsent: memoryview | None = None
        self._reader: PresentationReader | None = None  # set if this is a peer verification
        self._answered = False

    def wake(self) -> None:
        """Schedule a call of `work`."""
        if not self.queued:
            self.queued = True
            self.context.queues.ready.append(self)

    @property
    def known(self) -> bool:
        """Whether it has sent a hello that authenticates."""
        return self._hello is not None

    @property
    def presenting_worker(self) -> int | None:
        """The worker that has proved possession of its key and presents its proof; None for any other connection."""
        return None if self._reader is None or self._hello is None else self._hello.sender

    def is_for(self, worker: int, lane: int, digest: bytes) -> bool:
        """Return whether its hello is from this worker, for this lane and group."""
        hello = self._hello
        return hello is not None and (hello.sender, hello.lane, hello.group) == (worker, lane, digest)

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
                got = self.stream.recv_into(self._buffer[self._have : want])
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

    def _answer(self, received: bytes) -> None:
        context = self.context
        hello = context.keys.read_hello(received)
        if hello.receiver != context.rank or not 0 <= hello.sender < context.world_size:
            raise AuthenticationError("a hello for another worker")
        if hello.lane == Lane.SAME_MACHINE:
            raise AuthenticationError("a proof of one machine that came over the network")
        if hello.lane == Lane.PEER_VERIFICATION:
            verifier = self._owner.peer_verifier
            if hello.group != NO_GROUP or verifier is None or not verifier.due(hello.sender):
                raise AuthenticationError("a peer verification that is not needed")
        nonce = context.platform.random(keys.NONCE_BYTES)
        self._hello = hello
        self._secrets = context.keys.link_secrets(hello.sender, hello, nonce)
        self._unsent = memoryview(nonce + self._secrets.acceptor_confirms)
        self._write()

    def _write(self) -> None:
        assert self.stream is not None and self._unsent is not None
        try:
            sent = self.stream.send(self._unsent)
        except BlockingIOError:
            return
        self._unsent = self._unsent[sent:] if sent < len(self._unsent) else None

    def _authenticate(self, received: bytes) -> None:
        assert self._hello is not None and self._secrets is not None and self.stream is not None
        if not keys.same(received, self._secrets.dialler_confirms):
            raise AuthenticationError("a dialler does not hold the key it claims")
        if self._hello.lane == Lane.PEER_VERIFICATION:
            self._owner.on_presentation(self._hello.sender)
            self._reader = PresentationReader(self.context.keys.opener(self._secrets.forth), self._hello.sender)
            self.deadline = self.context.platform.clock() + keys.LINK_HELLO_SECONDS
            self.wake()
            return
        stream, secrets = self.stream, self._secrets
        self.stream = self._secrets = None
        self._owner.on_authenticated(self, stream, self._hello, secrets)

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
        """Drop the keys of this connection."""
        self._secrets = self._reader = None
