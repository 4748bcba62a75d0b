"""Where the parent is, when to try it again, and when its refusal is final."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

from ringfence import keys
from ringfence.admission.entry import Entry, format_address
from ringfence.admission.handshake import Refusal
from ringfence.admission.messages import Reason
from ringfence.errors import AdmissionError, ConfigurationError, PeerLostError
from ringfence.settings import parse_address
from ringfence.transport.tcp import resolve

_FIRST_RETRY: Final = 0.02  # seconds; doubles up to
_LAST_RETRY: Final = 1.0
# A worker of this very run that refuses us will not change its mind, but the address it answers at may be about to be
# replaced. So ask again for a little while, then give up.
PATIENCE_SECONDS: Final = 3.0
FINAL: Final = frozenset({Reason.WORLD_SIZE, Reason.POLICY, Reason.SUITE, Reason.PROOF})
_SILENCE_SECONDS: Final = 1.0  # what takes longer to answer is worth a word


class Store(Protocol):
    """As much of torch.distributed.Store as a join needs."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class AddressBook:
    """The admission addresses of one run and generation in the store. Addresses are hints; nothing here is trusted.

    A store that falls silent blocks whoever asks it, for as long as it likes: none of this is for the loop's own thread.
    """

    def __init__(self, store: Store, own: Entry) -> None:
        self._store = store
        self._own = own
        place = keys.digest(keys.STORE_KEY, own.run_id.encode(), own.generation.encode())
        self._prefix = f"ringfence/{place[:12].hex()}"

    def publish(self, address: tuple[str, int]) -> None:
        try:
            self._store.set(f"{self._prefix}/{self._own.rank}", format_address(address))
        except RuntimeError as error:
            raise self._broken(error) from error

    def look_up(self, rank: int) -> tuple[str, int] | None:
        """None until it has been published. ConfigurationError if what stands there is no address."""
        key = f"{self._prefix}/{rank}"
        try:
            value = self._store.get(key) if self._store.check([key]) else None
        except RuntimeError as error:
            raise self._broken(error) from error
        return None if value is None else parse_address(value.decode("ascii", "replace"), f"address of rank {rank}")

    def _broken(self, error: RuntimeError) -> AdmissionError:
        return AdmissionError(f"the store failed while rank {self._own.rank} was joining: {error}")


class Place(NamedTuple):
    """Where to try: for people, and for a socket."""

    text: str
    family: int
    address: Any


class Search:
    """The attempts to reach the parent."""

    def __init__(self, book: AddressBook, own: int, parent: int, now: float) -> None:
        self.next_at = now
        self.parent = parent
        self._book = book
        self._own = own
        self._trouble = "it has not published an address"  # of the last attempt, for people
        self._pause = _FIRST_RETRY
        self._refused_since: float | None = None
        self._asked_at: float | None = None
        self._asked = ""  # who is to answer

    def begin(self, now: float) -> None:
        """`look` is about to be called, in another thread. The next attempt is not before this one has failed."""
        self._asked_at, self._asked = now, "the store"
        self.next_at = float("inf")

    def look(self) -> Place | str:
        """Where to try now, or why there is nothing to try. Asks afresh: what stood there may be of an earlier start."""
        try:
            address = self._book.look_up(self.parent)
            if address is None:
                return "it has not published an address"
            self._asked = f"the resolver, asked for {address[0]},"
            return Place(format_address(address), *resolve(*address))
        except (ConfigurationError, PeerLostError) as error:  # the store may have named anything
            return str(error)

    def end(self) -> None:
        """`look` has answered."""
        self._asked_at = None

    def trouble(self, now: float) -> str:
        """Why this worker is not at its parent, for people."""
        if self._asked_at is not None and now - self._asked_at >= _SILENCE_SECONDS:
            return f"{self._asked} has not answered for {now - self._asked_at:.0f} s"
        return self._trouble

    def retry(self, now: float, trouble: str, refusal: Refusal | None = None) -> None:
        """The attempt failed; there will be another.

        A refusal by a worker of this very run is final if it lasts; any other is an old address's or an unknown peer's. Whoever
        answers where the store says may pretend to be that worker: so can a store keep this one from joining.
        """
        self._trouble = trouble
        self.next_at = now + self._pause
        self._pause = min(2 * self._pause, _LAST_RETRY)
        if refusal is None or not refusal.same_run or refusal.reason not in FINAL:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        elif now >= self._refused_since + PATIENCE_SECONDS:
            raise AdmissionError(f"rank {self._own} was not admitted by its parent, rank {self.parent}: {trouble}")
