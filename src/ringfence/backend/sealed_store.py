"""A store whose values travel over a sealed group: the rendezvous of a backend inside one machine.

Each member sends what it sets to all others, and reads what has arrived. torch's backends use a store to publish addresses
and ids, so nothing else is implemented: a call that would need one agreed value, such as `add`, raises.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist

from ringfence.backend.transfers import TransferMethods
from ringfence.backend.work import fresh
from ringfence.dataplane.request import Request
from ringfence.errors import CollectiveTimeoutError, ProtocolError, RingfenceError, UnsupportedError

_SIZES, _CONTENT = -3, -4  # tags; users' tags are not negative
_KEY_BYTES: Final = 4096
_VALUE_BYTES: Final = 1 << 20
_FOREVER: Final = float("inf")


class SealedStore(dist.Store):  # type: ignore[misc]  # torch is untyped here
    """The part of torch's store that backends use for their rendezvous, among the members of a sealed group.

    Keep a reference to it while a backend uses it: torch's C++ code does not.
    """

    def __init__(self, group: TransferMethods, timeout: timedelta) -> None:
        super().__init__()
        self._group = group
        self.session = group._session
        self._seconds = timeout.total_seconds()
        self._values: dict[str, bytes] = {}
        self._lock = threading.RLock()  # backends call from threads of their own
        self._sizes = torch.empty(2, dtype=torch.int64, device="cpu")
        self._posted: Request | None = None
        self._sent: list[Any] = []  # the memory of what is being sent

    # -- what backends call ------------------------------------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        """Publish a value to all members."""
        name, content = key.encode(), value.encode() if isinstance(value, str) else bytes(value)
        if not 0 < len(name) <= _KEY_BYTES or len(content) > _VALUE_BYTES:
            raise UnsupportedError(
                f"a value of {len(content)} bytes under a key of {len(name)} is too long for the store"
            )
        sizes = torch.tensor([len(name), len(content)], dtype=torch.int64, device="cpu")
        data = torch.frombuffer(bytearray(name + content), dtype=torch.uint8)
        with self._lock:
            self._values[key] = content
            for peer in range(self._group.size()):
                if peer != self._group.rank():
                    self._sent.append(self._group._plain_send(sizes, peer, _SIZES, _FOREVER))
                    self._sent.append(self._group._plain_send(data, peer, _CONTENT, _FOREVER))

    def get(self, key: str) -> bytes:
        """Return a value, once it has been published."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until values are published. Raises CollectiveTimeoutError, or the error that has ended the session."""
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        clock = self.session.engine.clock
        limit = clock() + seconds
        with self._lock:
            while missing := [key for key in keys if key not in self._values]:
                if not self._receive(limit - clock()):
                    raise CollectiveTimeoutError(
                        f"no other member published {missing[0]!r} within {seconds:g} s while the backend inside this "
                        "machine was connecting"
                    )

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether values are published. Never raises: backends ask from threads of their own, also at the end."""
        with self._lock:
            try:
                while self._receive(0.0):
                    continue
            except RingfenceError:
                pass
            return all(key in self._values for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> SealedStore:
        return self

    def _refuse(self, *_: Any) -> NoReturn:
        raise UnsupportedError(
            "the store of a group inside one machine only publishes values: it cannot count or compare"
        )

    add = compare_set = append = deleteKey = getNumKeys = delete_key = num_keys = _refuse

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _receive(self, seconds: float) -> bool:
        """Take the next value of any member; return False if none arrives within `seconds`."""
        if self._posted is None:
            self._posted = self._post(self._sizes, None, _SIZES)
        if not self._complete(self._posted, seconds):
            return False
        source, self._posted = self._posted.source, None
        name, content = self._sizes.tolist()
        if not 0 < name <= _KEY_BYTES or not 0 <= content <= _VALUE_BYTES:
            raise ProtocolError(f"worker {self._group._ranks[source]} sent a malformed entry of the store")
        data = torch.empty(name + content, dtype=torch.uint8, device="cpu")
        if not self._complete(self._post(data, source, _CONTENT), self._seconds):
            raise CollectiveTimeoutError(f"worker {self._group._ranks[source]} did not send an entry of the store")
        received = bytes(data.numpy())
        try:
            key = received[:name].decode()
        except UnicodeDecodeError:
            raise ProtocolError(f"worker {self._group._ranks[source]} sent a malformed entry of the store") from None
        self._values.setdefault(key, received[name:])  # this member's own value is not replaced
        return True

    def _post(self, memory: torch.Tensor, source: int | None, tag: int) -> Request:
        (transfer,) = self._group._plain_receive(memory, source, tag, _FOREVER).requests
        return transfer

    def _complete(self, transfer: Request, seconds: float) -> bool:
        self._group._loop.wait(transfer, max(0.0, seconds))
        if transfer.done and transfer.error is not None:
            raise fresh(transfer.error)
        return transfer.done
