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
        self._sources: dict[_Source, int] = {}  # with the events that each was selected for

    def add_source(self, source: _Source) -> None:
        """Select for readability of something other than a connection; `wait` returns it as the key's data."""
        self.set_events(source, selectors.EVENT_READ)

    def set_events(self, source: _Source, events: int) -> None:
        """Select something other than a connection of a join for `events`; for 0, no longer."""
        known = source in self._sources
        if known and self._sources[source] == events:
            return
        if not known:
            self._selector.register(source, events, source)
        elif events:
            self._selector.modify(source, events, source)
        else:
            self._selector.unregister(source)
        self._sources[source] = events
        if not events:
            del self._sources[source]

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
            events = (selectors.EVENT_WRITE if write else 0) | (selectors.EVENT_READ if read else 0)
            if events == peer.watched:
                continue
            if not peer.watched:
                self._selector.register(peer, events, peer)
            elif events:
                self._selector.modify(peer, events, peer)
            else:
                self._selector.unregister(peer)
            peer.watched = events

    def unwatch(self, peer: Peer) -> None:
        if peer.watched:
            self._selector.unregister(peer)
            peer.watched = 0

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
        self.pending.clear()
        self.neighbours.clear()
