"""The messages of admission, as types with strict codecs, and the frames they travel in (spec/admission.md).

frame = type (1 byte) · length of the body (4 bytes) · body
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import ClassVar, Final, Protocol, Self

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.entry import LISTING_BYTES, WORLD_LIMIT, Entry, Listing
from ringfence.errors import ProtocolError
from ringfence.release import RELEASE

MAGIC: Final = b"RFA"
HEADER_BYTES: Final = 5
ENTRIES_PER_MESSAGE: Final = 256
WAITING_NAMED: Final = 16


class Message(Protocol):
    """The content of a frame."""

    TYPE: ClassVar[int]

    def body(self) -> bytes: ...

    @classmethod
    def read(cls, reader: encoding.Reader) -> Self: ...


class Reason(IntEnum):
    """Why a peer was refused."""

    RUN = 1
    GENERATION = 2
    RANK = 3
    WORLD_SIZE = 4
    POLICY = 5
    SUITE = 6
    KEY = 7
    PROOF = 8
    VERSION = 9


_REASONS: Final = frozenset(Reason)


# -- one edge of the tree -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The sender's claimed entry and what it supports. It is trusted only after a proof that covers it was verified."""

    TYPE: ClassVar[int] = 1

    entry: Entry
    policy_digest: bytes
    suites: tuple[int, ...]
    kinds: tuple[int, ...]  # of proof that the sender accepts
    release: str = RELEASE  # of ringfence, for messages
    version: int = keys.VERSION

    def __post_init__(self) -> None:
        if len(self.policy_digest) != keys.DIGEST_BYTES:
            raise ProtocolError("a policy digest has the wrong length")
        _check_set("suites", self.suites)
        _check_set("kinds of proof", self.kinds)

    def body(self) -> bytes:
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        """Cached for all handshakes of a worker, and for the digest."""
        return b"".join(
            (
                MAGIC,
                encoding.number(self.version, 1),
                self.entry.encode(),
                self.policy_digest,
                encoding.number(len(self.suites), 1) + bytes(self.suites),
                encoding.number(len(self.kinds), 1) + bytes(self.kinds),
                encoding.text(self.release),
            )
        )

    @classmethod
    def read(cls, reader: encoding.Reader) -> Hello:
        if reader.take(len(MAGIC)) != MAGIC:
            raise ProtocolError("not a ringfence hello")
        return cls(
            version=reader.number(1),
            entry=Entry.read(reader),
            policy_digest=reader.take(keys.DIGEST_BYTES),
            suites=tuple(reader.take(reader.number(1))),
            kinds=tuple(reader.take(reader.number(1))),
            release=reader.text(keys.RELEASE_BYTES),
        )

    @cached_property
    def digest(self) -> bytes:
        return keys.digest(keys.HELLO_DIGEST, self.body())


@dataclass(frozen=True)
class Proof:
    """The sender's proof, over the binding of this connection."""

    TYPE: ClassVar[int] = 2

    kind: int
    proof: bytes = field(repr=False)

    def body(self) -> bytes:
        return encoding.number(self.kind, 1) + encoding.blob(self.proof)

    @classmethod
    def read(cls, reader: encoding.Reader) -> Self:
        return cls(kind=reader.number(1), proof=reader.blob(keys.PROOF_LIMIT_BYTES))


@dataclass(frozen=True)
class Admit:
    """The sender has verified the receiver and admits it."""

    TYPE: ClassVar[int] = 3

    def body(self) -> bytes:
        return b""

    @classmethod
    def read(cls, reader: encoding.Reader) -> Admit:
        return cls()


@dataclass(frozen=True)
class Refuse:
    """The sender does not admit the receiver. The text is for people; it is trusted only from a peer with a verified proof."""

    TYPE: ClassVar[int] = 4

    reason: Reason
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", encoding.escape(self.text, keys.REFUSAL_TEXT_BYTES))

    def body(self) -> bytes:
        return encoding.number(self.reason, 1) + encoding.text(self.text)

    @classmethod
    def read(cls, reader: encoding.Reader) -> Refuse:
        code = reader.number(1)
        if code not in _REASONS:
            raise ProtocolError(f"a refusal for unknown reason {code}")
        return cls(reason=Reason(code), text=reader.text(keys.REFUSAL_TEXT_BYTES))


# -- the tree -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entries:
    """Up: the workers admitted in the sender's subtree, itself included."""

    TYPE: ClassVar[int] = 16

    listings: tuple[Listing, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.listings) <= ENTRIES_PER_MESSAGE:
            raise ProtocolError(f"{len(self.listings)} entries in one message")

    def body(self) -> bytes:
        return encoding.number(len(self.listings), 2) + b"".join(listing.encode() for listing in self.listings)

    @classmethod
    def read(cls, reader: encoding.Reader) -> Entries:
        count = reader.number(2)
        if not 1 <= count <= ENTRIES_PER_MESSAGE:
            raise ProtocolError(f"{count} entries in one message")
        return cls(tuple(Listing.read(reader) for _ in range(count)))


@dataclass(frozen=True)
class Waiting:
    """Down, while the roster is incomplete: the missing ranks, so that any worker can name them at its deadline."""

    TYPE: ClassVar[int] = 17

    missing: int
    ranks: tuple[int, ...]  # the first of them

    def __post_init__(self) -> None:
        if len(self.ranks) > WAITING_NAMED or len(self.ranks) > self.missing or self.missing > WORLD_LIMIT:
            raise ProtocolError("a malformed report of missing ranks")

    def body(self) -> bytes:
        ranks = b"".join(encoding.number(rank, 4) for rank in self.ranks)
        return encoding.number(self.missing, 4) + encoding.number(len(self.ranks), 1) + ranks

    @classmethod
    def read(cls, reader: encoding.Reader) -> Waiting:
        missing = reader.number(4)
        count = reader.number(1)
        return cls(missing, tuple(reader.number(4) for _ in range(min(count, WAITING_NAMED + 1))))


