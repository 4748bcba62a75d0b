"""The messages between agents and the host of the store (spec/launch.md). They follow admission on the same connection.

frame = type (1 byte) · length of the body (4 bytes) · body, as in admission
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Final

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.entry import GENERATION_BYTES
from ringfence.admission.messages import Message
from ringfence.errors import ProtocolError


class Operation(IntEnum):
    """What a call asks for. The first seven are about rounds, the others about the store of a round."""

    ATTACH = 1  #  an agent says who it is, once per connection
    JOIN = 2  #    wait for the next round
    DONE = 3  #    the agent's workers have succeeded
    LEAVE = 4  #   the agent ends
    CLOSE = 5  #   the agent has failed: no further round
    STATUS = 6  #  the last notice; answered by the agent itself
    REJOIN = 7  #  a worker waits for the next round in place; answered by the agent itself

    SET = 16
    GET = 17  #    waits for the keys
    WAIT = 18
    ADD = 19
    CHECK = 20
    COMPARE_SET = 21
    DELETE = 22
    COUNT = 23
    APPEND = 24


STORE_OPERATIONS: Final = frozenset(each for each in Operation if each >= Operation.SET)


class CallResult(IntEnum):
    """How a call ended."""

    OK = 0
    TIMEOUT = 1  # what it waited for did not happen in time
    ENDED = 2  #   the round of the call is over
    CLOSED = 3  #  there will be no further round; the reason follows
    LOST = 4  #    the host of the store cannot be reached
    REFUSED = 5  # the call is not possible; the reason follows


_CALL_OVERHEAD: Final = 4 + 1 + 2 + 8 + 4  # bytes of a call beside its scope and its parts
_OPERATIONS: Final = frozenset(Operation)
_RESULTS: Final = frozenset(CallResult)


@dataclass(frozen=True)
class AgentCall:
    """A call: `scope` is the generation that a store operation belongs to; `milliseconds` limits the wait at the host."""

    TYPE: ClassVar[int] = 48

    number: int
    operation: Operation
    scope: str = ""
    milliseconds: int = 0
    parts: tuple[bytes, ...] = field(default=(), repr=False)

    def body(self) -> bytes:
        return b"".join(
            (
                encoding.number(self.number, 4),
                encoding.number(self.operation, 1),
                encoding.text(self.scope),
                encoding.number(self.milliseconds, 8),
                _parts(self.parts),
            )
        )

    @classmethod
    def read(cls, reader: encoding.Reader) -> AgentCall:
        number, code = reader.number(4), reader.number(1)
        if code not in _OPERATIONS:
            raise ProtocolError(f"a call of unknown operation {code}")
        scope, milliseconds = reader.text(GENERATION_BYTES), reader.number(8)
        if milliseconds > keys.CALL_LIMIT_MILLISECONDS:
            raise ProtocolError(f"a call that waits for {milliseconds} ms")
        return cls(number, Operation(code), scope, milliseconds, _read_parts(reader))


@dataclass(frozen=True)
class Answer:
    """The answer to the call of the same number."""

    TYPE: ClassVar[int] = 49

    number: int
    result: CallResult
    parts: tuple[bytes, ...] = field(default=(), repr=False)

    def body(self) -> bytes:
        return encoding.number(self.number, 4) + encoding.number(self.result, 1) + _parts(self.parts)

    @classmethod
    def read(cls, reader: encoding.Reader) -> Answer:
        number, code = reader.number(4), reader.number(1)
        if code not in _RESULTS:
            raise ProtocolError(f"an answer of unknown result {code}")
        return cls(number, CallResult(code), _read_parts(reader))

    @property
    def text(self) -> str:
        """The reason in an answer that is not OK."""
        return self.parts[0].decode("ascii", "replace") if self.parts else ""


@dataclass(frozen=True)
class Notice:
    """From the host, unasked: the state of the round that the agent is in."""

    TYPE: ClassVar[int] = 50

    generation: str  #      of the newest round
    ended: bool = False  #  a member left it: all others have to join the next one
    waiting: bool = False  # agents wait for the next round, and there is room for them
    finished: bool = False  # the workers of all members have succeeded
    closed: str = ""  #     why there will be no further round
    cause: str = ""  #      why the round has ended, as far as an agent has said
    replaced: bool = False  # another agent has taken the place of this one

    def ends(self, generation: str) -> bool:
        """Return whether the workers of this generation have to join another round."""
        return self.generation != generation or self.ended or self.waiting

    def body(self) -> bytes:
        return to_json(vars(self))

    @classmethod
    def read(cls, reader: encoding.Reader) -> Notice:
        found = from_json(reader.rest())
        names = ("ended", "waiting", "finished", "replaced")
        return cls(
            generation=text_of(found, "generation", GENERATION_BYTES),
            closed=text_of(found, "closed", keys.REFUSAL_TEXT_BYTES),
            cause=text_of(found, "cause", keys.REFUSAL_TEXT_BYTES),
            **{name: flag_of(found, name) for name in names},
        )


TO_HOST: Final[Mapping[int, type[Message]]] = {AgentCall.TYPE: AgentCall}
FROM_HOST: Final[Mapping[int, type[Message]]] = {Answer.TYPE: Answer, Notice.TYPE: Notice}


def refused(number: int, text: str) -> Answer:
    """Return an answer that says why a call is not possible."""
    return Answer(number, CallResult.REFUSED, (encoding.escape(text, keys.REFUSAL_TEXT_BYTES).encode(),))


def excess(scope: str, parts: tuple[bytes, ...]) -> str:
    """Return how a call exceeds what a message may contain, or ""."""
    size = _CALL_OVERHEAD + len(scope) + sum(4 + len(part) for part in parts)
    if size > keys.CALL_BYTES:
        return f"it has {size} bytes, and a call to the store may have {keys.CALL_BYTES} ({keys.CALL_BYTES >> 20} MiB)"
    if len(parts) > keys.CALL_PARTS:
        return f"it has {len(parts)} keys and values, and a call to the store may have {keys.CALL_PARTS}"
    return ""


def _parts(parts: tuple[bytes, ...]) -> bytes:
    return encoding.number(len(parts), 4) + b"".join(encoding.blob(part) for part in parts)


def _read_parts(reader: encoding.Reader) -> tuple[bytes, ...]:
    count = reader.number(4)
    if count > keys.CALL_PARTS:
        raise ProtocolError(f"a message of {count} parts, where at most {keys.CALL_PARTS} are allowed")
    return tuple(reader.blob(keys.CALL_BYTES) for _ in range(count))


# -- JSON of the rendezvous -------------------------------------------------------------------------------------------


def to_json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=True).encode()


def from_json(data: bytes) -> dict[str, Any]:
    """Parse an object. Raises ProtocolError."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a message that is not JSON") from error
    if not isinstance(found, dict):
        raise ProtocolError("a message that is not a JSON object")
    return found


def text_of(found: Mapping[str, Any], name: str, limit: int) -> str:
    value = found.get(name)
    if not isinstance(value, str) or len(value) > limit or not encoding.is_printable(value or " "):
        raise ProtocolError(f"{name} is not a text of at most {limit} printable characters")
    return value


def flag_of(found: Mapping[str, Any], name: str) -> bool:
    value = found.get(name)
    if not isinstance(value, bool):
        raise ProtocolError(f"{name} is not true or false")
    return value


def number_of(found: Mapping[str, Any], name: str, limit: int) -> int:
    value = found.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise ProtocolError(f"{name} is not a number below {limit}")
    return value
