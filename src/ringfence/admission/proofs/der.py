"""A strict reader of DER, as much of it as AMD's leaf certificates need.

All of them have the serial number 0, which `cryptography` reads with a warning now and will refuse one day. So they are taken
apart here; signatures, keys and everything above the leaf stay with `cryptography`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

INTEGER: Final = 0x02
BIT_STRING: Final = 0x03
OCTET_STRING: Final = 0x04
OBJECT_IDENTIFIER: Final = 0x06
IA5_STRING: Final = 0x16
UTC_TIME: Final = 0x17
GENERALIZED_TIME: Final = 0x18
SEQUENCE: Final = 0x30
BOOLEAN: Final = 0x01


class Reader:
    """Takes values off the front. Every length has its shortest form, and none goes beyond the end. Raises ValueError."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def tag(self) -> int | None:
        """Of the next value; None at the end."""
        return self._data[self._at] if self._at < len(self._data) else None

    def take(self, tag: int) -> bytes:
        """The content of the next value, which must have this tag."""
        return self._next(tag)[1]

    def whole(self, tag: int) -> bytes:
        """The next value with its tag and length."""
        return self._next(tag)[0]

    def open(self, tag: int) -> Reader:
        return Reader(self.take(tag))

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("bytes that belong to nothing")

    def _next(self, tag: int) -> tuple[bytes, bytes]:
        start = self._at
        if self.tag != tag or start + 2 > len(self._data):
            raise ValueError(f"no value of tag {tag:#04x} where one is due")
        first, place = self._data[start + 1], start + 2
        length = first
        if first >= 0x80:
            width = first - 0x80
            length = int.from_bytes(self._data[place : place + width], "big")
            place += width
            if not 1 <= width <= 2 or length < 0x80 or (width == 2 and length < 0x100):
                raise ValueError("a length that is not in its shortest form")
        end = place + length
        if end > len(self._data):
            raise ValueError("a value that ends early")
        self._at = end
        return self._data[start:end], self._data[place:end]


def moment(reader: Reader) -> datetime:
    """The next value, which is a time in one of the two forms that certificates have."""
    if reader.tag == UTC_TIME:
        text = reader.take(UTC_TIME).decode("ascii")
        if len(text) != 13:
            raise ValueError("a time of the wrong form")
        text = ("19" if text[:2] >= "50" else "20") + text
    else:
        text = reader.take(GENERALIZED_TIME).decode("ascii")
    if len(text) != 15 or not text[:14].isdigit():
        raise ValueError("a time of the wrong form")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def small_number(value: bytes) -> int:
    """A whole DER INTEGER from 0 to 255."""
    reader = Reader(value)
    content = reader.take(INTEGER)
    reader.end()
    number = int.from_bytes(content, "big")
    if len(content) != (1 if number < 0x80 else 2) or number > 0xFF:
        raise ValueError("not a number from 0 to 255")
    return number


def text(value: bytes) -> str:
    """A whole DER IA5String."""
    reader = Reader(value)
    content = reader.take(IA5_STRING)
    reader.end()
    return content.decode("ascii")
