"""The reader of DER that AMD's certificates need: one form of everything, and nothing beyond the end."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.admission.proofs import der


def value(tag: int, content: bytes) -> bytes:
    """As DER says: the shortest length."""
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    width = (size.bit_length() + 7) // 8
    return bytes([tag, 0x80 + width]) + size.to_bytes(width, "big") + content


def take_all(data: bytes, tag: int) -> None:
    reader = der.Reader(data)
    reader.take(tag)
    reader.end()


@given(st.integers(0, 0xFF), st.binary(max_size=700))
@settings(deadline=None)
def test_a_value_is_read_as_it_was_written(tag: int, content: bytes) -> None:
    written = value(tag, content)
    assert der.Reader(written).take(tag) == content
    assert der.Reader(written + b"more").whole(tag) == written
    for wrong in (written[:-1], written + b"\0"):
        with pytest.raises(ValueError, match=r"\w"):
            take_all(wrong, tag)


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "30",
        "3080",
        "308100",
        "30817f" + "00" * 127,
        "3082007f" + "00" * 127,
        "308300010000",
        "30ff",
        "3001",
        "0200",
    ],
)
def test_what_is_not_in_its_shortest_form_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        der.Reader(bytes.fromhex(wrong)).take(der.SEQUENCE)


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    reader = der.Reader(data)
    rest = data
    try:
        while reader.tag is not None:
            read = reader.whole(reader.tag)
            assert rest.startswith(read)
            rest = rest[len(read) :]
        reader.end()
        assert rest == b""
    except ValueError:
        pass


@pytest.mark.parametrize(
    ("tag", "text", "expected"),
    [
        (der.UTC_TIME, b"250807000000Z", datetime(2025, 8, 7, tzinfo=UTC)),
        (der.UTC_TIME, b"500101000000Z", datetime(1950, 1, 1, tzinfo=UTC)),
        (der.GENERALIZED_TIME, b"20510102030405Z", datetime(2051, 1, 2, 3, 4, 5, tzinfo=UTC)),
    ],
)
def test_times_have_two_forms(tag: int, text: bytes, expected: datetime) -> None:
    assert der.moment(der.Reader(value(tag, text))) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        value(der.UTC_TIME, b"250807000000"),
        value(der.UTC_TIME, b"2508070000Z"),
        value(der.UTC_TIME, b"251307000000Z"),
        value(der.UTC_TIME, b" 50807000000Z"),
        value(der.GENERALIZED_TIME, b"250807000000Z"),
        value(der.GENERALIZED_TIME, b"20250807000000.5Z"),
        value(der.INTEGER, b"1"),
    ],
)
def test_times_of_another_form_are_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        der.moment(der.Reader(wrong))


@given(st.integers(0, 255))
@settings(deadline=None)
def test_small_numbers_have_one_form(number: int) -> None:
    content = bytes([number]) if number < 0x80 else bytes([0, number])
    assert der.small_number(value(der.INTEGER, content)) == number
    for wrong in (b"\0" + content, content + content + content, b"\xff", b"\1\0", b""):
        with pytest.raises(ValueError, match=r"\w"):
            der.small_number(value(der.INTEGER, wrong))


def test_a_text_is_ascii() -> None:
    assert der.text(value(der.IA5_STRING, b"CN=x")) == "CN=x"
    for wrong in (value(der.IA5_STRING, b"\xff"), value(der.IA5_STRING, b"x") + b"x", value(0x0C, b"x")):
        with pytest.raises(ValueError, match=r"\w"):
            der.text(wrong)
