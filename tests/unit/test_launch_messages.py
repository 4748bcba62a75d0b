"""Calls, answers and notices: strict codecs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.entry import GENERATION_BYTES
from ringfence.admission.messages import MessageSplitter, decode, encode
from ringfence.errors import ProtocolError
from ringfence.launch.messages import FROM_HOST, TO_HOST, AgentCall, Answer, CallResult, Notice, Operation

TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=GENERATION_BYTES)
PARTS = st.lists(st.binary(max_size=40), max_size=5).map(tuple)
CALLS = st.builds(
    AgentCall,
    number=st.integers(0, 2**32 - 1),
    operation=st.sampled_from(Operation),
    scope=TEXT,
    milliseconds=st.integers(0, keys.CALL_LIMIT_MILLISECONDS),
    parts=PARTS,
)
ANSWERS = st.builds(Answer, number=st.integers(0, 2**32 - 1), result=st.sampled_from(CallResult), parts=PARTS)
NOTICES = st.builds(
    Notice, generation=TEXT, ended=st.booleans(), waiting=st.booleans(), finished=st.booleans(), closed=TEXT
)


@given(CALLS)
def test_a_call_survives_its_encoding(call: AgentCall) -> None:
    frames = MessageSplitter(TO_HOST, keys.CALL_BYTES)
    frames.feed(encode(call))
    assert frames.next() == call
    assert frames.next() is None


@given(st.one_of(ANSWERS, NOTICES))
def test_answers_and_notices_survive_their_encoding(message: Answer | Notice) -> None:
    frames = MessageSplitter(FROM_HOST, keys.CALL_BYTES)
    frames.feed(encode(message))
    assert frames.next() == message


@given(CALLS, st.data())
def test_a_truncated_call_is_refused(call: AgentCall, data: st.DataObject) -> None:
    body = call.body()
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(ProtocolError):
        decode(TO_HOST, AgentCall.TYPE, body[:cut])


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    for kind in (AgentCall, Answer, Notice):
        reader = encoding.Reader(data)
        try:
            message = kind.read(reader)
            reader.end()
        except ProtocolError:
            continue
        if not isinstance(message, Notice):  # JSON has several encodings
            assert message.body() == data


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{",
        b"null",
        b"[" * 100_000,
        json.dumps({"generation": 1}).encode(),
        json.dumps({"generation": "g", "ended": 1, "waiting": False, "finished": False, "closed": ""}).encode(),
    ],
)
def test_a_notice_with_other_json_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        Notice.read(encoding.Reader(body))


def test_limits_of_a_call() -> None:
    with pytest.raises(ProtocolError, match="waits for"):
        AgentCall.read(
            encoding.Reader(AgentCall(1, Operation.GET, milliseconds=keys.CALL_LIMIT_MILLISECONDS + 1).body())
        )
    many = AgentCall(1, Operation.GET).body()[:-4] + encoding.number(keys.CALL_PARTS + 1, 4)
    with pytest.raises(ProtocolError, match="parts"):
        AgentCall.read(encoding.Reader(many))
    unknown = bytearray(AgentCall(1, Operation.GET).body())
    unknown[4] = 99
    with pytest.raises(ProtocolError, match="unknown operation"):
        AgentCall.read(encoding.Reader(bytes(unknown)))
