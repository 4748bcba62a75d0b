"""This worker's own evidence, collected beside the loop: a quote or a token may take seconds, and meanwhile others are served.

Each proof covers its own connection, so each is collected for itself, in a thread of its own. Services are asked at the same
time; a device answers one after the other, and is not asked for who has hung up meanwhile. How many there are at once is
limited: whoever makes this worker collect and hangs up could otherwise fill it with threads.
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
from ringfence.join.background import Background
from ringfence.join.failure_window import FailureWindow
from ringfence.join.peer import Peer

LIMIT: Final = 2 * (
    keys.TREE_FANOUT + 1
)  # for the parent and for each child, and as many that nobody waits for any more

Outcome = Proof | ConfigurationError | AdmissionError


def attempt(prover: Prover, wanted: Binding) -> Outcome:
    """A proof, or why there is none."""
    try:
        return Proof(prover.kind, prover.prove(wanted))
    except (ConfigurationError, AdmissionError) as error:
        return error


class Collector:
    """Its descriptor is readable when `finished()` has something."""

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

    def start(self, peer: Peer, wanted: Binding) -> None:
        """Collect a proof for this peer's connection."""
        self._running += 1
        self._background.start(f"ringfence evidence for {peer.address}", lambda: self._collect(peer, wanted))

    def finished(self) -> Iterator[tuple[Peer, Outcome]]:
        """What has been collected since, and for whom."""
        for peer, outcome in self._background.finished():
            self._running -= 1
            if isinstance(outcome, Proof):
                self.failure_window.end()  # also if its peer has hung up: there is evidence again
            yield peer, outcome

    def _collect(self, peer: Peer, wanted: Binding) -> tuple[Peer, Outcome]:
        device_lock.wanted.set(lambda: not peer.gone)  # in this thread's own context
        return peer, attempt(self._prover, wanted)

    def close(self) -> None:
        self._background.close()
