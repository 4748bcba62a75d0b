"""The communicators of a worker: active ones, destroyed ones whose links are still open, and the digests of all destroyed."""

from __future__ import annotations

from ringfence.runtime.communicator import Communicator
from ringfence.runtime.counters import Totals, add_links
from ringfence.runtime.links import Link


class Communicators:
    """Finds communicators by digest and keeps the counters of removed ones."""

    def __init__(self) -> None:
        self.active: dict[bytes, Communicator] = {}
        self._destroyed: set[bytes] = set()  # digests; a worker that dials one of them is refused
        # The counters of closed links, and removed communicators with open links, whose last bytes may be on their way.
        # Replaced as a whole, because other threads read it.
        self._retired: tuple[Totals, tuple[Communicator, ...]] = ({}, ())

    def add(self, communicator: Communicator) -> None:
        """Add a new communicator."""
        self.active[communicator.digest] = communicator

    def is_destroyed(self, digest: bytes) -> bool:
        """Return whether a communicator with this digest was removed."""
        return digest in self._destroyed

    def remove(self, communicator: Communicator) -> None:
        """Remove a communicator. It is kept while one of its links is open; afterwards only its counters are."""
        totals, removed = self._retired
        closed = [each for each in removed if not any(link.open for link in each.links())]
        kept = [each for each in removed if each not in closed]
        totals = add_links(dict(totals), [link for each in closed for link in each.links()])
        self._retired = (totals, (*kept, communicator))
        self.active.pop(communicator.digest, None)
        self._destroyed.add(communicator.digest)

    def all(self) -> tuple[Communicator, ...]:
        """Return the active and the removed communicators."""
        return (*self.active.values(), *self._retired[1])

    def links(self) -> list[Link]:
        """Return the links of all communicators."""
        return [link for communicator in self.all() for link in communicator.links()]

    def totals(self) -> Totals:
        """Return the counters of all links, by worker. Any thread may call it."""
        active = tuple(self.active.values())  # read first: a communicator that is removed meanwhile is in both
        totals, removed = self._retired
        communicators = dict.fromkeys((*active, *removed))
        return add_links(dict(totals), [link for each in communicators for link in each.links()])

    def clear(self) -> None:
        """Drop everything, in a forked child."""
        self.active.clear()
        self._retired = ({}, ())
