"""This worker's own evidence, collected beside the loop: a quote or a token may take seconds, and meanwhile others are served.

Each proof covers its own connection, so each is collected for itself, in a thread of its own. Services are asked at the same
time; a device answers one after the other, and is not asked for who has hung up meanwhile. How many there are at once is
limited: whoever makes this worker collect and hangs up could otherwise fill it with threads.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from typing import Final

from ringfence import keys
from ringfence.admission.binding import Binding
from ringfence.admission.messages import Proof
from ringfence.admission.policy import Prover
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.evidence import turn
from ringfence.join.drought import Drought
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
        self.drought = Drought()
        self._prover = prover
        self._finished: deque[tuple[Peer, Outcome | BaseException]] = deque()
        self._running = 0
        self._lock = threading.Lock()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    @property
    def full(self) -> bool:
        return self._running >= LIMIT

    def start(self, peer: Peer, wanted: Binding) -> None:
        """Collect a proof for this peer's connection."""
        self._running += 1
        name = f"ringfence evidence for {peer.address}"
        threading.Thread(target=self._collect, args=(peer, wanted), name=name, daemon=True).start()

    def finished(self) -> Iterator[tuple[Peer, Outcome]]:
        """What has been collected since, and for whom; what nobody foresaw is raised here, in the loop's own thread."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return
        while self._finished:
            peer, outcome = self._finished.popleft()
            self._running -= 1
            if not isinstance(outcome, Proof | ConfigurationError | AdmissionError):
                raise outcome
            if isinstance(outcome, Proof):
                self.drought.end()  # also if its peer has hung up: there is evidence again
            yield peer, outcome

    def _collect(self, peer: Peer, wanted: Binding) -> None:
        outcome: Outcome | BaseException
        turn.wanted.set(lambda: not peer.gone)  # in this thread's own context
        try:
            outcome = attempt(self._prover, wanted)
        except BaseException as error:
            outcome = error
        with self._lock:
            self._finished.append((peer, outcome))
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Threads that still collect end by themselves; the descriptor's number will be somebody else's."""
        with self._lock:
            event, self._event = self._event, -1
        if event >= 0:
            os.close(event)
