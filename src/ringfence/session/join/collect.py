"""This worker's own proofs, collected in threads beside the join loop: a quote or a token may take seconds.

A proof covers one connection, so each connection needs its own. Services are asked concurrently; a device answers one request
at a time, and a request is skipped if its peer has disconnected meanwhile. The number of concurrent collections is limited:
peers that request a proof and disconnect must not fill this worker with threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ringfence import keys
from ringfence.admission.binding import Binding
from ringfence.admission.messages import Proof
from ringfence.admission.policy import Prover
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.evidence import device_lock
from ringfence.session.join.background import Background
from ringfence.session.join.peer import Peer

_PAUSE_SECONDS: Final = 5.0  # a longer pause between failed attempts starts a new window
LIMIT: Final = 2 * (keys.TREE_FANOUT + 1)  # the parent and all children, and as many whose peers have disconnected

Outcome = Proof | ConfigurationError | AdmissionError


def try_prove(prover: Prover, binding: Binding) -> Outcome:
    """Return a proof over `binding`, or the error that prevented it."""
    try:
        return Proof(prover.kind, prover.prove(binding))
    except (ConfigurationError, AdmissionError) as error:
        return error


class FailureWindow:
    """How long this worker has been unable to collect a proof, so that it gives up before its deadline, but not too early."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._last = 0.0

    def record(self, began: float, now: float) -> float:
        """Record a failed attempt that began at `began`; return how many seconds every attempt has been failing."""
        if self._since is None or began - self._last > _PAUSE_SECONDS:
            self._since = now
        self._last = now
        return now - self._since

    def reset(self) -> None:
        """Record that an attempt succeeded, for any peer."""
        self._since = None


class Collector:
    """Collects proofs. Its descriptor is readable when `finished()` has an outcome."""

    def __init__(self, prover: Prover) -> None:
        self.failure_window = FailureWindow()
        self._prover = prover
        self._running = 0
        self._background: Background[tuple[Peer, Outcome]] = Background()

    def fileno(self) -> int:
        return self._background.fileno()

    @property
    def full(self) -> bool:
        return self._running >= LIMIT

    def start(self, peer: Peer, binding: Binding) -> None:
        """Collect a proof for this peer's connection."""
        self._running += 1
        self._background.start(f"ringfence evidence for {peer.address}", lambda: self._collect(peer, binding))

    def finished(self) -> Iterator[tuple[Peer, Outcome]]:
        """Yield the outcomes since the last call, each with the peer it was collected for."""
        for peer, outcome in self._background.finished():
            self._running -= 1
            if isinstance(outcome, Proof):
                self.failure_window.reset()  # even if the peer has disconnected: evidence is available again
            yield peer, outcome

    def _collect(self, peer: Peer, binding: Binding) -> tuple[Peer, Outcome]:
        device_lock.still_wanted.set(lambda: not peer.is_closed)  # in this thread's own context
        return peer, try_prove(self._prover, binding)

    def close(self) -> None:
        self._background.close()
