"""Invariant: whatever is parsed re-encodes to identical bytes, or is refused with a ProtocolError."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.admission import encoding
from ringfence.admission.entry import Entry
from ringfence.admission.messages import HANDSHAKE, HEADER_BYTES, TREE, Message, MessageSplitter, decode, encode
from ringfence.admission.renewal import Challenge, Renewal
from ringfence.errors import ProtocolError
from ringfence.runtime.aborts import ABORT_CODES
from ringfence.runtime.control import Abort, Bye
from tests.unit.admission_samples import entries, messages, ranks, texts, worker

CONTROL: dict[int, type[Message]] = {each.TYPE: each for each in (Abort, Bye, Challenge, Renewal)}
ALL: dict[int, type[Message]] = {**HANDSHAKE, **TREE, **CONTROL}

suspects = st.one_of(st.just(-1), st.integers(0, 2**32 - 2))
aborts = st.builds(
    Abort, st.integers(0, 2**32 - 2), suspects, st.integers(0, 255), st.text(max_size=300), st.text(max_size=300)
)
renewals = st.builds(Renewal, st.integers(0, 255), st.binary(max_size=300))
challenges = st.builds(Challenge, st.binary(min_size=32, max_size=32))
anything = st.one_of(messages, aborts, challenges, renewals, st.builds(Bye, ranks))


def parse(frame: bytes) -> Message:
    return decode(ALL, frame[0], frame[HEADER_BYTES:])


@given(entries())
def test_an_entry_round_trips(entry: Entry) -> None:
    reader = encoding.Reader(entry.encode())
    assert Entry.read(reader) == entry
    reader.end()


@given(anything)
def test_a_message_round_trips(message: Message) -> None:
    assert parse(encode(message)) == message


@given(anything, st.data())
def test_a_flipped_bit_is_refused_or_reencodes_identically(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    if len(frame) == HEADER_BYTES:
        return
    at = data.draw(st.integers(HEADER_BYTES, len(frame) - 1))
    frame[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        other = parse(bytes(frame))
    except ProtocolError:
        return
    assert encode(other) == frame


@given(st.sampled_from(sorted(ALL)), st.binary(max_size=400))
def test_random_bytes_are_refused_or_reencode_identically(kind: int, body: bytes) -> None:
    try:
        message = decode(ALL, kind, body)
    except ProtocolError:
        return
    assert encode(message)[HEADER_BYTES:] == body


@given(anything, st.integers(1, 4))
def test_a_longer_or_shorter_body_is_refused(message: Message, count: int) -> None:
    frame = encode(message)
    with pytest.raises(ProtocolError):
        parse(frame + b"\0" * count)
    if len(frame) - HEADER_BYTES >= count:
        with pytest.raises(ProtocolError):
            parse(frame[:-count])


@given(st.lists(messages, max_size=3), st.integers(1, 200))
def test_frames_do_not_depend_on_how_the_stream_is_split(sent: list[Message], piece: int) -> None:
    stream = b"".join(encode(message) for message in sent)
    frames, found = MessageSplitter(ALL, 1 << 20), []
    for at in range(0, len(stream), piece):
        frames.feed(stream[at : at + piece])
        while (message := frames.next()) is not None:
            found.append(message)
    assert found == sent
    assert frames.rest() == b""


def test_a_length_is_checked_before_its_bytes_arrive() -> None:
    frames = MessageSplitter(HANDSHAKE, 1000)
    frames.feed(bytes([1]) + (1001).to_bytes(4, "big"))
    with pytest.raises(ProtocolError, match="1001 bytes, where at most 1000"):
        frames.next()


def test_a_type_is_checked_before_its_bytes_arrive() -> None:
    frames = MessageSplitter(HANDSHAKE, 1000)
    frames.feed(bytes([18]) + (900).to_bytes(4, "big"))
    with pytest.raises(ProtocolError, match="type 18"):
        frames.next()


def test_a_hello_of_another_version_is_read_in_the_same_form() -> None:
    frame = bytearray(encode(worker(1).hello))
    frame[HEADER_BYTES + 3] = 9
    assert parse(bytes(frame)) == replace(worker(1).hello, version=9)


@given(st.text(max_size=80), st.integers(4, 60))
def test_escaping_bounds_text_and_changes_it_once(value: str, limit: int) -> None:
    escaped = encoding.escape(value, limit)
    assert len(escaped) <= limit
    assert encoding.is_printable(escaped) or escaped == ""
    assert encoding.escape(escaped, limit) == escaped


@given(texts(0, 40))
def test_plain_text_is_not_escaped(value: str) -> None:
    assert encoding.escape(value, 40) == value


def test_the_specification_lists_every_code_of_an_abort() -> None:
    text = (Path(__file__).parents[2] / "spec" / "admission.md").read_text()
    table = text.partition("| code of an Abort |")[2].partition("\n\n")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == list(range(len(ABORT_CODES)))
