"""The connections of a join under one selector: pending ones and admitted neighbours."""

from __future__ import annotations

import selectors
import time
from typing import Protocol

from ringfence.session.join.peer import Peer


class _File(Protocol):
    def fileno(self) -> int: ...


_Source = _File | int  # an object with a descriptor, or the descriptor itself


class Connections:
    """Pending connections, oldest first, and neighbours by rank.

    `waited` counts the seconds that this worker spent waiting for others. Deadlines of pending connections use this clock, so
    that a peer is not charged for time during which this worker was busy.
    """

    def __init__(self) -> None:
        self.pending: list[Peer] = []
        self.neighbours: dict[int, Peer] = {}
        self.waited = 0.0
        self._selector = selectors.DefaultSelector()
        self._watched: dict[_Source, int] = {}  # with the events that each is selected for

    def add_source(self, source: _Source) -> None:
        """Select for readability of something other than a connection; `wait` returns it as the key's data."""
        self.set_events(source, selectors.EVENT_READ)

    def set_events(self, source: _Source, events: int) -> None:
        """Select for `events` of a connection or another source; for 0, no longer."""
        before = self._watched.get(source, 0)
        if events == before:
            return
        if not events:
            self._selector.unregister(source)
            del self._watched[source]
            return
        select = self._selector.modify if before else self._selector.register
        select(source, events, source)
        self._watched[source] = events

    def is_neighbour(self, peer: Peer) -> bool:
        return peer.rank is not None and self.neighbours.get(peer.rank) is peer

    def has_unsent(self) -> bool:
        """Whether data for a neighbour is still waiting to be sent."""
        return any(peer.stream.wants_write for peer in self.neighbours.values())

    def watch(self, *, reading: bool) -> None:
        """Select for the events that each connection waits for; without `reading`, for writing only."""
        for peer in (*self.pending, *self.neighbours.values()):
            write = peer.connecting or peer.stream.wants_write
            read = reading and not peer.connecting
            self.set_events(peer, (selectors.EVENT_WRITE if write else 0) | (selectors.EVENT_READ if read else 0))

    def wait(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for at most `seconds`, add the time to `waited`, and return what is ready."""
        began = time.monotonic()
        ready = self._selector.select(seconds)
        self.waited += time.monotonic() - began
        return ready

    def close_pending(self) -> None:
        for peer in self.pending:
            peer.stream.close()
        self._selector.close()

    def forget(self) -> None:
        """Close the selector and drop all connections. In a forked child each stream closes itself."""
        self._selector.close()
        self._watched.clear()
        self.pending.clear()
        self.neighbours.clear()
