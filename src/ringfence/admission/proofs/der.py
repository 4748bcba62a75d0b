"""A strict DER reader for what `cryptography` does not parse for us.

It reads AMD's leaf certificates, whose serial number is 0: `cryptography` warns about that and will refuse it in a later
release. It reads the outer form of other certificates before `cryptography` computes with their keys, and the extensions of
NVIDIA's certificates, which `cryptography` returns as bytes. `cryptography.hazmat.asn1` could read these too, but its
documentation calls the interface unstable. Signatures, keys and all other parsing stay with `cryptography`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

BOOLEAN: Final = 0x01
INTEGER: Final = 0x02
BIT_STRING: Final = 0x03
OCTET_STRING: Final = 0x04
OBJECT_IDENTIFIER: Final = 0x06
UTF8_STRING: Final = 0x0C
IA5_STRING: Final = 0x16
UTC_TIME: Final = 0x17
GENERALIZED_TIME: Final = 0x18
SEQUENCE: Final = 0x30

_LONG_TAG: Final = 0x1F  # a tag number of more than one byte, which none of these structures has


class DerReader:
    """Reads the values of a DER encoding in order. Lengths must have their shortest form. All methods raise ValueError."""

    __slots__ = ("_data", "_position")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def tag(self) -> int | None:
        """The tag of the next value, or None at the end."""
        return self._data[self._position] if self._position < len(self._data) else None

    def content(self, tag: int) -> bytes:
        """Return the content of the next value, which must have this tag."""
        return self._next(tag)[1]

    def element(self, tag: int) -> bytes:
        """Return the next value with its tag and length."""
        return self._next(tag)[0]

    def open(self, tag: int) -> DerReader:
        """Return a reader of the content of the next value."""
        return DerReader(self.content(tag))

    def end(self) -> None:
        """Check that nothing follows."""
        if self._position != len(self._data):
            raise ValueError("trailing data after the DER value")

    def _next(self, tag: int) -> tuple[bytes, bytes]:
        start = self._position
        if self.tag != tag or tag & _LONG_TAG == _LONG_TAG or start + 2 > len(self._data):
            raise ValueError(f"expected a DER value with tag {tag:#04x}")
        first, position = self._data[start + 1], start + 2
        length = first
        if first >= 0x80:
            width = first - 0x80
            length = int.from_bytes(self._data[position : position + width], "big")
            position += width
            if not 1 <= width <= 2 or length < 0x80 or (width == 2 and length < 0x100):
                raise ValueError("a DER length is not in its shortest form")
        end = position + length
        if end > len(self._data):
            raise ValueError("a DER value is truncated")
        self._position = end
        return self._data[start:end], self._data[position:end]


def open_only(data: bytes, tag: int) -> DerReader:
    """Return a reader of what `only` returns."""
    return DerReader(only(data, tag))


def time(reader: DerReader) -> datetime:
    """Read the next value, which must be a time in one of the two forms that certificates use."""
    if reader.tag == UTC_TIME:
        text = reader.content(UTC_TIME).decode("ascii")
        if len(text) != 13:
            raise ValueError("a malformed time")
        text = ("19" if text[:2] >= "50" else "20") + text
    else:
        text = reader.content(GENERALIZED_TIME).decode("ascii")
    if len(text) != 15 or not text[:14].isdigit():
        raise ValueError("a malformed time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def only(data: bytes, tag: int) -> bytes:
    """Return the content of `data`, which must be one value with this tag. Raises ValueError."""
    reader = DerReader(data)
    content = reader.content(tag)
    reader.end()
    return content


def small_integer(data: bytes) -> int:
    """Decode a DER INTEGER from 0 to 255."""
    content = only(data, INTEGER)
    number = int.from_bytes(content, "big")
    if len(content) != (1 if number < 0x80 else 2) or number > 0xFF:
        raise ValueError("not an integer from 0 to 255")
    return number


def ia5_string(data: bytes) -> str:
    """Decode a DER IA5String."""
    return only(data, IA5_STRING).decode("ascii")
