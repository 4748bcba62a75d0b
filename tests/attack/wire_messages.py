"""What an attacker on the wire sees of a link: where each handshake message and each frame begins and ends.

Lengths and headers travel in the clear, so no key is needed for this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from struct import Struct

from ringfence.errors import ProtocolError
from ringfence.link.frames import HEADER_BYTES, Header, frame_bytes, read_header
from ringfence.link.hello import CONFIRM_BYTES, HELLO_BYTES, REPLY_BYTES

_CONNECTION_ID = Struct(">6xBBII32s")


class Kind(Enum):
    """The kinds of messages, with their lengths."""

    HELLO = HELLO_BYTES
    REPLY = REPLY_BYTES
    CONFIRM = CONFIRM_BYTES
    FRAME = 0  # as long as its header says


@dataclass(frozen=True)
class WireMessage:
    """One message of a link."""

    kind: Kind
    data: bytes

    @property
    def header(self) -> Header:
        return read_header(self.data[:HEADER_BYTES])


@dataclass(frozen=True)
class ConnectionId:
    """Which connection this is, as its hello says in the clear."""

    sender: int
    receiver: int
    lane: int
    channel: int
    group: bytes

    @classmethod
    def of(cls, hello: bytes) -> ConnectionId:
        lane, channel, sender, receiver, group = _CONNECTION_ID.unpack_from(hello)
        return cls(sender, receiver, lane, channel, group)


class Wire:
    """One direction of a connection, as the attacker keeps track of it."""

    def __init__(self, number: int, from_dialler: bool) -> None:
        self.number = number  # of the connection
        self.from_dialler = from_dialler
        self.connection: ConnectionId | None = None  # until the hello has passed
        self.passed: list[WireMessage] = []  # as the workers wrote them
        self.delayed = b""  # to be sent after the next message
        self.replacement: list[bytes] | None = None  # what is sent instead of the messages that follow
        self.splitter = MessageSplitter(from_dialler)


class MessageSplitter:
    """Splits one direction of a connection into messages, in whatever portions the bytes arrive."""

    def __init__(self, from_dialler: bool) -> None:
        self.from_dialler = from_dialler
        self._handshake = [Kind.HELLO, Kind.CONFIRM] if from_dialler else [Kind.REPLY]
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[WireMessage]:
        """Yield the messages that are complete now."""
        self._bytes += data
        while (length := self._length()) and length <= len(self._bytes):
            kind = self._handshake.pop(0) if self._handshake else Kind.FRAME
            yield WireMessage(kind, bytes(self._bytes[:length]))
            del self._bytes[:length]

    def remainder(self) -> bytes:
        """Return the bytes of an incomplete message."""
        return bytes(self._bytes)

    def _length(self) -> int:
        """Return the length of the next message; 0 while it is unknown."""
        if self._handshake:
            return self._handshake[0].value
        if len(self._bytes) < HEADER_BYTES:
            return 0
        try:
            return frame_bytes(read_header(bytes(self._bytes[:HEADER_BYTES])))
        except ProtocolError:
            raise AssertionError("a worker wrote a malformed header") from None
