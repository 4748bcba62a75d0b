"""Peers' proofs, verified beside the loop: one at a time, the address first that has had the least CPU time.

A proof is read and verified before anybody knows who sent it, and some kinds take milliseconds. The loop goes on meanwhile.
Each connection shows one proof and waits for its verdict, so there are never more here than connections that are pending.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from ringfence.admission.policy import Evidence, Policy, Verdict, verdict
from ringfence.join.background import Background
from ringfence.join.peer import Peer
from ringfence.join.cpu_shares import Shares


class Verification:
    """Its descriptor is readable when `finished()` has something."""

    def __init__(self, policy: Policy, shares: Shares) -> None:
        self._policy = policy
        self._shares = shares
        self._queue: dict[Peer, Evidence] = {}  # in the order of arrival
        self._busy = False
        self._background: Background[tuple[Peer, Verdict, float]] = Background()

    def fileno(self) -> int:
        return self._background.fileno()

    def start(self, peer: Peer, evidence: Evidence) -> None:
        """Verify what this peer shows, when its turn comes."""
        self._queue[peer] = evidence
        self._begin_next()

    def cancel(self, peer: Peer) -> None:
        """It is gone: what has not begun is not done."""
        self._queue.pop(peer, None)

    def finished(self) -> Iterator[tuple[Peer, Verdict]]:
        """Verdicts since the last call."""
        for peer, found, seconds in self._background.finished():
            self._shares.charge(peer.address, seconds)
            self._busy = False
            self._begin_next()
            yield peer, found

    def _begin_next(self) -> None:
        if self._queue and not self._busy:
            self._busy = True
            peer = min(self._queue, key=lambda each: self._shares.mark(each.address))
            evidence = self._queue.pop(peer)
            self._background.start("ringfence verifies a proof", lambda: (peer, *_verify(self._policy, evidence)))

    def close(self) -> None:
        self._queue.clear()
        self._background.close()


def _verify(policy: Policy, evidence: Evidence) -> tuple[Verdict, float]:
    """The verdict, and the CPU time of this thread that it took."""
    before = time.thread_time()
    found = verdict(policy, evidence)
    return found, time.thread_time() - before
