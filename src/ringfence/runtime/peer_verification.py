"""Peer verification: before two workers that never met in the admission tree open a link, they show each other their proofs.

    dialler   hello, lane 2 ─►  ◄─ reply   confirm, its proof ─►  verified   ◄─ the acceptor's   verified; links are dialled

It has a connection of its own, once for each worker that is dialled, so that links carry nothing but frames of collectives
and transfers, and cost what they cost before. Who does not pass ends the session, on every worker and by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

from ringfence.dataplane.endpoint import Stream
from ringfence.errors import AuthenticationError, PeerLostError
from ringfence.link.evidence_frame import NO_GROUP, open_presentation, presentation_frame_bytes, seal_presentation
from ringfence.link.frames import HEADER_BYTES
from ringfence.link.hello import Lane
from ringfence.link.seal import Opener
from ringfence.runtime.connection import Link

if TYPE_CHECKING:
    from ringfence.runtime.communicator import Communicator
    from ringfence.runtime.engine import Engine


_T = TypeVar("_T")


class PeerVerifier(Protocol):
    """Who must be verified at peer verification, and the verifier (admission.contact)."""

    @property
    def presentation(self) -> bytes: ...

    def due(self, rank: int, /) -> bool: ...

    def verified(self, rank: int, /) -> bool: ...

    def verify(self, rank: int, shown: bytes, /) -> None: ...


class Incoming:
    """Reads the one frame that a peer shows."""

    def __init__(self, opener: Opener, worker: int) -> None:
        self._opener = opener
        self._worker = worker
        self._frame = bytearray(HEADER_BYTES)
        self._have = 0
        self._total: int | None = None

    def read(self, stream: Stream) -> bytes | None:
        """What it shows, once all of it is there. PeerLostError at the end of the stream."""
        while self._total is None or self._have < self._total:
            with memoryview(self._frame) as view:
                try:
                    got = stream.recv_into(view[self._have :])
                except BlockingIOError:
                    return None
            if not got:
                raise PeerLostError(f"worker {self._worker} hung up before it had shown its proof")
            self._have += got
            if self._have == HEADER_BYTES and self._total is None:
                self._total = self._open(lambda: presentation_frame_bytes(bytes(self._frame)))
                self._frame.extend(bytes(self._total - HEADER_BYTES))
        return self._open(lambda: open_presentation(self._opener, bytes(self._frame)))

    def _open(self, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except AuthenticationError:
            raise AuthenticationError(
                f"the proof that worker {self._worker} shows does not authenticate: it was changed, forged or replayed"
            ) from None


class Pair(NamedTuple):
    """As much of a group as a link asks for."""

    ranks: tuple[int]
    digest: bytes = NO_GROUP
    removed: bool = False


class VerificationLink(Link):
    """The dialling end."""

    lane = Lane.PEER_VERIFICATION
    served_always = True

    def __init__(self, engine: Engine, worker: int) -> None:
        super().__init__(engine, cast("Communicator", Pair((worker,))), 0)
        self.waiting: list[Link] = []  # to be dialled when the two have met
        self._incoming: Incoming | None = None

    @property
    def needed(self) -> bool:
        return any(link.needed for link in self.waiting)

    def dial(self) -> None:
        if self.engine.failure is None:
            self._incoming = None
            self._begin()

    def work(self) -> None:
        if not self.open and (self.stream is None or not self._shake_hands()):
            return
        known = self.engine.acceptor.peer_verifier
        assert known is not None
        try:
            shown = self._exchange(known.presentation)
        except (
            PeerLostError,
            ConnectionResetError,
            BrokenPipeError,
        ):  # the pending connection was too crowded, or gave up on us
            self._start_over()
            return
        if shown is not None:
            self.close()
            known.verify(self.worker, shown)
            self.engine.acceptor.on_verified(self)

    def _start_over(self) -> None:
        """Dial again, by a new end: this one may hold half a frame, which belongs to the connection that was cut."""
        self.close()
        successor = VerificationLink(self.engine, self.worker)
        successor.waiting, successor._dials = self.waiting, self._dials
        self.engine.acceptor.verify_by(successor)
        successor._redial()

    def _exchange(self, presentation: bytes) -> bytes | None:
        """Write this worker's proof, then read the other's: None until all of it is there."""
        if not self.flush():
            return None
        if self._incoming is None:
            self._incoming = Incoming(self.opener, self.worker)
            self.put(memoryview(seal_presentation(self.sealer, presentation)))
            if not self.flush():
                return None
        assert self.stream is not None
        return self._incoming.read(self.stream)
