"""Strict byte codecs: whatever is parsed re-encodes to identical bytes, or is refused."""

from __future__ import annotations

from ringfence.errors import ProtocolError


def number(value: int, width: int) -> bytes:
    """An unsigned big-endian integer."""
    return value.to_bytes(width, "big")


def text(value: str) -> bytes:
    """Printable ASCII after its 16-bit length."""
    encoded = value.encode("ascii")
    return number(len(encoded), 2) + encoded


def blob(value: bytes) -> bytes:
    """Bytes after their 32-bit length."""
    return number(len(value), 4) + value


def is_printable(value: str) -> bool:
    """Whether every character is printable ASCII: what text on the wire may hold."""
    return value.isascii() and value.isprintable()


def escape(value: str, limit: int) -> str:
    """`value` as at most `limit` printable ASCII characters. Text that already is comes back unchanged."""
    escaped = value
    if not is_printable(value):
        escaped = "".join(c if is_printable(c) else c.encode("unicode_escape").decode("ascii") for c in value[:limit])
    return escaped if len(escaped) <= limit else escaped[: limit - 3] + "..."


class Reader:
    """Takes fields off the front of one message body. Nothing is allocated from a length that the body cannot hold."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        at = self._at
        self._at = end = at + count
        part = self._data[at:end]
        if len(part) != count:
            raise ProtocolError(f"message ends early: {count} bytes wanted, {len(part)} left")
        return part

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "big")

    def text(self, limit: int) -> str:
        length = self.number(2)
        if length > limit:
            raise ProtocolError(f"text of {length} bytes where {limit} are allowed")
        value = self.take(length).decode("latin-1")  # one character a byte, so that none is lost before it is looked at
        if not is_printable(value):
            raise ProtocolError("text that is not printable ASCII")
        return value

    def blob(self, limit: int) -> bytes:
        length = self.number(4)
        if length > limit:
            raise ProtocolError(f"field of {length} bytes where {limit} are allowed")
        return self.take(length)

    def end(self) -> None:
        """Nothing may follow the last field."""
        if self._at != len(self._data):
            raise ProtocolError(f"{len(self._data) - self._at} bytes after the end of a message")
