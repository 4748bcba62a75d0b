"""The pending connection of a worker: what happens to a connection that somebody dialled, until it is known who."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ringfence import keys
from ringfence.errors import AdmissionError, AuthenticationError, PeerLostError
from ringfence.link.evidence_frame import NO_GROUP, seal_presentation
from ringfence.link.hello import CONFIRM_BYTES, HELLO_BYTES, Hello, Lane, LinkSecrets, read_hello
from ringfence.runtime.peer_verification import Incoming

if TYPE_CHECKING:
    from ringfence.dataplane.endpoint import Stream
    from ringfence.runtime.connection import Link
    from ringfence.runtime.engine import Engine


class PendingConnection:
    """A connection that somebody dialled: nothing but two fixed-size reads until it is known who."""

    served_always = True

    def __init__(self, engine: Engine, stream: Stream, address: str) -> None:
        self.engine = engine
        self.stream: Stream | None = stream
        self.address = address
        self.deadline = engine.clock() + keys.LINK_HELLO_SECONDS
        self.queued = False
        self.worker = -1
        self._buffer = memoryview(bytearray(HELLO_BYTES))
        self._have = 0
        self._hello: Hello | None = None
        self._secrets: LinkSecrets | None = None
        self._unsent: memoryview | None = None
        self._incoming: Incoming | None = None  # its proof, if this is an peer verification
        self._answered = False

    def wake(self) -> None:
        """Have the engine call `work` soon."""
        if not self.queued:
            self.queued = True
            self.engine.ready.append(self)

    @property
    def known(self) -> bool:
        """Whether it has said a hello that authenticates."""
        return self._hello is not None

    @property
    def verifies_peer(self) -> int | None:
        """The worker that has shown that it holds its key and now shows its proof; None: an unauthenticated peer so far."""
        return None if self._incoming is None or self._hello is None else self._hello.sender

    def dials(self, link: Link) -> bool:
        """Whether its hello is for this link."""
        hello = self._hello
        place = (link.worker, link.lane, link.communicator.digest)
        return hello is not None and (hello.sender, hello.lane, hello.group) == place

    def notify(self, readable: bool, writable: bool, ended: bool = False) -> None:
        self.wake()

    def work(self) -> None:
        """An unauthenticated peer's mistake costs the unauthenticated peer its connection and nobody else anything."""
        try:
            self._work()
        except (OSError, AuthenticationError, PeerLostError):
            self.close()

    def _work(self) -> None:
        if self.stream is None:
            return
        if self._unsent is not None:
            self._write()
        if self._incoming is not None:
            self._verify_peer(self._incoming)
            return
        want = HELLO_BYTES if self._hello is None else CONFIRM_BYTES
        while self._have < want:
            try:
                got = self.stream.recv_into(self._buffer[self._have : want])
            except BlockingIOError:
                return
            if not got:
                raise AuthenticationError("an unauthenticated peer hung up")
            self._have += got
        received, self._have = bytes(self._buffer[:want]), 0
        if self._hello is None:
            self._answer(received)
            self.wake()
        else:
            self._admit(received)

    def _answer(self, received: bytes) -> None:
        hello = read_hello(self.engine.session_key, received)
        if hello.receiver != self.engine.rank or not 0 <= hello.sender < self.engine.world_size:
            raise AuthenticationError("a hello for somebody else")
        if hello.lane == Lane.PEER_VERIFICATION:
            known = self.engine.acceptor.peer_verifier
            if hello.group != NO_GROUP or known is None or not known.due(hello.sender):
                raise AuthenticationError("an peer verification that nobody needs")
        nonce = self.engine.random(keys.NONCE_BYTES)
        self._hello = hello
        self._secrets = self.engine.link_secrets(hello.sender, hello, nonce)
        self._unsent = memoryview(nonce + self._secrets.acceptor_confirms)
        self._write()

    def _write(self) -> None:
        assert self.stream is not None and self._unsent is not None
        try:
            sent = self.stream.send(self._unsent)
        except BlockingIOError:
            return
        self._unsent = self._unsent[sent:] if sent < len(self._unsent) else None

    def _admit(self, received: bytes) -> None:
        assert self._hello is not None and self._secrets is not None and self.stream is not None
        if not keys.same(received, self._secrets.dialler_confirms):
            raise AuthenticationError("a dialler does not hold the key it claims")
        if self._hello.lane == Lane.PEER_VERIFICATION:
            self.engine.acceptor.peer_presented(self._hello.sender)
            self._incoming = Incoming(self.engine.opener(self._secrets.forth), self._hello.sender)
            self.deadline = self.engine.clock() + keys.LINK_HELLO_SECONDS
            self.wake()
            return
        stream, secrets = self.stream, self._secrets
        self.stream = self._secrets = None
        self.engine.acceptor.admitted(self, stream, self._hello, secrets)

    def _verify_peer(self, incoming: Incoming) -> None:
        """Verify the proof of a worker of the roster. A failure from here on aborts the session."""
        assert self._hello is not None and self._secrets is not None and self.stream is not None
        known = self.engine.acceptor.peer_verifier
        assert known is not None
        if not self._answered:
            try:
                shown = incoming.read(self.stream)
                if shown is None:
                    return
                known.verify(self._hello.sender, shown)
            except (AuthenticationError, AdmissionError) as error:
                self.engine.fail(error, self._hello.sender)
                return
            self._answered = True
            self._unsent = memoryview(seal_presentation(self.engine.sealer(self._secrets.back), known.presentation))
            self._write()
        if self._unsent is None:
            self.close()

    def close(self) -> None:
        if self.stream is not None:
            self.engine.network.forget(self.stream)
            self.stream.close()
            self.stream = None
        self.engine.acceptor.pending.discard(self)
        if self._hello is not None:
            self.engine.call_soon(partial(self.engine.miss, self._hello.sender))
        self.forget()

    def forget(self) -> None:
        """Its keys end with the connection."""
        self._secrets = self._incoming = None
