"""The thread that makes and verifies proofs during a session: repeated attempts, errors, one reading for each interval."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.admission.renewal import Challenge, Renewal, Renewals
from ringfence.errors import AdmissionError, ConfigurationError, EvidenceError, RingfenceError
from ringfence.runtime.reverification import Verdict
from ringfence.session import proof_thread
from ringfence.session.fresh_credentials import PolicyChangedError
from ringfence.session.join.provers import UnusableCredentialError
from ringfence.session.proof_thread import ProofThread
from tests.limits import HANG
from tests.unit.admission_samples import fixed_bytes
from tests.unit.peer_verification_samples import by_snp, circle

NONCE = fixed_bytes("nonce")


class Credentials:
    """What a machine has: `errors` are raised first, one by one."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.readings = self.open = 0
        self.technology = by_snp()
        self.kind = self.technology.kind
        self.prove_errors: list[Exception] = []

    @contextlib.contextmanager
    def read(self) -> Iterator[tuple[Any, Any]]:
        if self.errors:
            raise self.errors.pop(0)
        self.readings += 1
        self.open += 1
        try:
            yield self.technology.policy, self
        finally:
            self.open -= 1

    def prove(self, binding: Any) -> bytes:
        if self.prove_errors:
            raise self.prove_errors.pop(0)
        return self.technology.make(binding)


class Bench:
    """The thread of rank 1, which has the edges of the tree but no connection."""

    def __init__(self, credentials: Credentials, interval: int) -> None:
        self.roster = circle([fixed_bytes(f"key {rank}") for rank in range(2)]).roster
        self.posted = threading.Semaphore(0)
        self._post: list[Callable[[], None]] = []
        engine: Any = SimpleNamespace(rank=1, edges=[], fail=None, failed=False, post=self._take)
        fresh: Any = credentials
        self.thread = ProofThread(Renewals(self.roster, 1), interval, fresh, engine)
        self.edge: Any = SimpleNamespace(peer=0, exporter=b"exporter")

    def _take(self, work: Callable[[], None]) -> None:
        self._post.append(work)
        self.posted.release()

    def results(self, count: int, start: Callable[[Callable[[Any], None]], None]) -> list[Any]:
        """Start work before the thread runs; return what it reports."""
        found: list[Any] = []
        for _ in range(count):
            start(found.append)
        self.thread._thread.start()
        for _ in range(count):
            assert self.posted.acquire(timeout=HANG)
        for work in self._post:
            work()
        self.thread.close()
        self.thread._thread.join(HANG)
        assert not self.thread._thread.is_alive()
        return found

    def prove(self, done: Callable[[Renewal | RingfenceError], None]) -> None:
        self.thread.prove(self.edge, NONCE, done)

    def verify(self, done: Callable[[Verdict], None]) -> None:
        self.thread.verify(self.edge, NONCE, Renewal(4, b"forged"), done)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_thread, "_RETRY_SECONDS", 0.0)


def test_what_fails_for_a_moment_is_tried_again() -> None:
    credentials = Credentials(ConfigurationError("a file is replaced"), EvidenceError("the driver restarts"))
    credentials.prove_errors = [AdmissionError("the service is away")]
    (found,) = _proofs(credentials)
    assert isinstance(found, Renewal) and found.kind == 4
    assert (credentials.readings, credentials.open) == (1, 0)


def _proofs(credentials: Credentials, interval: int = 3600, count: int = 1) -> list[Any]:
    bench = Bench(credentials, interval)
    return bench.results(count, bench.prove)


def test_all_proofs_of_an_interval_take_one_reading() -> None:
    credentials = Credentials()
    assert all(isinstance(each, Renewal) for each in _proofs(credentials, count=5))
    assert (credentials.readings, credentials.open) == (1, 0)


@pytest.mark.parametrize("error", [PolicyChangedError("another policy"), UnusableCredentialError("it was revoked")])
def test_an_error_that_stays_is_reported_at_once(error: Exception) -> None:
    assert _proofs(Credentials(error, ConfigurationError("not reached"))) == [error]


def test_an_error_is_reported_when_the_time_is_up() -> None:
    error = ConfigurationError("the driver is gone")
    assert _proofs(Credentials(error), interval=0) == [error]


def test_a_bug_is_reported_and_ends_no_thread() -> None:
    credentials = Credentials()
    credentials.prove_errors = [KeyError("odd")]
    first, second = _proofs(credentials, count=2)
    assert str(first) == "KeyError: 'odd'" and isinstance(second, Renewal)


def test_a_verdict_is_about_the_neighbour_and_an_error_about_this_worker() -> None:
    bench = Bench(Credentials(), 3600)
    (found,) = bench.results(1, bench.verify)
    assert found.refusal is not None and found.error is None
    bench = Bench(Credentials(ConfigurationError("no policy")), 0)
    (found,) = bench.results(1, bench.verify)
    assert found.refusal is None and "no policy" in str(found.error)


def test_a_new_challenge_needs_a_new_reading() -> None:
    credentials = Credentials()
    bench = Bench(credentials, 3600)
    ticks = bench.thread.reverification

    def prove_and_tick(binding: Any) -> bytes:
        ticks.ticks += 1
        return credentials.technology.make(binding)

    credentials.prove = prove_and_tick  # type: ignore[method-assign]
    assert all(isinstance(each, Renewal) for each in bench.results(3, bench.prove))
    assert credentials.readings == 3


def test_a_challenge_has_one_form() -> None:
    assert Challenge(NONCE).body() == NONCE
