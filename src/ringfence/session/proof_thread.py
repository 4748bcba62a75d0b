"""The thread that makes and verifies proofs while a session goes on, one at a time, and the timer that asks for them.

Policy and credentials are read once for all proofs between two ticks, after the first of the two, and are wiped when nothing
is left to do. What fails on this machine is tried again for most of the interval: a service may be away for a moment.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ringfence.admission.policy import Policy, Prover
from ringfence.admission.renewal import Renewal, Renewals
from ringfence.errors import AdmissionError, ConfigurationError, RingfenceError
from ringfence.runtime.aborts import Edge
from ringfence.runtime.engine import Engine
from ringfence.runtime.reverification import Reverification, Verdict
from ringfence.session.fresh_credentials import FreshCredentials, PolicyChangedError
from ringfence.session.join.provers import UnusableCredentialError
from ringfence.transport.alarm import Alarm, boot_seconds

_log = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 5.0
_PART: Final = 0.75  # of the interval in which an attempt is repeated; then the error is reported in time
_FINAL: Final = (PolicyChangedError, UnusableCredentialError)  # errors after which no further attempt helps


@dataclass(order=True)
class _Job:
    """A proof to make or to verify. `work` may raise; `failed` reports its error after the last attempt."""

    due: float
    number: int  # jobs that are due at one time are done in order
    last: float = field(compare=False)
    work: Callable[[Policy, Prover], None] = field(compare=False)
    failed: Callable[[RingfenceError], None] = field(compare=False)


class ProofThread:
    """Implements `ProofJobs`, and calls the engine's `verify_again` once in an interval."""

    def __init__(self, renewals: Renewals, interval: int, credentials: FreshCredentials, engine: Engine) -> None:
        self._renewals = renewals
        self._interval = interval
        self._credentials = credentials
        self._engine = engine
        self._ready = threading.Condition()  # guards the fields below
        self._jobs: list[_Job] = []  # a heap
        self._added = 0
        self._closed = False
        self._alarm: Alarm | None = None
        self.proofs = self.verifications = 0  # made, and done
        engine.reverification = self.reverification = Reverification(
            engine.rank, interval, engine.edges, renewals.due, self, engine.fail
        )
        self._thread = threading.Thread(target=self._run, name="ringfence proofs", daemon=True)

    def start(self) -> None:
        """Start, once the engine is driven."""
        self._thread.start()
        self._set_timer(boot_seconds() + self._interval)

    def close(self) -> None:
        """Stop. A proof that is being made ends by itself."""
        with self._ready:
            self._closed = True
            if self._alarm is not None:
                self._alarm.cancel()
            self._ready.notify()

    # -- the timer --------------------------------------------------------------------------------------------------

    def _set_timer(self, moment: float) -> None:
        with self._ready:
            if not self._closed:
                self._alarm = Alarm("ringfence verifies again", moment, partial(self._tick, moment))

    def _tick(self, moment: float) -> None:
        if not self._engine.failed:
            self._engine.post(self._engine.verify_again)
            self._set_timer(max(moment, boot_seconds() - self._interval / 2) + self._interval)

    # -- in the driving thread --------------------------------------------------------------------------------------

    def prove(self, edge: Edge, nonce: bytes, done: Callable[[Renewal | RingfenceError], None]) -> None:
        binding = self._renewals.own_binding(edge.peer, edge.exporter, nonce)

        def work(_: Policy, prover: Prover) -> None:
            renewal = Renewal(prover.kind, prover.prove(binding))
            self.proofs += 1
            self._engine.post(lambda: done(renewal))

        self._add(work, done)

    def verify(self, edge: Edge, nonce: bytes, renewal: Renewal, done: Callable[[Verdict], None]) -> None:
        def work(policy: Policy, _: Prover) -> None:
            try:
                self._renewals.verify(policy, edge.peer, edge.exporter, nonce, renewal)
                found = Verdict()
            except AdmissionError as error:
                found = Verdict(refusal=error)
            self.verifications += 1
            self._engine.post(lambda: done(found))

        self._add(work, lambda error: done(Verdict(error=error)))

    def _add(self, work: Callable[[Policy, Prover], None], failed: Callable[[RingfenceError], None]) -> None:
        now = time.monotonic()
        with self._ready:
            self._added += 1
            heapq.heappush(self._jobs, _Job(now, self._added, now + _PART * self._interval, work, failed))
            self._ready.notify()

    # -- in the thread of proofs ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._next(wait=True)) is not None:
            self._do_all(job)

    def _next(self, *, wait: bool) -> _Job | None:
        """Return the next job that is due. None: there is none, or after `close`."""
        with self._ready:
            while not self._closed:
                left = self._jobs[0].due - time.monotonic() if self._jobs else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._jobs)
                if not wait:
                    break
                self._ready.wait(left)
            return None

    def _do_all(self, first: _Job) -> None:
        """Do what is due, with one reading of policy and credentials. A new challenge needs a new one."""
        job: _Job | None = first
        ticks = self.reverification.ticks
        try:
            with self._credentials.read() as (policy, prover):
                while job is not None:
                    self._do(job, policy, prover)
                    job = self._next(wait=False) if self.reverification.ticks == ticks else None
        except Exception as error:
            if job is not None:
                self._fail(job, error)

    def _do(self, job: _Job, policy: Policy, prover: Prover) -> None:
        try:
            job.work(policy, prover)
        except Exception as error:
            self._fail(job, error)

    def _fail(self, job: _Job, error: Exception) -> None:
        """Try again later, or report the error."""
        now = time.monotonic()
        known = isinstance(error, ConfigurationError | AdmissionError)
        if known and now < job.last and not isinstance(error, _FINAL):
            _log.warning("worker %d cannot make or verify a proof, and tries again: %s", self._engine.rank, error)
            job.due = now + min(_RETRY_SECONDS, self._interval / 8)
            with self._ready:
                heapq.heappush(self._jobs, job)
            return
        failure = error if isinstance(error, RingfenceError) else RingfenceError(f"{type(error).__name__}: {error}")
        self._engine.post(lambda: job.failed(failure))
