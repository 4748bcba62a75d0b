"""Where the parent is, when to try it again, and when its refusal is final."""

from __future__ import annotations

from typing import Final, Protocol

from ringfence import keys
from ringfence.admission.entry import Entry
from ringfence.admission.handshake import Refusal
from ringfence.admission.messages import Reason
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.settings import format_address, parse_address

_FIRST_RETRY: Final = 0.02  # seconds; doubles up to
_LAST_RETRY: Final = 1.0
# A worker of this very run that refuses us will not change its mind, but the address it answers at may be about to be
# replaced. So ask again for a little while, then give up.
_PATIENCE_SECONDS: Final = 3.0
_FINAL: Final = frozenset({Reason.WORLD_SIZE, Reason.POLICY, Reason.SUITE, Reason.PROOF})


class Store(Protocol):
    """As much of torch.distributed.Store as a join needs."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class AddressBook:
    """The admission addresses of one run and generation in the store. Addresses are hints; nothing here is trusted."""

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


class Search:
    """The attempts to reach the parent."""

    def __init__(self, book: AddressBook, own: int, parent: int, now: float) -> None:
        self.trouble = "it has not published an address"  # of the last attempt, for people
        self.next_at = now
        self._book = book
        self._own = own
        self.parent = parent
        self._pause = _FIRST_RETRY
        self._refused_since: float | None = None

    def address(self, now: float) -> tuple[str, int] | None:
        """Where to try now. Read afresh each time: what stood there may be left over from an earlier start."""
        try:
            found = self._book.look_up(self.parent)
        except ConfigurationError as error:
            self.retry(now, str(error))
            return None
        if found is None:
            self.retry(now, self.trouble)
        return found

    def retry(self, now: float, trouble: str) -> None:
        """The attempt failed; there will be another."""
        self.trouble = trouble
        self.next_at = now + self._pause
        self._pause = min(2 * self._pause, _LAST_RETRY)

    def weigh(self, now: float, refusal: Refusal, text: str) -> None:
        """A refusal by a worker of this very run is final if it lasts; any other is an old address's or a stranger's."""
        if not refusal.same_run or refusal.reason not in _FINAL:
            return
        if self._refused_since is None:
            self._refused_since = now
        if now >= self._refused_since + _PATIENCE_SECONDS:
            raise AdmissionError(f"rank {self._own} was not admitted by its parent, rank {self.parent}: {text}")
