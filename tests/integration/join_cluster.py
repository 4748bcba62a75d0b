"""Joins in threads of one process: a join blocks only its caller, so one test can run a whole world."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Self

import pytest

from ringfence import keys
from ringfence.admission.binding import Binding
from ringfence.admission.policy import Policy, Prover
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.config.settings import Settings
from ringfence.session.join import Membership, dialler, join, loop, parent
from ringfence.session.join.connections import Connections
from ringfence.session.join.loop import JoinLoop
from ringfence.session.join.peer import Peer
from tests.limits import FAR, HANG

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

    def wait_for_address(self) -> tuple[str, tuple[str, int]]:
        """The first key and address that a worker publishes."""
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self._values), HANG)
            key, value = next(iter(self._values.items()))
        host, _, port = value.decode().rpartition(":")
        return key, (host, int(port))

    def wait_for_lookups(self, count: int) -> None:
        """Wait until workers have looked up an address `count` times."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.lookups >= count, HANG)


class Clock:
    """The clock of the joins in this process: it runs as usual, and a test moves it on once the workers are ready.

    So a timeout is long, and it passes in the state that the test is about, however busy the machine is. A join looks at its
    clock whenever it reports, so here it reports often.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, store_answers: bool = True) -> None:
        self._read = threading.Condition()
        self._reads: dict[threading.Thread, int] = {}
        self._ahead = 0.0
        self._skipped = 0.0
        self._added: dict[Connections, float] = {}
        self._wait = Connections.wait
        monkeypatch.setattr(loop, "time", self)
        monkeypatch.setattr(dialler, "time", self)
        monkeypatch.setattr(loop, "_REPORT_SECONDS", 0.05)
        monkeypatch.setattr(Connections, "wait", lambda connections, seconds: self._waited(connections, seconds))
        if store_answers:  # a moved clock must not look like a store that took long
            monkeypatch.setattr(parent, "_SLOW_ANSWER_SECONDS", float("inf"))

    def monotonic(self) -> float:
        with self._read:
            self._reads.setdefault(threading.current_thread(), 0)
            return time.monotonic() + self._ahead

    def time(self) -> float:
        return time.time()

    def advance(self, seconds: float) -> None:
        """Move the clock on; return when every join that runs has acted on it."""
        with self._read:
            self._ahead += seconds
            self._wait_for_all()

    def skip_waiting(self, seconds: float) -> None:
        """Let every join have waited for its peers that much longer, which counts against their time limits."""
        with self._read:
            self._skipped += seconds
            self._wait_for_all()

    def _wait_for_all(self) -> None:
        """Wait until every join has waited for events three times: the second began after the change."""
        before, end = dict(self._reads), time.monotonic() + HANG
        while any(thread.is_alive() and self._reads[thread] < count + 3 for thread, count in before.items()):
            assert time.monotonic() < end, "a join does not look at its clock"
            self._read.wait(0.1)  # a join that ends does not notify

    def _waited(self, connections: Connections, seconds: float) -> list:
        ready = self._wait(connections, seconds)
        with self._read:
            connections.waited += self._skipped - self._added.get(connections, 0.0)
            self._added[connections] = self._skipped
            thread = threading.current_thread()
            self._reads[thread] = self._reads.get(thread, 0) + 1
            self._read.notify_all()
        return ready


class Admissions:
    """Counts the neighbours that joins of this process have admitted: two for each pair of workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._admitted = threading.Semaphore(0)
        genuine = JoinLoop.on_admitted

        def on_admitted(join_loop: JoinLoop, peer: Peer) -> None:
            genuine(join_loop, peer)
            self._admitted.release()

        monkeypatch.setattr(JoinLoop, "on_admitted", on_admitted)

    def wait_for_pairs(self, count: int) -> None:
        for _ in range(2 * count):
            assert self._admitted.acquire(timeout=HANG), "two workers have not admitted each other"


class Warnings(logging.Handler):
    """What ringfence logs while this is open."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._logged = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._logged:
            self.texts.append(record.getMessage())
            self._logged.notify_all()

    def wait_for(self, condition: Callable[[list[str]], bool]) -> None:
        with self._logged:
            assert self._logged.wait_for(lambda: condition(self.texts), HANG), self.texts

    def __enter__(self) -> Self:
        logging.getLogger("ringfence").addHandler(self)
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        logging.getLogger("ringfence").removeHandler(self)


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
        assert self.may_answer.wait(HANG)
        if self._error is not None:
            raise self._error
        return super().prove(binding)


class World:
    """Workers that join together; each ends with a Membership or with the exception that its join raised."""

    def __init__(
        self, size: int, timeout: float = FAR, store: MemoryStore | None = None, record_key: bytes | None = None
    ) -> None:
        """`record_key`: the public key of each worker's record, if they write one."""
        self.size = size
        self.record_key = record_key
        self.timeout = timeout
        self.store = store or MemoryStore()
        self.outcomes: dict[int, Membership | BaseException] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._hangs = False

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
        for rank in self._threads:
            self._wait_for(rank)
        return self.outcomes

    def _wait_for(self, rank: int) -> Membership | BaseException:
        """Return the outcome of a join that ends by itself."""
        thread = self._threads[rank]
        thread.join(0 if self._hangs else HANG)
        self._hangs = thread.is_alive()
        assert not self._hangs, f"rank {rank} hangs"
        return self.outcomes[rank]

    def members(self) -> list[Membership]:
        """All outcomes, which must be memberships."""
        found = []
        for rank, outcome in sorted(self.finish().items()):
            assert isinstance(outcome, Membership), f"rank {rank}: {outcome!r}"
            found.append(outcome)
        return found

    def member(self, rank: int) -> Membership:
        """Return the membership of one worker, whose join may end before that of others."""
        outcome = self._wait_for(rank)
        assert isinstance(outcome, Membership), outcome
        return outcome

    def error(self, rank: int) -> str:
        """Return what the join of `rank` raised."""
        outcome = self._wait_for(rank)
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
                self.store,
                rank,
                self.size,
                settings,
                address,
                self.timeout,
                table,
                admission=admission,
                record_key=self.record_key,
            )
        except BaseException as error:
            self.outcomes[rank] = error
