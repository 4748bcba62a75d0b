"""Messages of the launcher: what an agent and the host of the store send to each other once both are admitted."""

from __future__ import annotations

import torch.distributed as dist

from ringfence import keys
from ringfence.admission.encoding import Reader
from ringfence.admission.messages import MessageSplitter, encode
from ringfence.errors import ProtocolError
from ringfence.launch.messages import (
    FROM_HOST,
    TO_HOST,
    AgentCall,
    Answer,
    CallResult,
    Notice,
    Operation,
    from_json,
    refused,
    to_json,
)
from ringfence.launch.rounds import RoundLimits
from ringfence.launch.store_state import StoreState
from tests.fuzz.target import Target

OWN, OTHER = 0, 1  # the clients of a host with one other agent
GENERATION = "incarnation.1"


def _attachment(**changes: object) -> AgentCall:
    return AgentCall(0, Operation.ATTACH, parts=(to_json({"agent": "other", "rank": 1, **changes}),))


def _calls() -> list[AgentCall]:
    pair = (b"key", b"7")
    store = {
        Operation.SET: pair,
        Operation.GET: (b"known",),
        Operation.WAIT: (b"known", b"never"),
        Operation.ADD: pair,
        Operation.CHECK: (b"known", b"key"),
        Operation.COMPARE_SET: (b"known", b"1", b"2"),
        Operation.DELETE: (b"key",),
        Operation.COUNT: (),
        Operation.APPEND: pair,
    }
    rounds = [Operation.JOIN, Operation.DONE, Operation.LEAVE, Operation.STATUS]
    found = [
        _attachment(),
        _attachment(agent="another", rank=None),
        AgentCall(9, Operation.CLOSE, parts=(b"a reason",)),
    ]
    found += [AgentCall(7, operation, milliseconds=1000) for operation in rounds]
    found += [AgentCall(8, operation, GENERATION, 1000, parts) for operation, parts in store.items()]
    large = b"9" * 20  # more than 64 bits
    found += [AgentCall(8, Operation.ADD, GENERATION, parts=(b"key", large))]
    found += [AgentCall(8, Operation.SET, GENERATION, parts=(b"known", large))]
    found += [AgentCall(8, Operation.ADD, GENERATION, parts=(b"known", b"1"))]
    return [*found, AgentCall(8, Operation.SET, "incarnation.0", parts=pair)]


# -- codecs -----------------------------------------------------------------------------------------------------------


def _streams() -> list[bytes]:
    """A byte that selects the direction, then frames."""
    answers = [Answer(1, CallResult.OK, (b"value", b"")), Answer(2, CallResult.TIMEOUT), refused(3, "a reason")]
    notices = [Notice(GENERATION), Notice(GENERATION, ended=True, waiting=True, closed="a reason")]
    answered = [encode(each) for each in answers] + [encode(each) for each in notices]
    return [b"\0" + encode(each) for each in _calls()] + [b"\1" + each for each in answered]


def _cut(data: bytes) -> None:
    stream, seen = data[1:], b""
    cutter = MessageSplitter(FROM_HOST if data[:1] and data[0] & 1 else TO_HOST, keys.CALL_BYTES)
    half = len(stream) // 2
    for piece in (stream[:half], stream[half:]):
        cutter.feed(piece)
        while (message := cutter.next()) is not None:
            frame = encode(message)
            if isinstance(message, Notice):  # JSON can be written in several ways
                assert Notice.read(Reader(message.body())) == message
                frame = stream[len(seen) : len(seen) + 5 + int.from_bytes(stream[len(seen) + 1 :][:4], "big")]
            seen += frame
    assert seen + cutter.rest() == stream


def _read_json(data: bytes) -> None:
    found = from_json(data)
    assert isinstance(found, dict)


# -- the host of the store --------------------------------------------------------------------------------------------


def _state() -> StoreState:
    """A host in an open round of two nodes."""
    state = StoreState("incarnation", RoundLimits(2, 2), dist.HashStore)
    state.rounds.attach(OWN, "own", 0)
    state.call(OTHER, _attachment(), 0.0)
    for client in (OWN, OTHER):
        state.call(client, AgentCall(1, Operation.JOIN, milliseconds=1000), 0.0)
    assert state.rounds.is_open and state.rounds.generation == GENERATION
    state.call(OWN, AgentCall(2, Operation.SET, GENERATION, parts=(b"known", b"1")), 0.0)
    return state


def _serve(data: bytes) -> None:
    """An admitted agent sends to the host whatever it likes, then disconnects; the host's own agent still gets answers."""
    state, cutter = _state(), MessageSplitter(TO_HOST, keys.CALL_BYTES)
    cutter.feed(data)
    try:
        while (message := cutter.next()) is not None:
            assert isinstance(message, AgentCall)
            for _, outgoing in state.call(OTHER, message, 1.0):
                encode(outgoing)
    finally:
        state.disconnect(OTHER, 2.0)
        state.tick(state.next_at())
        asked = AgentCall(3, Operation.COUNT, state.rounds.generation)
        assert [client for client, each in state.call(OWN, asked, 3.0) if isinstance(each, Answer)] == [OWN]


_WORDS = (b"known", b"incarnation.", b'{"agent":', b'"rank":', b"9" * 20, b"-1", GENERATION.encode())

TARGETS = (
    Target("launch-frames", _streams, _cut, (ProtocolError,), words=_WORDS),
    Target("launch-json", lambda: [call.parts[0] for call in _calls()[:2]], _read_json, (ProtocolError,), words=_WORDS),
    Target(
        "launch-calls",
        lambda: [encode(call) for call in _calls()] + [b"".join(encode(call) for call in _calls()[-14:])],
        _serve,
        (ProtocolError,),
        bounded=500,
        words=_WORDS,
    ),
)
