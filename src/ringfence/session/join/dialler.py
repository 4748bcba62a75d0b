"""Dialling the parent. The store and the resolver may block, so both are called in background threads."""

from __future__ import annotations

import socket
import time

from ringfence.admission.handshake import Refusal
from ringfence.session.join.background import Background
from ringfence.session.join.handshakes import Handshakes
from ringfence.session.join.parent import AddressBook, DialTarget, ParentSearch
from ringfence.session.join.peer import Peer
from ringfence.transport.tcp import connect


class Dialler:
    """Publishes this worker's address and dials its parent until they have admitted each other.

    `search` is None for rank 0, which has no parent, and once the parent is a neighbour. The descriptor is readable when
    `take_targets()` has something to do.
    """

    def __init__(self, book: AddressBook, search: ParentSearch | None, handshakes: Handshakes) -> None:
        self.search = search
        self._book = book
        self._handshakes = handshakes
        self._peer: Peer | None = None  # the pending connection to the parent
        self._background: Background[DialTarget | str | None] = Background()

    def fileno(self) -> int:
        return self._background.fileno()

    def publish(self, address: tuple[str, int]) -> None:
        """Publish where children dial this worker."""
        self._background.start("ringfence publishes", lambda: self._book.publish(address))

    @property
    def next_at(self) -> float:
        """When the next attempt is due, on the clock of time.monotonic()."""
        return float("inf") if self.search is None else self.search.next_at

    def dial_if_due(self, now: float) -> None:
        if self.search is not None and now >= self.search.next_at:
            self.search.begin(now)
            self._background.start("ringfence looks for its parent", self.search.find)

    def take_targets(self) -> None:
        """Dial the address that was found. Raises AdmissionError if the store failed."""
        for target in self._background.finished():
            if self.search is not None and target is not None:  # None: the address was published
                self.search.found()
                self._dial(self.search, target)

    def _dial(self, search: ParentSearch, target: DialTarget | str) -> None:
        if isinstance(target, str):
            search.retry(time.monotonic(), target)
            return
        try:
            connection = socket.socket(target.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:  # an address family that this machine does not have, or no descriptor left
            search.retry(time.monotonic(), f"{target.text}: {error.strerror}")
            return
        self._peer = self._handshakes.dial(connection, target.text, search.parent)
        with self._handshakes.drop_on_error(self._peer):
            connect(connection, target.address)  # Peer.finish_connect() reads the result once the socket is writable

    def is_dialled(self, peer: Peer) -> bool:
        """Whether this is the pending connection to the parent."""
        return peer is self._peer

    def on_dropped(self, peer: Peer, reason: str, refusal: Refusal | None) -> None:
        """Schedule the next attempt if the connection to the parent was dropped."""
        if peer is self._peer and self.search is not None:
            self._peer = None
            self.search.retry(time.monotonic(), reason if refusal else f"{peer.address}: {reason}")

    def on_admitted(self) -> None:
        """The parent and this worker have admitted each other."""
        self.search = self._peer = None

    def close(self) -> None:
        self._background.close()
