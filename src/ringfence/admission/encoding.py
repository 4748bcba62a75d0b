"""Strict binary encoding: bytes that are accepted re-encode to identical bytes."""

from __future__ import annotations

from ringfence.errors import ProtocolError


def number(value: int, width: int) -> bytes:
    """Encode an unsigned big-endian integer."""
    return value.to_bytes(width, "big")


def text(value: str) -> bytes:
    """Encode printable ASCII after its 16-bit length."""
    encoded = value.encode("ascii")
    return number(len(encoded), 2) + encoded


def blob(value: bytes) -> bytes:
    """Encode bytes after their 32-bit length."""
    return number(len(value), 4) + value


def is_printable(value: str) -> bool:
    """Whether every character is printable ASCII, as text on the wire must be."""
    return value.isascii() and value.isprintable()


def escape(value: str, limit: int) -> str:
    """Return `value` as at most `limit` printable ASCII characters; text that already is one is unchanged."""
    escaped = value
    if not is_printable(value):
        escaped = "".join(c if is_printable(c) else c.encode("unicode_escape").decode("ascii") for c in value[:limit])
    return escaped if len(escaped) <= limit else escaped[: limit - 3] + "..."


class Reader:
    """Reads the fields of one message in order. All methods raise ProtocolError.

    No memory is allocated for a length that exceeds the message.
    """

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        at = self._at
        self._at = end = at + count
        part = self._data[at:end]
        if len(part) != count:
            raise ProtocolError(f"truncated message: {count} bytes expected, {len(part)} left")
        return part

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "big")

    def text(self, limit: int) -> str:
        length = self.number(2)
        if length > limit:
            raise ProtocolError(f"a text of {length} bytes, where at most {limit} are allowed")
        value = self.take(length).decode("latin-1")  # one character for each byte; checked below
        if not is_printable(value):
            raise ProtocolError("a text that is not printable ASCII")
        return value

    def blob(self, limit: int) -> bytes:
        length = self.number(4)
        if length > limit:
            raise ProtocolError(f"a field of {length} bytes, where at most {limit} are allowed")
        return self.take(length)

    def rest(self) -> bytes:
        """Take all that follows."""
        return self.take(len(self._data) - self._at)

    def end(self) -> None:
        """Check that nothing follows."""
        if self._at != len(self._data):
            raise ProtocolError(f"{len(self._data) - self._at} bytes of trailing data after a message")
