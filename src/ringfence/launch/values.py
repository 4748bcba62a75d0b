"""The store of one round: torch's own HashStore, and the calls that wait for keys in it. Without I/O and without a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ringfence.keys import CALL_BYTES
from ringfence.launch.messages import AgentCall, Answer, CallResult, Operation, refused

_COUNTER_LIMIT: Final = 1 << 63
_OVERHEAD: Final = 9  # bytes of an answer beside its parts

Values = Any  # a torch.distributed.HashStore, without its types. No call of it waits: keys are checked before


@dataclass(frozen=True)
class _Waiting:
    client: int
    call: AgentCall
    keys: tuple[str, ...]
    until: float


class RoundStore:
    """The values of one round."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._waiting: dict[int, _Waiting] = {}  # by a number of its own
        self._by_key: dict[str, set[int]] = {}
        self._last = 0
        self._expire_at = float("inf")  # no wait ends before

    def call(self, client: int, call: AgentCall, now: float) -> list[tuple[int, Answer]]:
        """Carry out a call; return the answers to it and to calls that waited for it."""
        try:
            return [(receiver, _bounded(answer)) for receiver, answer in self._call(client, call, now)]
        except (RuntimeError, ValueError, IndexError) as error:  # not text, not a counter, a counter beyond 64 bits
            return [(client, refused(call.number, f"{call.operation.name.lower()} failed: {error}"))]

    def _call(self, client: int, call: AgentCall, now: float) -> list[tuple[int, Answer]]:
        if call.operation in (Operation.GET, Operation.WAIT):
            keys = tuple(part.decode() for part in call.parts)
            if not self._has(keys):
                self._park(_Waiting(client, call, keys, now + call.milliseconds / 1000))
                return []
            return [(client, self._found(call, keys))]
        step = _STEPS[call.operation]
        parts, changed = step(self._values, call.parts)
        return [(client, Answer(call.number, CallResult.OK, parts)), *self._wake(changed)]

    def _has(self, keys: tuple[str, ...]) -> bool:
        return not keys or self._values.check(list(keys))

    def _found(self, call: AgentCall, keys: tuple[str, ...]) -> Answer:
        parts = tuple(self._values.get(key) for key in keys) if call.operation is Operation.GET else ()
        return Answer(call.number, CallResult.OK, parts)

    def _wake(self, changed: tuple[str, ...]) -> list[tuple[int, Answer]]:
        touched = sorted({number for key in changed for number in self._by_key.get(key, ())})
        ready = [self._take(number) for number in touched if self._has(self._waiting[number].keys)]
        return [(each.client, self._found(each.call, each.keys)) for each in ready]

    def next_at(self) -> float:
        """Return when `expire` has something to do, or a moment before."""
        return self._expire_at

    def expire(self, now: float) -> list[tuple[int, Answer]]:
        """Answer the calls whose time is up."""
        if now < self._expire_at:
            return []
        over = self._give_up(
            [number for number, each in self._waiting.items() if each.until <= now], CallResult.TIMEOUT
        )
        self._expire_at = min((each.until for each in self._waiting.values()), default=float("inf"))
        return over

    def end(self) -> list[tuple[int, Answer]]:
        """Answer all calls that wait: the round is over."""
        return self._give_up(list(self._waiting), CallResult.ENDED)

    def disconnect(self, client: int) -> None:
        """Drop the calls of a client."""
        for number in [number for number, each in self._waiting.items() if each.client == client]:
            self._take(number)

    def _park(self, waiting: _Waiting) -> None:
        self._last += 1
        self._waiting[self._last] = waiting
        for key in waiting.keys:
            self._by_key.setdefault(key, set()).add(self._last)
        self._expire_at = min(self._expire_at, waiting.until)

    def _take(self, number: int) -> _Waiting:
        waiting = self._waiting.pop(number)
        for key in set(waiting.keys):
            self._by_key[key].discard(number)
            if not self._by_key[key]:
                del self._by_key[key]
        return waiting

    def _give_up(self, numbers: list[int], result: CallResult) -> list[tuple[int, Answer]]:
        taken = [self._take(number) for number in numbers]
        return [(each.client, Answer(each.call.number, result)) for each in taken]


def _bounded(answer: Answer) -> Answer:
    """Replace an answer that is too long for a message: it would cost its agent the connection."""
    if sum(map(len, answer.parts)) <= CALL_BYTES - _OVERHEAD - 4 * len(answer.parts):
        return answer
    return refused(answer.number, f"the values have more than {CALL_BYTES >> 20} MiB")


# -- operations that do not wait: they return the parts of the answer and the keys that changed -----------------------

Parts = tuple[bytes, ...]


def _set(values: Values, parts: Parts) -> tuple[Parts, tuple[str, ...]]:
    if len(parts) % 2:
        raise ValueError("a key without a value")
    names = tuple(part.decode() for part in parts[::2])
    for key, value in zip(names, parts[1::2], strict=True):
        values.set(key, value)
    return (), names


def _add(values: Values, parts: Parts) -> tuple[Parts, tuple[str, ...]]:
    key, amount = _exactly(parts, 2)
    name, number = key.decode(), int(amount)
    if not -_COUNTER_LIMIT <= number < _COUNTER_LIMIT:
        raise ValueError("the amount has more than 64 bits")
    return (str(values.add(name, number)).encode(),), (name,)


def _check(values: Values, parts: Parts) -> tuple[Parts, tuple[str, ...]]:
    return (b"1" if not parts or values.check([part.decode() for part in parts]) else b"0",), ()


def _compare_set(values: Values, parts: Parts) -> tuple[Parts, tuple[str, ...]]:
    key, expected, desired = _exactly(parts, 3)
    name = key.decode()
    return (values.compare_set(name, expected, desired),), (name,)


def _delete(values: Values, parts: Parts) -> tuple[Parts, tuple[str, ...]]:
    (key,) = _exactly(parts, 1)
    return (b"1" if values.delete_key(key.decode()) else b"0",), ()


def _count(values: Values, parts: Parts) -> tuple[Parts, tuple[str, ...]]:
    _exactly(parts, 0)
    return (str(values.num_keys()).encode(),), ()


def _append(values: Values, parts: Parts) -> tuple[Parts, tuple[str, ...]]:
    key, value = _exactly(parts, 2)
    name = key.decode()
    values.append(name, value)
    return (), (name,)


def _exactly(parts: Parts, count: int) -> Parts:
    if len(parts) != count:
        raise ValueError(f"{len(parts)} parts, where {count} are expected")
    return parts


_STEPS: dict[Operation, Callable[[Values, Parts], tuple[Parts, tuple[str, ...]]]] = {
    Operation.SET: _set,
    Operation.ADD: _add,
    Operation.CHECK: _check,
    Operation.COMPARE_SET: _compare_set,
    Operation.DELETE: _delete,
    Operation.COUNT: _count,
    Operation.APPEND: _append,
}
