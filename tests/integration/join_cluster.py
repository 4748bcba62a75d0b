"""Joins in threads of one process: a join blocks only its caller, so one test can run a whole world."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from ringfence import keys
from ringfence.admission.binding import Binding
from ringfence.admission.policy import Policy, Prover
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.join import Membership, join
from ringfence.settings import Settings

SECRET = keys.Secret(bytes(range(100, 132)))
OTHER_SECRET = keys.Secret(bytes(range(50, 82)))


class MemoryStore:
    """The store methods that a join uses. `overwritten` maps a rank to what readers find in place of its address."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self.lookups = 0

    def set(self, key: str, value: str, /) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str, /) -> bytes:
        with self._changed:
            return self._values[key]

    def check(self, keys: list[str], /) -> bool:
        with self._changed:
            self.lookups += 1
            self._changed.notify_all()
            return all(key in self._values for key in keys)

    def wait_for_address(self, timeout: float = 10.0) -> tuple[str, tuple[str, int]]:
        """The first key and address that a worker publishes."""
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self._values), timeout)
            key, value = next(iter(self._values.items()))
        host, _, port = value.decode().rpartition(":")
        return key, (host, int(port))

    def wait_for_lookups(self, count: int, timeout: float = 10.0) -> None:
        """Wait until workers have looked up an address `count` times."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.lookups >= count, timeout)


class SlowlyShown(SharedSecret):
    """The shared secret as a kind of proof that takes time, as evidence of hardware does."""

    kind = 99  # nobody else has it


def slow_policy(run_id: str = "none") -> Policy:
    return Policy((SlowlyShown(SECRET, run_id),))


class Slow(SlowlyShown):
    """A prover that answers only when it is allowed to. `asked` is released when it was asked."""

    def __init__(self, error: Exception | None = None, run_id: str = "none") -> None:
        super().__init__(SECRET, run_id)
        self.may_answer = threading.Event()
        self.asked = threading.Semaphore(0)
        self._error = error

    def prove(self, binding: Binding) -> bytes:
        self.asked.release()
        assert self.may_answer.wait(20)
        if self._error is not None:
            raise self._error
        return super().prove(binding)


class World:
    """Workers that join together; each ends with a Membership or with the exception that its join raised."""

    def __init__(self, size: int, timeout: float = 20.0, store: MemoryStore | None = None) -> None:
        self.size = size
        self.timeout = timeout
        self.store = store or MemoryStore()
        self.outcomes: dict[int, Membership | BaseException] = {}
        self._threads: dict[int, threading.Thread] = {}

    def start(
        self,
        ranks: Iterable[int],
        settings: Mapping[int, Settings] | None = None,
        admission: Mapping[int, tuple[Policy, Prover]] | None = None,
    ) -> None:
        """Start these ranks. `admission` overrides the policy and the prover of a worker's settings."""
        for rank in ranks:
            chosen = (settings or {}).get(rank, Settings(SECRET))
            verifying = (admission or {}).get(rank)
            thread = threading.Thread(target=self._join, args=(rank, chosen, verifying), daemon=True)
            self._threads[rank] = thread
            thread.start()

    def finish(self) -> dict[int, Membership | BaseException]:
        for rank, thread in self._threads.items():
            thread.join(self.timeout + 10)
            assert not thread.is_alive(), f"rank {rank} hangs"
        return self.outcomes

    def members(self) -> list[Membership]:
        """All outcomes, which must be memberships."""
        found = []
        for rank, outcome in sorted(self.finish().items()):
            assert isinstance(outcome, Membership), f"rank {rank}: {outcome!r}"
            found.append(outcome)
        return found

    def member(self, rank: int) -> Membership:
        """Return the membership of one worker, whose join may end before that of others."""
        self._threads[rank].join(self.timeout)
        outcome = self.outcomes[rank]
        assert isinstance(outcome, Membership), outcome
        return outcome

    def error(self, rank: int) -> str:
        """Return what the join of `rank` raised."""
        self._threads[rank].join(self.timeout + 10)
        outcome = self.outcomes[rank]
        assert isinstance(outcome, Exception), outcome
        return f"{type(outcome).__name__}: {outcome}"

    def close(self) -> None:
        for outcome in self.finish().values():
            if isinstance(outcome, Membership):
                for edge in outcome.edges:
                    edge.close()
                if outcome.local is not None:
                    outcome.local.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self, rank: int, settings: Settings, admission: tuple[Policy, Prover] | None) -> None:
        try:
            address = ("127.0.0.1", 30000 + rank)
            table = f"table of {rank}".encode()
            self.outcomes[rank] = join(
                self.store, rank, self.size, settings, address, self.timeout, table, admission=admission
            )
        except BaseException as error:
            self.outcomes[rank] = error
