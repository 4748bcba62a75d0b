"""The store of one round: torch's own HashStore, and the calls that wait for keys in it. Without I/O and without a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ringfence.launch.messages import Answer, Call, Operation, Result, refused


class Values(Protocol):
    """The methods of torch.distributed.HashStore that are used here. None of them waits: keys are checked before."""

    def set(self, key: str, value: bytes, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes: ...

    def delete_key(self, key: str, /) -> bool: ...

    def num_keys(self) -> int: ...

    def append(self, key: str, value: bytes, /) -> None: ...


@dataclass(frozen=True)
class _Waiting:
    client: int
    call: Call
    keys: tuple[str, ...]
    until: float


class RoundStore:
    """The values of one round."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._waiting: list[_Waiting] = []

    def call(self, client: int, call: Call, now: float) -> list[tuple[int, Answer]]:
        """Carry out a call; return the answers to it and to calls that waited for it."""
        try:
            return self._call(client, call, now)
        except (
            RuntimeError,
            ValueError,
            UnicodeDecodeError,
        ) as error:  # a counter that is none, a key that is not text
            return [(client, refused(call.number, f"{call.operation.name.lower()} failed: {error}"))]

    def _call(self, client: int, call: Call, now: float) -> list[tuple[int, Answer]]:
        if call.operation in (Operation.GET, Operation.WAIT):
            keys = tuple(part.decode() for part in call.parts)
            if not self._has(keys):
                self._waiting.append(_Waiting(client, call, keys, now + call.milliseconds / 1000))
                return []
            return [(client, self._found(call, keys))]
        step = _STEPS[call.operation]
        parts, changed = step(self._values, call.parts)
        return [(client, Answer(call.number, Result.OK, parts)), *self._wake(changed)]

    def _has(self, keys: tuple[str, ...]) -> bool:
        return not keys or self._values.check(list(keys))

    def _found(self, call: Call, keys: tuple[str, ...]) -> Answer:
        parts = tuple(self._values.get(key) for key in keys) if call.operation is Operation.GET else ()
        return Answer(call.number, Result.OK, parts)

    def _wake(self, changed: tuple[str, ...]) -> list[tuple[int, Answer]]:
        if not changed or not self._waiting:
            return []
        ready = [each for each in self._waiting if set(changed) & set(each.keys) and self._has(each.keys)]
        for each in ready:
            self._waiting.remove(each)
        return [(each.client, self._found(each.call, each.keys)) for each in ready]

    def next_at(self) -> float:
        """Return when `expire` has something to do."""
        return min((each.until for each in self._waiting), default=float("inf"))

    def expire(self, now: float) -> list[tuple[int, Answer]]:
        """Answer the calls whose time is up."""
        return self._give_up([each for each in self._waiting if each.until <= now], Result.TIMEOUT)

    def end(self) -> list[tuple[int, Answer]]:
        """Answer all calls that wait: the round is over."""
        return self._give_up(list(self._waiting), Result.ENDED)

    def disconnect(self, client: int) -> None:
        self._waiting = [each for each in self._waiting if each.client != client]

    def _give_up(self, calls: list[_Waiting], result: Result) -> list[tuple[int, Answer]]:
        for each in calls:
            self._waiting.remove(each)
        return [(each.client, Answer(each.call.number, result)) for each in calls]


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
    name = key.decode()
    return (str(values.add(name, int(amount))).encode(),), (name,)


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
