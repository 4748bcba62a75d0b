"""The DER reader: every value has one encoding, and nothing is read beyond the end."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.admission.proofs import der


def value(tag: int, content: bytes) -> bytes:
    """Encode a value with the shortest length."""
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    width = (size.bit_length() + 7) // 8
    return bytes([tag, 0x80 + width]) + size.to_bytes(width, "big") + content


def read_only(data: bytes, tag: int) -> None:
    reader = der.DerReader(data)
    reader.content(tag)
    reader.end()


@given(st.integers(0, 0xFF).filter(lambda tag: tag & 0x1F != 0x1F), st.binary(max_size=700))
@settings(deadline=None)
def test_a_value_is_read_as_it_was_encoded(tag: int, content: bytes) -> None:
    written = value(tag, content)
    assert der.DerReader(written).content(tag) == content
    assert der.DerReader(written + b"more").element(tag) == written
    for wrong in (written[:-1], written + b"\0"):
        with pytest.raises(ValueError, match=r"\w"):
            read_only(wrong, tag)


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
def test_a_length_in_a_longer_form_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        der.DerReader(bytes.fromhex(wrong)).content(der.SEQUENCE)


@pytest.mark.parametrize("tag", [0x1F, 0x3F, 0x9F, 0xFF])
def test_a_tag_of_several_bytes_is_refused(tag: int) -> None:
    with pytest.raises(ValueError, match="expected a DER value"):
        der.DerReader(bytes([tag, 1, 0])).content(tag)


def test_trailing_data_is_refused() -> None:
    assert der.open_only(value(der.SEQUENCE, b"x"), der.SEQUENCE).tag == ord("x")
    with pytest.raises(ValueError, match="trailing data"):
        der.open_only(value(der.SEQUENCE, b"x") + b"\0", der.SEQUENCE)


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    reader = der.DerReader(data)
    rest = data
    try:
        while reader.tag is not None:
            read = reader.element(reader.tag)
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
def test_a_time_has_one_of_two_forms(tag: int, text: bytes, expected: datetime) -> None:
    assert der.time(der.DerReader(value(tag, text))) == expected


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
def test_a_malformed_time_is_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        der.time(der.DerReader(wrong))


@given(st.integers(0, 255))
@settings(deadline=None)
def test_a_small_integer_has_one_encoding(number: int) -> None:
    content = bytes([number]) if number < 0x80 else bytes([0, number])
    assert der.small_integer(value(der.INTEGER, content)) == number
    for wrong in (b"\0" + content, content + content + content, b"\xff", b"\1\0", b""):
        with pytest.raises(ValueError, match=r"\w"):
            der.small_integer(value(der.INTEGER, wrong))


def test_an_ia5_string_is_ascii() -> None:
    assert der.ia5_string(value(der.IA5_STRING, b"CN=x")) == "CN=x"
    for wrong in (value(der.IA5_STRING, b"\xff"), value(der.IA5_STRING, b"x") + b"x", value(0x0C, b"x")):
        with pytest.raises(ValueError, match=r"\w"):
            der.ia5_string(wrong)
