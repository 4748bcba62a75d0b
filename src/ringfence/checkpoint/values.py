"""Values that are not tensors, as bytes (spec/checkpoint.md, Values): numbers, texts, bytes, lists, tuples and dicts.

Bytes that are accepted re-encode to identical bytes. Decoding calls no code of the value's own, as unpickling would.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from ringfence import keys
from ringfence.admission.encoding import Reader, blob, number
from ringfence.errors import CheckpointError, ProtocolError

NONE, FALSE, TRUE, INTEGER, FLOAT, TEXT, BYTES, LIST, TUPLE, DICT = range(10)

_DOUBLE: Final = struct.Struct(">d")


def encode(value: Any, name: str) -> bytes:
    """Return a value as bytes. `name` says in messages where it is.

    Raises CheckpointError for a type that has no encoding; the message names the place.
    """
    parts: list[bytes] = []
    _write(parts.append, value, name, keys.VALUE_DEPTH)
    return b"".join(parts)


def _write(add: Callable[[bytes], None], value: Any, name: str, depth: int) -> None:
    kind = type(value)
    if value is None or kind is bool:
        add(number(NONE if value is None else TRUE if value else FALSE, 1))
    elif kind is int:
        add(number(INTEGER, 1) + blob(value.to_bytes(_width(value), "big", signed=True)))
    elif isinstance(value, float):  # NumPy's float64 is one, and learning rates often are NumPy's
        add(number(FLOAT, 1) + _DOUBLE.pack(value))
    elif kind is str:
        add(number(TEXT, 1) + blob(_utf8(value, name)))
    elif kind is bytes:
        add(number(BYTES, 1) + blob(value))
    elif kind in (list, tuple, dict):
        if not depth:
            raise CheckpointError(f"{name} is nested more than {keys.VALUE_DEPTH} deep: save it in several parts")
        add(number(DICT if kind is dict else LIST if kind is list else TUPLE, 1) + number(len(value), 4))
        if kind is dict:
            _write_dict(add, value, name, depth - 1)
        else:
            for place, each in enumerate(value):
                _write(add, each, f"{name}[{place}]", depth - 1)
    else:
        raise CheckpointError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which a sealed checkpoint cannot hold: nothing in it is "
            "pickled. Save tensors, numbers, texts, bytes, None, and lists, tuples and dicts of them; convert this one first"
        )


def _write_dict(add: Callable[[bytes], None], value: dict[Any, Any], name: str, depth: int) -> None:
    for key, each in value.items():
        if type(key) not in (str, int):
            raise CheckpointError(f"{name} has the key {key!r}: the keys of a dict must be texts or integers")
        _write(add, key, name, depth)
        _write(add, each, f"{name}[{key!r}]", depth)


def _utf8(value: str, name: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{name} has a text that is not Unicode: save its bytes instead") from error


def decode(data: bytes) -> Any:
    """Return the value of bytes that `encode` made. Raises ProtocolError for any others."""
    reader = Reader(data)
    value = _read(reader, len(data), keys.VALUE_DEPTH)
    reader.end()
    return value


def _read(reader: Reader, limit: int, depth: int) -> Any:
    """Read one value; no count or length in it may exceed `limit`."""
    kind = reader.number(1)
    if kind <= TRUE:
        return (None, False, True)[kind]
    if kind == FLOAT:
        return _DOUBLE.unpack(reader.take(8))[0]
    if kind == INTEGER:
        return _integer(reader.blob(limit))
    if kind == TEXT:
        return text_of(reader.blob(limit))
    if kind == BYTES:
        return reader.blob(limit)
    if kind > DICT:
        raise ProtocolError(f"a value of unknown type {kind}")
    count = reader.number(4)
    if count > limit or not depth:
        raise ProtocolError(f"a value of {count} parts, or nested too deep")
    if kind != DICT:
        found = [_read(reader, limit, depth - 1) for _ in range(count)]
        return found if kind == LIST else tuple(found)
    pairs: dict[Any, Any] = {}
    for _ in range(count):
        key = _read(reader, limit, 0)
        if type(key) not in (str, int) or key in pairs:
            raise ProtocolError("a dict with a key twice, or one that is not a text or an integer")
        pairs[key] = _read(reader, limit, depth - 1)
    return pairs


def _integer(data: bytes) -> int:
    value = int.from_bytes(data, "big", signed=True)
    if len(data) != _width(value):
        raise ProtocolError("an integer that is not encoded in its shortest form")
    return value


def _width(value: int) -> int:
    """Return how many bytes an integer needs, with its sign."""
    return (value if value >= 0 else ~value).bit_length() // 8 + 1


def text_of(data: bytes) -> str:
    """Return UTF-8 bytes as a text. Raises ProtocolError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("a text that is not UTF-8") from error
