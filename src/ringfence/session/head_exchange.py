"""Exchanges the heads of previous logs through the store, after a session has begun (spec/record.md, 9).

The store may answer late, wrongly or never. Its calls block, so they run in a thread that nobody waits for.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from ringfence import keys
from ringfence.errors import RecordError
from ringfence.record import heads
from ringfence.record.begin import JoinRecord
from ringfence.record.json_object import Json
from ringfence.session.join import Store

_POLL_SECONDS: Final = 0.25


class HeadExchange:
    """One worker's part in the exchange. `stopped` ends it early."""

    def __init__(self, store: Store, join: JoinRecord, rank: int, stopped: threading.Event) -> None:
        self._store = store
        self._join = join
        self._rank = rank
        self._stopped = stopped
        name = keys.digest(keys.RECORD_STORE, join.roster_digest)[:12].hex()
        self._prefix = f"ringfence/{name}"

    def run(self, own: bytes) -> dict[int, Json]:
        """Publish this worker's head, and return those of all workers, as far as they are right and came in time."""
        try:
            self._store.set(f"{self._prefix}/head/{self._rank}", own.decode("ascii"))
            return self._collect() if self._rank == 0 else self._await_list()
        except RuntimeError:  # the store has failed, or has ended with its worker
            return {}

    def _collect(self) -> dict[int, Json]:
        """On rank 0: wait for the heads of all workers, and publish the list of those that came."""
        found: dict[int, Json] = {}
        missing = set(range(len(self._join.listings)))
        end = time.monotonic() + keys.RECORD_HEADS_SECONDS
        while missing and time.monotonic() < end:
            for rank in sorted(missing):
                if (head := self._head_of(rank)) is not None:
                    found[rank] = head
            missing -= found.keys()
            if missing and self._stopped.wait(_POLL_SECONDS):
                break
        self._store.set(f"{self._prefix}/heads", heads.encode(found).decode("ascii"))
        return found

    def _head_of(self, rank: int) -> Json | None:
        data = self._get(f"{self._prefix}/head/{rank}")
        try:
            return None if data is None else heads.parse(data, rank, self._join.roster_digest, self._join.listings)
        except RecordError:
            return None

    def _await_list(self) -> dict[int, Json]:
        end = time.monotonic() + 2 * keys.RECORD_HEADS_SECONDS  # rank 0 may have begun later
        while (data := self._get(f"{self._prefix}/heads")) is None:
            if time.monotonic() >= end or self._stopped.wait(_POLL_SECONDS):
                return {}
        try:
            return heads.decode(data, self._join.roster_digest, self._join.listings)
        except RecordError:
            return {}

    def _get(self, key: str) -> bytes | None:
        """Return a value, without waiting for it."""
        return self._store.get(key) if self._store.check([key]) else None
