"""The formats of a checkpoint: values, indices and headers. Bytes that are accepted re-encode to the same bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import keys
from ringfence.checkpoint import envelope, index, values
from ringfence.checkpoint.envelope import Envelope, EnvelopeKind
from ringfence.checkpoint.index import Chunk, Index, Shard, StoredBytes, TensorItem, ValueItem
from ringfence.errors import CheckpointError, ProtocolError
from tests.unit.checkpoint_samples import VALUES, indices

HEADERS = st.builds(
    Envelope,
    kind=st.sampled_from(EnvelopeKind),
    id=st.binary(min_size=16, max_size=16),
    key_name=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40),
    wrapped=st.binary(max_size=60),
)


# -- values -----------------------------------------------------------------------------------------------------------


@given(VALUES)
def test_a_value_survives_with_its_types(value: Any) -> None:
    found = values.decode(values.encode(value, "value"))
    assert found == value and repr(found) == repr(value)


@given(st.binary(max_size=40))
def test_accepted_bytes_are_the_encoding_of_their_value(data: bytes) -> None:
    try:
        found = values.decode(data)
    except ProtocolError:
        return
    assert values.encode(found, "value") == data


@given(VALUES, st.data())
def test_a_truncated_value_is_refused(value: Any, data: st.DataObject) -> None:
    encoded = values.encode(value, "value")
    with pytest.raises(ProtocolError):
        values.decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


def test_special_floats_survive() -> None:
    found = values.decode(values.encode([math.inf, -0.0, math.nan], "value"))
    assert found[0] == math.inf and math.copysign(1, found[1]) == -1 and math.isnan(found[2])


class Strange(int):
    """Not an int by type, so its meaning would be lost."""


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), "state"),
        ({"a": [1, {2}]}, r"state\['a'\]\[1\] is a builtins.set"),
        ({1.5: 1}, "has the key 1.5"),
        ({True: 1}, "has the key True"),
        (Strange(3), "Strange"),
        (lambda: 0, "function"),
        (1j, "complex"),
        ("\ud800", "not Unicode"),
    ],
)
def test_other_types_are_refused_by_name(value: Any, where: str) -> None:
    with pytest.raises(CheckpointError, match=where):
        values.encode(value, "state")


def test_depth_is_limited() -> None:
    deep: Any = 1
    for _ in range(keys.VALUE_DEPTH):
        deep = [deep]
    assert values.decode(values.encode(deep, "deep")) == deep
    with pytest.raises(CheckpointError, match="nested"):
        values.encode([deep], "deep")
    with pytest.raises(ProtocolError):
        values.decode(bytes([values.LIST, 0, 0, 0, 1]) * 5000 + b"\0")


def test_a_key_twice_or_an_integer_in_a_longer_form_is_refused() -> None:
    one = bytes([values.INTEGER, 0, 0, 0, 1, 1])
    assert values.decode(one) == 1
    with pytest.raises(ProtocolError):
        values.decode(bytes([values.INTEGER, 0, 0, 0, 2, 0, 1]))
    with pytest.raises(ProtocolError):
        values.decode(bytes([values.DICT, 0, 0, 0, 2]) + (one + b"\0") * 2)


# -- the index --------------------------------------------------------------------------------------------------------


@given(indices())
def test_an_index_survives_its_encoding(found: Index) -> None:
    assert index.parse(found.encode()) == found
    assert index.parse(found.encode()).anchor == found.anchor


@given(indices(), st.data())
def test_a_changed_index_is_another_one_or_refused(found: Index, data: st.DataObject) -> None:
    encoded = bytearray(found.encode())
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] ^= data.draw(st.integers(1, 255))
    try:
        changed = index.parse(bytes(encoded))
    except ProtocolError:
        return
    assert changed.encode() == bytes(encoded) and changed.anchor != found.anchor


@given(indices(), st.data())
def test_a_truncated_index_is_refused(found: Index, data: st.DataObject) -> None:
    encoded = found.encode()
    with pytest.raises(ProtocolError):
        index.parse(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


SHARDS = (Shard(b"a" * 16, 100),)


def tensor(*chunks: Chunk, shape: tuple[int, ...] = (4, 2), dtype: str = "float32") -> TensorItem:
    return TensorItem(("tensor",), dtype, shape, chunks)


def chunk(row: int, rows: int, offset: int = 0, shard: int = 0) -> Chunk:
    return Chunk((row, 0), (rows, 2), StoredBytes(shard, offset, rows * 8))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ((tensor(chunk(0, 3)),), "do not cover"),
        ((tensor(chunk(2, 2), chunk(0, 2)),), "not ordered"),
        ((tensor(chunk(0, 2), chunk(0, 2)),), "not ordered"),
        ((tensor(chunk(0, 4), chunk(4, 0)),), "empty"),
        ((tensor(chunk(1, 4)),), "not within its tensor"),
        ((tensor(chunk(0, 4, 69)),), "not within its shard"),
        ((tensor(chunk(0, 4, 0, 1)),), "not within its shard"),
        ((tensor(chunk(0, 4), dtype="object"),), "dtype"),
        ((tensor(shape=(1 << 62, 1 << 62)),), "elements"),
        ((ValueItem(("b",), StoredBytes(0, 0, 1)), ValueItem(("a",), StoredBytes(0, 0, 1))), "not ordered by name"),
        ((ValueItem(("a", "b"), StoredBytes(0, 0, 1)), ValueItem(("a.b",), StoredBytes(0, 0, 1))), "one name"),
        ((ValueItem(("a",), StoredBytes(0, 0, 0)),), "not within its shard"),
        ((ValueItem((1, "a"), StoredBytes(0, 0, 1)),), "begins with a position"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(items: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        index.parse(Index(b"s" * 16, SHARDS, items).encode())


def test_a_shard_id_twice_is_refused() -> None:
    with pytest.raises(ProtocolError, match="twice"):
        index.parse(Index(b"s" * 16, SHARDS * 2, ()).encode())


def test_an_index_of_another_version_is_refused() -> None:
    with pytest.raises(ProtocolError, match="version 3"):
        index.parse(b"\3" + Index(b"s" * 16, SHARDS, ()).encode()[1:])


def test_the_head_of_a_record_follows_the_items() -> None:
    """An index without one keeps its bytes, and so its anchor."""
    plain, headed = Index(b"s" * 16, SHARDS, ()), Index(b"s" * 16, SHARDS, (), head=b"h" * 32)
    assert headed.encode() == b"\2" + plain.encode()[1:] + b"h" * 32
    assert headed.anchor != plain.anchor
    for wrong in (
        headed.encode()[:-1],
        headed.encode() + b"h",
        b"\1" + headed.encode()[1:],
        b"\2" + plain.encode()[1:],
    ):
        with pytest.raises(ProtocolError):
            index.parse(wrong)


# -- the header -------------------------------------------------------------------------------------------------------


@given(HEADERS, st.binary(max_size=20))
def test_a_header_survives_whatever_follows(header: Envelope, rest: bytes) -> None:
    encoded = header.encode()
    assert envelope.parse(encoded + rest) == (header, len(encoded))


@given(st.binary(max_size=80))
def test_any_bytes_are_a_header_or_a_protocol_error(data: bytes) -> None:
    for start in (b"", envelope.MAGIC + b"\1\1"):
        try:
            header, length = envelope.parse(start + data)
        except ProtocolError:
            continue
        assert header.encode() == (start + data)[:length]
