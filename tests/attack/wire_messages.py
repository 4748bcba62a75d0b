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

_PLACE = Struct(">6xBxII32s")


class Kind(Enum):
    HELLO = HELLO_BYTES
    REPLY = REPLY_BYTES
    CONFIRM = CONFIRM_BYTES
    FRAME = 0  # as long as its header says


@dataclass(frozen=True)
class Unit:
    """One message of a link."""

    kind: Kind
    data: bytes

    @property
    def header(self) -> Header:
        return read_header(self.data[:HEADER_BYTES])


@dataclass(frozen=True)
class Place:
    """Which connection this is: a hello says so in the clear."""

    sender: int
    receiver: int
    lane: int
    group: bytes

    @classmethod
    def of(cls, hello: bytes) -> Place:
        lane, sender, receiver, group = _PLACE.unpack_from(hello)
        return cls(sender, receiver, lane, group)


class Wire:
    """One direction of a connection, as the attacker keeps track of it."""

    def __init__(self, number: int, from_dialler: bool) -> None:
        self.number = number  # of the connection
        self.from_dialler = from_dialler
        self.place: Place | None = None  # until the hello has passed
        self.passed: list[Unit] = []  # as the workers wrote them
        self.held = b""  # kept back, to be put behind the next unit
        self.script: list[bytes] | None = None  # what goes out in place of the units that come
        self.tape = Tape(from_dialler)


class Tape:
    """Cuts one direction of a connection into units, however the bytes come."""

    def __init__(self, from_dialler: bool) -> None:
        self.from_dialler = from_dialler
        self._opening = [Kind.HELLO, Kind.CONFIRM] if from_dialler else [Kind.REPLY]
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Unit]:
        """The units that are complete now."""
        self._bytes += data
        while (length := self._length()) and length <= len(self._bytes):
            kind = self._opening.pop(0) if self._opening else Kind.FRAME
            yield Unit(kind, bytes(self._bytes[:length]))
            del self._bytes[:length]

    def rest(self) -> bytes:
        """What came and is no complete unit."""
        return bytes(self._bytes)

    def _length(self) -> int:
        """How long the next unit is; 0 while that cannot be said."""
        if self._opening:
            return self._opening[0].value
        if len(self._bytes) < HEADER_BYTES:
            return 0
        try:
            return frame_bytes(read_header(bytes(self._bytes[:HEADER_BYTES])))
        except ProtocolError:
            raise AssertionError("a worker wrote a malformed header") from None
