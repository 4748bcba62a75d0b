"""Where the parent is, and when to dial it again."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

from ringfence import keys
from ringfence.admission.entry import Entry, format_address
from ringfence.config.interfaces import parse_address
from ringfence.errors import AdmissionError, ConfigurationError, PeerLostError
from ringfence.transport.tcp import resolve

_FIRST_RETRY: Final = 0.02  # seconds; doubles up to
_LAST_RETRY: Final = 1.0
_SLOW_ANSWER_SECONDS: Final = 1.0  # a store or resolver that takes longer is named in messages


class Store(Protocol):
    """The methods of torch.distributed.Store that a join uses."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class AddressBook:
    """The admission addresses of one run and generation in the store. They are hints and are not trusted.

    A store that does not respond blocks its caller indefinitely, so these methods are called in background threads only.
    """

    def __init__(self, store: Store, own: Entry) -> None:
        self._store = store
        self._own = own
        digest = keys.digest(keys.STORE_KEY, own.run_id.encode(), own.generation.encode())
        self._prefix = f"ringfence/{digest[:12].hex()}"

    def publish(self, address: tuple[str, int]) -> None:
        """Publish this worker's address. Raises AdmissionError if the store fails."""
        try:
            self._store.set(f"{self._prefix}/{self._own.rank}", format_address(address))
        except RuntimeError as error:
            raise self._store_failure(error) from error

    def look_up(self, rank: int) -> tuple[str, int] | None:
        """Return the address of a rank, or None if it has not published one.

        Raises ConfigurationError if the stored value is not an address, and AdmissionError if the store fails.
        """
        key = f"{self._prefix}/{rank}"
        try:
            value = self._store.get(key) if self._store.check([key]) else None
        except RuntimeError as error:
            raise self._store_failure(error) from error
        return None if value is None else parse_address(value.decode("ascii", "replace"), f"address of rank {rank}")

    def _store_failure(self, error: RuntimeError) -> AdmissionError:
        return AdmissionError(f"the store failed while rank {self._own.rank} was joining: {error}")


class DialTarget(NamedTuple):
    """An address to dial: as text for messages, and as a socket takes it."""

    text: str
    family: int
    address: Any


class ParentSearch:
    """The attempts to reach the parent."""

    def __init__(self, book: AddressBook, parent: int, now: float) -> None:
        self.next_at = now
        self.parent = parent
        self._book = book
        self._problem = "it has not published an address"  # of the last attempt, for messages
        self._pause = _FIRST_RETRY
        self._asked_at: float | None = None
        self._asked = ""  # the service that has to answer

    def begin(self, now: float) -> None:
        """Start an attempt: `find` is about to be called in another thread. The next one starts after this one has failed."""
        self._asked_at, self._asked = now, "the store"
        self.next_at = float("inf")

    def find(self) -> DialTarget | str:
        """Return what to dial, or why there is nothing to dial.

        Queries the store on every attempt: an earlier value may be from a previous start.
        """
        try:
            address = self._book.look_up(self.parent)
            if address is None:
                return "it has not published an address"
            self._asked = f"the resolver, asked for {address[0]},"
            return DialTarget(format_address(address), *resolve(*address))
        except (ConfigurationError, PeerLostError) as error:  # the store can return any value
            return str(error)

    def found(self) -> None:
        """Record that `find` has returned."""
        self._asked_at = None

    def problem(self, now: float) -> str:
        """Describe why this worker has not reached its parent."""
        if self._asked_at is not None and now - self._asked_at >= _SLOW_ANSWER_SECONDS:
            return f"{self._asked} has not answered for {now - self._asked_at:.0f} s"
        return self._problem

    def retry(self, now: float, problem: str) -> None:
        """Record a failed attempt and schedule the next one.

        No refusal is final: the peer at the stored address has not proved that it is the parent.
        """
        self._problem = problem
        self.next_at = now + self._pause
        self._pause = min(2 * self._pause, _LAST_RETRY)
