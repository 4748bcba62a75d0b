"""The control plane: messages between neighbours in the admission tree during the session.

It uses the TLS connections of admission. There are two messages: Abort ends the session, Bye announces that a worker
leaves; and Challenge and Renewal (admission/renewal.py), if the policy has workers verified again. The end of a connection
without a Bye is a failure. A neighbour whose join fails before it receives GO still sends
a Failure of the admission tree, which ends the session too.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.messages import Failure, Message, MessageSplitter, encode
from ringfence.admission.renewal import RENEWAL_BYTES, Challenge, Renewal
from ringfence.errors import PeerLostError, ProtocolError
from ringfence.transport.outage import is_unanswered
from ringfence.transport.tls import Tls, TlsStream

_NOBODY: Final = 0xFFFFFFFF  # on the wire: no suspect
_FRAME_LIMIT: Final = 4 + 4 + 1 + 2 * (2 + keys.ABORT_TEXT_BYTES)  # of an Abort; a Failure is shorter
_NOT_ADMITTED: Final = 7  # the code of an AdmissionError


@dataclass(frozen=True)
class Abort:
    """Ends the session: the reporting rank, the suspected rank (-1: none), its pending call, the reason. Texts are escaped."""

    TYPE: ClassVar[int] = 32

    reporter: int
    suspect: int
    code: int
    pending: str
    text: str

    def __post_init__(self) -> None:
        if not 0 <= self.reporter < _NOBODY or not -1 <= self.suspect < _NOBODY or not 0 <= self.code <= 0xFF:
            raise ProtocolError("an abort is malformed")
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
    """The sender leaves regularly; the end of the connection that follows is not a failure."""

    TYPE: ClassVar[int] = 33

    rank: int

    def body(self) -> bytes:
        return encoding.number(self.rank, 4)

    @classmethod
    def read(cls, reader: encoding.Reader) -> Bye:
        return cls(reader.number(4))


@dataclass(frozen=True)
class Closed:
    """The connection has ended. Never sent; always the last item of `receive()`."""

    reason: str
    unanswered: bool = False  # the peer did not answer for the outage timeout


ControlMessage = Abort | Bye | Challenge | Renewal | Closed

_TYPES: Final[Mapping[int, type[Message]]] = {kind.TYPE: kind for kind in (Abort, Bye, Failure)}
_VERIFIED_AGAIN: Final[Mapping[int, type[Message]]] = {**_TYPES, Challenge.TYPE: Challenge, Renewal.TYPE: Renewal}


class ControlEdge:
    """The control connection to one neighbour. Never blocks, and does not raise for a lost peer: `receive()` returns `Closed`.

    Call `receive()` once before the first poll: a message may have arrived together with the last one of admission.
    """

    def __init__(
        self, peer: int, connection: socket.socket, tls: Tls, received: bytes = b"", *, verified_again: bool = False
    ) -> None:
        """`verified_again`: whether the policy has workers verified again during the session."""
        self.peer = peer
        self.exporter = tls.exporter() if verified_again else b""
        self._stream = TlsStream(connection, tls)
        self._frames = (
            MessageSplitter(_VERIFIED_AGAIN, max(_FRAME_LIMIT, RENEWAL_BYTES))
            if verified_again
            else MessageSplitter(_TYPES, _FRAME_LIMIT)
        )
        self._frames.feed(received)
        self._unanswered = False  # a write failed because the peer did not answer
        self._over = False

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def socket(self) -> socket.socket:
        return self._stream.socket

    def receive(self) -> list[ControlMessage]:
        """Return all messages that have arrived. `Closed` is returned once, as the last."""
        found: list[ControlMessage] = []
        while not self._over:
            try:
                self._parse(found)
                data = self._stream.receive()
                if not data:
                    break
                self._frames.feed(data)
            except PeerLostError as error:
                found.append(self._closed(str(error), is_unanswered(error)))
            except ProtocolError as error:
                found.append(self._closed(f"rank {self.peer} violated the control protocol: {error}"))
        return found

    def send(self, message: Abort | Bye | Challenge | Renewal) -> None:
        """Queue a message and try to write it. If the peer is gone, `receive()` reports it."""
        if not self._over:
            with self._record_unanswered():
                self._stream.send(encode(message))

    @property
    def wants_write(self) -> bool:
        return not self._over and self._stream.wants_write

    def flush(self) -> None:
        """Write queued bytes; call this when the socket is writable."""
        if not self._over:
            with self._record_unanswered():
                self._stream.flush()

    @contextlib.contextmanager
    def _record_unanswered(self) -> Iterator[None]:
        """Record whether a write failed because the peer did not answer: the socket reports that error only once."""
        try:
            yield
        except PeerLostError as error:
            self._unanswered |= is_unanswered(error)

    def close(self) -> None:
        """Close the connection and delete its keys. Send `Bye` before, or the peer treats it as a failure."""
        self._over = True
        self._stream.close()

    def abandon(self) -> None:
        """Close without sending anything: for a forked child, which must not send for its parent."""
        self._over = True
        self._stream.forget()

    def _parse(self, found: list[ControlMessage]) -> None:
        while (message := self._frames.next()) is not None:
            if isinstance(message, Failure):  # its join failed while GO was on the way to it
                message = Abort(message.reporter, -1, _NOT_ADMITTED, "", f"its join ended: {message.text}")
            assert isinstance(message, Abort | Bye | Challenge | Renewal)
            found.append(message)

    def _closed(self, reason: str, unanswered: bool = False) -> Closed:
        self._over = True
        return Closed(reason, unanswered or self._unanswered)