@dataclass(frozen=True)
class Welcome:
    """Down: the whole roster, the cipher suite, the schedule table and the session's secret."""

    TYPE: ClassVar[int] = 18

    suite: int
    session_secret: keys.Secret
    table: bytes
    listings: tuple[Listing, ...]

    def body(self) -> bytes:
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        """Cached for all children: the roster is the only message that grows with the world."""
        return b"".join(
            (
                encoding.number(self.suite, 1),
                self.session_secret.reveal(),
                encoding.blob(self.table),
                encoding.number(len(self.listings), 4),
                *(listing.encode() for listing in self.listings),
            )
        )

    @classmethod
    def read(cls, reader: encoding.Reader) -> Welcome:
        suite = reader.number(1)
        secret = keys.Secret(reader.take(keys.SECRET_BYTES))
        table = reader.blob(keys.TABLE_LIMIT_BYTES)
        count = reader.number(4)
        if not 1 <= count <= WORLD_LIMIT:
            raise ProtocolError(f"a roster of {count} workers")
        return cls(suite, secret, table, tuple(Listing.read(reader) for _ in range(count)))


@dataclass(frozen=True)
class Acknowledge:
    """Up: the sender and all workers below it have the roster with this digest.

    `signatures` are those of the workers among them that sign the roster, in the order of ranks.
    """

    TYPE: ClassVar[int] = 19

    roster_digest: bytes
    signatures: tuple[bytes, ...] = ()

    def body(self) -> bytes:
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        """Cached for all children: a Go has the signatures of the whole world."""
        count = encoding.number(len(self.signatures), 4)
        return b"".join((self.roster_digest, count, *map(encoding.blob, self.signatures)))

    @classmethod
    def read(cls, reader: encoding.Reader) -> Self:
        digest, count = reader.take(keys.DIGEST_BYTES), reader.number(4)
        if count > WORLD_LIMIT:
            raise ProtocolError(f"{count} signatures of a roster")
        return cls(digest, tuple(reader.blob(keys.SIGNATURE_BYTES) for _ in range(count)))


@dataclass(frozen=True)
class Go(Acknowledge):
    """Down: all workers have the roster with this digest, and these are their signatures; the session begins."""

    TYPE: ClassVar[int] = 20


@dataclass(frozen=True)
class Failure:
    """Up or down: the session will not begin, and why. It comes from an admitted worker and is trusted."""

    TYPE: ClassVar[int] = 21

    reporter: int
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", encoding.escape(self.text, keys.REFUSAL_TEXT_BYTES))

    def body(self) -> bytes:
        return encoding.number(self.reporter, 4) + encoding.text(self.text)

    @classmethod
    def read(cls, reader: encoding.Reader) -> Failure:
        return cls(reader.number(4), reader.text(keys.REFUSAL_TEXT_BYTES))


HANDSHAKE: Final[Mapping[int, type[Message]]] = {kind.TYPE: kind for kind in (Hello, Proof, Admit, Refuse)}
TREE: Final[Mapping[int, type[Message]]] = {
    kind.TYPE: kind for kind in (Entries, Waiting, Welcome, Acknowledge, Go, Failure)
}


def tree_frame_limit(world_size: int) -> int:
    """Return the longest body that an admitted peer may send: a roster of this world."""
    return 1 + keys.SECRET_BYTES + 4 + keys.TABLE_LIMIT_BYTES + 4 + world_size * LISTING_BYTES


# -- frames ---------------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """Encode a message as a frame."""
    body = message.body()
    return encoding.number(message.TYPE, 1) + encoding.number(len(body), 4) + body


def decode(types: Mapping[int, type[Message]], kind: int, body: bytes) -> Message:
    """Decode a frame of one of the given types. Raises ProtocolError."""
    if kind not in types:
        raise ProtocolError(f"a message of type {kind}, which is not allowed here")
    reader = encoding.Reader(body)
    message = types[kind].read(reader)
    reader.end()
    return message


class MessageSplitter:
    """Splits a byte stream into messages. Buffers only what was received, whatever a length field claims."""

    def __init__(self, types: Mapping[int, type[Message]], limit: int) -> None:
        self._types = types
        self._limit = limit
        self._buffer = bytearray()

    def allow(self, types: Mapping[int, type[Message]], limit: int) -> None:
        """Change the message types and the length limit for what follows."""
        self._types = types
        self._limit = limit

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Message | None:
        """Return the next complete message, or None if more bytes are needed. Raises ProtocolError."""
        if len(self._buffer) < HEADER_BYTES:
            return None
        kind = self._buffer[0]
        length = int.from_bytes(self._buffer[1:HEADER_BYTES], "big")
        if kind not in self._types:
            raise ProtocolError(f"a message of type {kind}, which is not allowed here")
        if length > self._limit:
            raise ProtocolError(f"a message of {length} bytes, where at most {self._limit} are allowed")
        if len(self._buffer) < HEADER_BYTES + length:
            return None
        body = bytes(self._buffer[HEADER_BYTES : HEADER_BYTES + length])
        del self._buffer[: HEADER_BYTES + length]
        return decode(self._types, kind, body)

    def rest(self) -> bytes:
        """Remove and return the bytes that were not consumed, for the next reader of this stream."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest


def _check_set(name: str, values: tuple[int, ...]) -> None:
    """Check that a set has its only encoding: ascending, without duplicates, not empty."""
    ordered = all(a < b for a, b in itertools.pairwise(values))
    if not values or not ordered or not all(0 < value <= 0xFF for value in values):
        raise ProtocolError(f"the {name} are not an ascending list")
