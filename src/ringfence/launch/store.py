"""The store that torch sees: the values of one round, kept by the host and reached through this machine's agent."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from ringfence.admission.encoding import escape
from ringfence.errors import PeerLostError
from ringfence.launch.agent_client import AgentClient
from ringfence.launch.messages import CallResult, Operation, excess

_SECONDS: Final = 60.0  # for calls that wait for nothing
_KEY_SHOWN: Final = 80  # characters of a key in an error message
_kept: list[AgentStore] = []  # torch's C++ code holds no reference to the Python part of a store


class RoundEndedError(dist.DistStoreError):  # type: ignore[misc]  # torch is untyped here
    """The round of a call is over: its node has to join the next one."""


class HostLostError(dist.DistNetworkError):  # type: ignore[misc]
    """The host of the store was lost during a call."""


class AgentStore(dist.Store):  # type: ignore[misc]  # torch is untyped here
    """The store of one generation. Calls raise DistStoreError once the round is over, and if they time out.

    All methods that C++ looks up are here, `deleteKey` and `getNumKeys` under these names. Queues are not: torch does not
    pass them to a store in Python.
    """

    def __init__(self, client: AgentClient, generation: str, timeout: timedelta | None = None) -> None:
        super().__init__()
        self._client = client
        self._generation = generation
        if timeout is not None:
            self.set_timeout(timeout)
        _kept[:] = [each for each in _kept if each._generation == generation] + [self]

    def _ask(self, operation: Operation, parts: Sequence[bytes], timeout: timedelta | None = None) -> tuple[bytes, ...]:
        waits = operation in (Operation.GET, Operation.WAIT)
        seconds = (timeout or self.timeout).total_seconds() if waits else _SECONDS
        parts = tuple(parts)
        if problem := excess(self._generation, parts):
            first = parts[0].decode(errors="replace")
            raise dist.DistStoreError(
                f"{operation.name.lower()} of '{escape(first, _KEY_SHOWN)}' is too long: {problem}. Split it, or pass large "
                "values in a collective instead"
            )
        try:
            answer = self._client.ask(operation, parts, scope=self._generation, seconds=max(0.001, seconds))
        except PeerLostError as error:
            raise dist.DistNetworkError(str(error)) from error
        if answer.result is CallResult.OK:
            return answer.parts
        if answer.result is CallResult.TIMEOUT:
            keys = ", ".join(part.decode(errors="replace") for part in parts[:4])
            raise dist.DistStoreError(f"wait timeout after {seconds:g} s, keys: {keys}")
        if answer.result is CallResult.ENDED:
            raise RoundEndedError(f"the round {self._generation} of this run has ended: another node left or joined")
        if answer.result is CallResult.LOST:
            raise HostLostError("the host of the store, node 0, was lost")
        raise dist.DistStoreError(answer.text or answer.result.name.lower())

    def set(self, key: str, value: Any) -> None:
        self._ask(Operation.SET, (key.encode(), _bytes(value)))

    def get(self, key: str) -> bytes:
        return self._ask(Operation.GET, (key.encode(),))[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(Operation.ADD, (key.encode(), str(amount).encode()))[0])

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(Operation.CHECK, [key.encode() for key in keys])[0] == b"1"

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(Operation.WAIT, [key.encode() for key in keys], timeout)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._ask(Operation.COMPARE_SET, (key.encode(), _bytes(expected), _bytes(desired)))[0]

    def append(self, key: str, value: Any) -> None:
        self._ask(Operation.APPEND, (key.encode(), _bytes(value)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [*self._ask(Operation.GET, [key.encode() for key in keys])]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        pairs = [(key.encode(), _bytes(value)) for key, value in zip(keys, values, strict=True)]
        self._ask(Operation.SET, [part for pair in pairs for part in pair])

    def delete_key(self, key: str) -> bool:
        return self._ask(Operation.DELETE, (key.encode(),))[0] == b"1"

    def num_keys(self) -> int:
        return int(self._ask(Operation.COUNT, ())[0])

    deleteKey, getNumKeys = delete_key, num_keys

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> AgentStore:
        return self


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
