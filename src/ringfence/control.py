"""The control plane: what two neighbours in the admission tree tell each other while the session runs.

The TLS connections of admission stay open for it. Two messages exist: one that ends the session and one that says
goodbye. The end of a connection without a goodbye is a failure. A neighbour whose join ended before the go came to it still
says so in a message of the tree, and that ends the session too.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.messages import Failure, Frames, Message, encode
from ringfence.errors import PeerLostError, ProtocolError
from ringfence.transport.outage import is_unanswered
from ringfence.transport.tls import Tls, TlsStream

_NOBODY: Final = 0xFFFFFFFF  # on the wire: no suspect
_FRAME_LIMIT: Final = 4 + 4 + 1 + 2 * (2 + keys.ABORT_TEXT_BYTES)  # of an Abort; a Failure is shorter
_NOT_ADMITTED: Final = 7  # the code of an AdmissionError


@dataclass(frozen=True)
class Abort:
    """The session is over: who says so, whom it suspects (-1: nobody), what it had pending, why. Text is escaped."""

    TYPE: ClassVar[int] = 32

    reporter: int
    suspect: int
    code: int
    pending: str
    text: str

    def __post_init__(self) -> None:
        if not 0 <= self.reporter < _NOBODY or not -1 <= self.suspect < _NOBODY or not 0 <= self.code <= 0xFF:
            raise ProtocolError("an abort of the wrong form")
        object.__setattr__(self, "pending", encoding.escape(self.pending, keys.ABORT_TEXT_BYTES))
        object.__setattr__(self, "text", encoding.escape(self.text, keys.ABORT_TEXT_BYTES))

    def body(self) -> bytes:
        suspect = _NOBODY if self.suspect < 0 else self.suspect
        numbers = encoding.number(self.reporter, 4) + encoding.number(suspect, 4) + encoding.number(self.code, 1)
        return numbers + encoding.text(self.pending) + encoding.text(self.text)

    @classmethod
    def read(cls, reader: encoding.Reader) -> Abort:
        reporter, suspect, code = reader.number(4), reader.number(4), reader.number(1)
        pending, text = reader.text(keys.ABORT_TEXT_BYTES), reader.text(keys.ABORT_TEXT_BYTES)
        return cls(reporter, -1 if suspect == _NOBODY else suspect, code, pending, text)


@dataclass(frozen=True)
class Bye:
    """The sender leaves on purpose; the end of the connection that follows is no failure."""

    TYPE: ClassVar[int] = 33

    rank: int

    def body(self) -> bytes:
        return encoding.number(self.rank, 4)

    @classmethod
    def read(cls, reader: encoding.Reader) -> Bye:
        return cls(reader.number(4))


@dataclass(frozen=True)
class Closed:
    """The connection has ended: never sent, always the last that `receive()` returns."""

    after_bye: bool
    reason: str
    unanswered: bool = False  # the peer did not answer for the outage timeout


ControlMessage = Abort | Bye | Closed

_TYPES: Final[Mapping[int, type[Message]]] = {kind.TYPE: kind for kind in (Abort, Bye, Failure)}


class ControlEdge:
    """One neighbour. Nothing here blocks or raises for the peer's sake: a lost peer shows up as `Closed`.

    Call `receive()` once before the first select: a message may have come in one piece with the last of admission.
    """

    def __init__(self, peer: int, connection: socket.socket, tls: Tls, received: bytes = b"") -> None:
        self.peer = peer
        self._stream = TlsStream(connection, tls)
        self._frames = Frames(_TYPES, _FRAME_LIMIT)
        self._frames.feed(received)
        self._bye = False
        self._unanswered = False  # a write has failed, because the peer did not answer
        self._over = False

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def socket(self) -> socket.socket:
        return self._stream.socket

    def receive(self) -> list[ControlMessage]:
        """All that has arrived. `Closed` comes once; after it there is nothing."""
        found: list[ControlMessage] = []
        while not self._over:
            try:
                self._cut(found)
                data = self._stream.receive()
                if not data:
                    break
                self._frames.feed(data)
            except PeerLostError as error:
                found.append(self._closed(str(error), is_unanswered(error)))
            except ProtocolError as error:
                found.append(self._closed(f"rank {self.peer} broke the control protocol: {error}"))
        return found

    def send(self, message: Abort | Bye) -> None:
        """Queue and try to write. If the peer is gone, `receive()` will say so."""
        if not self._over:
            with self._noting_silence():
                self._stream.send(encode(message))

    @property
    def wants_write(self) -> bool:
        return not self._over and self._stream.wants_write

    def flush(self) -> None:
        """Write on; to be called when the socket is writable."""
        if not self._over:
            with self._noting_silence():
                self._stream.flush()

    @contextlib.contextmanager
    def _noting_silence(self) -> Iterator[None]:
        """A socket reports its error once; `receive()` would see an end like any other."""
        try:
            yield
        except PeerLostError as error:
            self._unanswered |= is_unanswered(error)

    def close(self) -> None:
        """Let go of the connection and its keys. Say `Bye` before, or the peer takes it for a failure."""
        self._over = True
        self._stream.close()

    def abandon(self) -> None:
        """The same without a word: for a forked child, which must not speak for its parent."""
        self._over = True
        self._stream.forget()

    def _cut(self, found: list[ControlMessage]) -> None:
        while (message := self._frames.next()) is not None:
            if isinstance(message, Failure):  # it ended its join while the go was on its way to it
                message = Abort(message.reporter, -1, _NOT_ADMITTED, "", f"its join ended: {message.text}")
            assert isinstance(message, Abort | Bye)
            if isinstance(message, Bye):
                self._bye |= message.rank == self.peer  # goodbyes of others are passed on over the tree
            found.append(message)

    def _closed(self, reason: str, unanswered: bool = False) -> Closed:
        self._over = True
        return Closed(self._bye, reason, unanswered or self._unanswered)
