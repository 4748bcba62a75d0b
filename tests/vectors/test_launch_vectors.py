"""The vectors of spec/launch.md: encoded a second time from the text, and compared with the package byte by byte."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest

from ringfence import keys
from ringfence.admission.messages import Message, encode
from ringfence.launch.messages import AgentCall, Answer, CallResult, Notice, Operation

ROOT = Path(__file__).parents[2]
VECTORS = json.loads((ROOT / "tests/vectors/launch.json").read_text())
SPEC = (ROOT / "spec/launch.md").read_text()

MESSAGES: dict[str, Message] = {
    "attach": AgentCall(0, Operation.ATTACH, parts=(b'{"agent":"6f1d","rank":1}',)),
    "join": AgentCall(1, Operation.JOIN, "", 600_000),
    "set": AgentCall(2, Operation.SET, "0123456789abcdef.1", 60_000, (b"key", b"\x00\xff", b"other", b"")),
    "joined": Answer(1, CallResult.OK, (b'{"generation":"0123456789abcdef.1","rank":1,"nodes":2}',)),
    "ended": Answer(2, CallResult.ENDED),
    "notice": Notice("0123456789abcdef.1", ended=True),
}


def blob(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def by_the_text(name: str) -> bytes:
    """Encode a message from the tables of the specification."""
    message = MESSAGES[name]
    if isinstance(message, Notice):
        kind, body = (
            50,
            json.dumps(
                {
                    "generation": message.generation,
                    "ended": message.ended,
                    "waiting": message.waiting,
                    "finished": message.finished,
                    "closed": message.closed,
                    "cause": message.cause,
                    "replaced": message.replaced,
                },
                separators=(",", ":"),
            ).encode(),
        )
    else:
        assert isinstance(message, AgentCall | Answer)
        parts = struct.pack(">I", len(message.parts)) + b"".join(blob(part) for part in message.parts)
        if isinstance(message, AgentCall):
            scope = message.scope.encode()
            fields = struct.pack(">IBH", message.number, message.operation, len(scope)) + scope
            kind, body = 48, fields + struct.pack(">Q", message.milliseconds) + parts
        else:
            kind, body = 49, struct.pack(">IB", message.number, message.result) + parts
    return struct.pack(">BI", kind, len(body)) + body


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_encoded_as_the_text_says(name: str) -> None:
    assert encode(MESSAGES[name]).hex() == by_the_text(name).hex() == VECTORS[name]


def table(title: str) -> dict[str, int]:
    """The codes of the table whose header begins with this word."""
    rows = SPEC.split(f"| {title} | code |")[1].split("\n\n")[0]
    return {name.lower(): int(code) for name, code in re.findall(r"^\| (\w+) \| (\d+) \|", rows, re.M)}


def test_the_codes_of_the_text_are_those_of_the_code() -> None:
    assert table("operation") == {each.name.lower().replace("_", ""): each.value for each in Operation}
    assert table("result") == {each.name.lower(): each.value for each in CallResult}


def test_the_limits_of_the_text_are_those_of_the_code() -> None:
    for limit in (f"{keys.CALL_BYTES:,}", f"{keys.CALL_PARTS:,}", keys.TLS_LAUNCH_EXPORTER.decode()):
        assert limit in SPEC
    assert keys.CALL_LIMIT_MILLISECONDS == 30 * 24 * 3600 * 1000
    assert keys.LAST_CALL_SECONDS == keys.AGENT_LOST_SECONDS == 30.0
