"""Peer verification: two workers that were not neighbours in the admission tree verify each other before they open a link.

    dialler   hello, lane 2 ->            confirm, its proof ->            (verifies), then dials its links
    acceptor                  <- reply                       (verifies) <- its own proof

The two proofs have a connection of their own, once for each dialled worker, so links carry nothing but frames of collectives
and transfers. If verification fails, every worker aborts, naming the offending rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from ringfence.dataplane.endpoint import Stream
from ringfence.errors import AuthenticationError, PeerLostError
from ringfence.link.evidence_frame import NO_GROUP, open_presentation, presentation_frame_bytes, seal_presentation
from ringfence.link.frames import HEADER_BYTES
from ringfence.link.hello import Lane
from ringfence.link.seal import Opener, Sealer
from ringfence.runtime.events import LinkContext, PeerLink
from ringfence.runtime.links import Link

_T = TypeVar("_T")


class LinkVerifier(Protocol):
    """Decides which workers must be verified when they connect, and verifies them (implemented in admission)."""

    @property
    def presentation(self) -> bytes: ...

    def due(self, rank: int, /) -> bool: ...

    def verified(self, rank: int, /) -> bool: ...

    def verify(self, rank: int, presentation: bytes, /) -> None: ...


class PresentationReader:
    """Reads the one frame in which a peer presents its proof."""

    def __init__(self, opener: Opener, worker: int) -> None:
        self._opener = opener
        self._worker = worker
        self._frame = bytearray(HEADER_BYTES)
        self._have = 0
        self._total: int | None = None

    def read(self, stream: Stream) -> bytes | None:
        """Return the presentation, or None until it is complete.

        Raises PeerLostError at the end of the stream, and AuthenticationError if the frame does not authenticate.
        """
        while self._total is None or self._have < self._total:
            with memoryview(self._frame) as view:
                try:
                    got = stream.recv_into(view[self._have :])
                except BlockingIOError:
                    return None
            if not got:
                raise PeerLostError(f"worker {self._worker} closed the connection before it had presented its proof")
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
                f"the proof presented by worker {self._worker} does not authenticate: it was changed, forged or replayed"
            ) from None


class PairScope(NamedTuple):
    """The scope of a link that belongs to no communicator."""

    digest: bytes = NO_GROUP
    name: str = ""
    removed: bool = False


class VerificationOwner(Protocol):
    """Keeps the verifications in progress: the acceptor."""

    @property
    def peer_verifier(self) -> LinkVerifier | None: ...
    def replace_verification(self, link: VerificationLink, /) -> None: ...
    def on_verified(self, link: VerificationLink, /) -> None: ...


class VerificationLink(Link):
    """The dialling endpoint of a peer verification."""

    lane = Lane.PEER_VERIFICATION
    served_always = True

    def __init__(self, context: LinkContext, worker: int, owner: VerificationOwner) -> None:
        super().__init__(context, PairScope(), worker)
        self.waiting: list[PeerLink] = []  # dialled once both workers are verified
        self._owner = owner
        self._reader: PresentationReader | None = None

    @property
    def needed(self) -> bool:
        return any(link.needed for link in self.waiting)

    def dial(self) -> None:
        if not self.context.events.failed:
            self._reader = None
            self._connect()

    def work(self) -> None:
        if not self.open and (self.stream is None or not self._shake_hands()):
            return
        verifier = self._owner.peer_verifier
        assert verifier is not None
        try:
            presentation = self._exchange(verifier.presentation)
        except (PeerLostError, ConnectionResetError, BrokenPipeError):  # the acceptor had too many pending connections
            self._start_over()
            return
        if presentation is not None:
            self.close()
            verifier.verify(self.worker, presentation)
            self._owner.on_verified(self)

    def _start_over(self) -> None:
        """Dial again with a new endpoint: this one may hold a part of a frame of the closed connection."""
        self.close()
        successor = VerificationLink(self.context, self.worker, self._owner)
        successor.waiting, successor._dials = self.waiting, self._dials
        self._owner.replace_verification(successor)
        successor._redial()

    def _exchange(self, presentation: bytes) -> bytes | None:
        """Write this worker's proof, then read the peer's. Return None until it is complete."""
        if not self.flush():
            return None
        if self._reader is None:
            assert isinstance(self.opener, Opener) and isinstance(self.sealer, Sealer)  # never on a local link
            self._reader = PresentationReader(self.opener, self.worker)
            self.put(memoryview(seal_presentation(self.sealer, presentation)))
            if not self.flush():
                return None
        assert self.stream is not None
        return self._reader.read(self.stream)
