"""Verification of peers' proofs in a background thread, one at a time, ordered by the CPU time used for each address.

A proof is parsed and verified before its sender is authenticated, and some kinds take milliseconds; the join loop continues
meanwhile. Each connection presents one proof and waits for its verdict, so the queue is never longer than the list of pending
connections.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ringfence.admission.policy import Evidence, Policy, Verdict, verdict
from ringfence.errors import AdmissionError
from ringfence.session.join.background import Background
from ringfence.session.join.cpu_shares import CpuShares
from ringfence.session.join.peer import Peer


class Verification:
    """A queue of proofs. Its descriptor is readable when `finished()` has a verdict.

    `policy` is called for each proof, in the background thread; it may raise AdmissionError.
    """

    def __init__(self, policy: Callable[[], Policy], shares: CpuShares) -> None:
        self._policy = policy
        self._shares = shares
        self._queue: dict[Peer, Evidence] = {}  # in the order of arrival
        self._busy = False
        self._background: Background[tuple[Peer, Verdict, float]] = Background()

    def fileno(self) -> int:
        return self._background.fileno()

    def start(self, peer: Peer, evidence: Evidence) -> None:
        """Queue the proof that `peer` presented."""
        self._queue[peer] = evidence
        self._start_next()

    def cancel(self, peer: Peer) -> None:
        """Drop the proof of a peer that disconnected, unless its verification has started."""
        self._queue.pop(peer, None)

    def finished(self) -> Iterator[tuple[Peer, Verdict]]:
        """Yield the verdicts since the last call, and start the next verification."""
        for peer, found, seconds in self._background.finished():
            self._shares.charge(peer.address, seconds)
            self._busy = False
            self._start_next()
            yield peer, found

    def _start_next(self) -> None:
        if self._queue and not self._busy:
            self._busy = True
            peer = min(self._queue, key=lambda each: self._shares.start_tag(each.address))
            evidence = self._queue.pop(peer)
            self._background.start("ringfence verifies a proof", lambda: (peer, *_verify(self._policy, evidence)))

    def close(self) -> None:
        self._queue.clear()
        self._background.close()


def _verify(policy: Callable[[], Policy], evidence: Evidence) -> tuple[Verdict, float]:
    """Return the verdict and the CPU time that this thread used for it."""
    try:
        current = policy()
    except AdmissionError as error:
        return error, 0.0
    before = time.thread_time()
    found = verdict(current, evidence)
    return found, time.thread_time() - before
