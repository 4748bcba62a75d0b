"""Verification again while a session goes on: the challenges of a worker to its neighbours in the tree, and its answers.

Everything here runs in the driving thread and returns at once: proofs are made and verified by `ProofJobs`, in another one.
A worker that does not pass, or has not answered when the next challenge is due, ends the session on every worker, by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from ringfence import keys
from ringfence.admission.renewal import Challenge, Renewal
from ringfence.errors import AdmissionError, ProtocolError, RingfenceError
from ringfence.runtime.aborts import Edge

Fail = Callable[[RingfenceError, int], None]


class ProofJobs(Protocol):
    """Makes and verifies proofs in the background. The callbacks are called in the driving thread.

    An error is this worker's own: it could not make a proof, or read the policy. A verdict is about the neighbour.
    """

    def prove(self, edge: Edge, nonce: bytes, done: Callable[[Renewal | RingfenceError], None], /) -> None: ...

    def verify(self, edge: Edge, nonce: bytes, renewal: Renewal, done: Callable[[Verdict], None], /) -> None: ...


@dataclass(frozen=True)
class Verdict:
    """`refusal`: why the neighbour does not pass. `error`: why this worker could not verify it."""

    refusal: AdmissionError | None = None
    error: RingfenceError | None = None


class _Neighbour:
    """One edge: what this worker has asked and what it was asked."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.nonce: bytes | None = None  # of the challenge that is not answered, or whose answer is not verified
        self.answered = False
        self.late = False  # this worker has not verified the answer for an interval
        self.proving = False  # a challenge of the neighbour is not answered yet


class Reverification:
    """Challenges the neighbours at each `tick`, and answers theirs."""

    def __init__(
        self,
        rank: int,
        interval: int,
        edges: Iterable[Edge],
        due: Callable[[int], bool],
        jobs: ProofJobs,
        fail: Fail,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """`due`: whether a neighbour is verified again. `fail`: ends the session, naming a worker."""
        self._rank = rank
        self._interval = interval
        self._neighbours = {edge.peer: _Neighbour(edge) for edge in edges}
        self._due = due
        self._jobs = jobs
        self._fail = fail
        self._random = random
        self.ticks = 0

    def tick(self, present: Iterable[int]) -> None:
        """Called once in an interval, after what has arrived was handled. `present`: neighbours that have not left."""
        self.ticks += 1
        for peer in present:
            neighbour = self._neighbours[peer]
            if not self._due(peer):
                continue
            if neighbour.nonce is None:
                neighbour.nonce, neighbour.answered = self._random(keys.NONCE_BYTES), False
                neighbour.edge.send(Challenge(neighbour.nonce))
            elif not neighbour.answered:
                text = f"worker {peer} did not prove itself again to worker {self._rank} within {self._interval} s"
                self._fail(AdmissionError(f"{text} (verify_every)"), peer)
            elif neighbour.late:
                text = f"worker {self._rank} has not verified worker {peer} again within {self._interval} s"
                self._fail(AdmissionError(f"{text} (verify_every)"), self._rank)
            else:
                neighbour.late = True

    def take(self, edge: Edge, message: Challenge | Renewal) -> None:
        """Handle a message of a neighbour. Raises ProtocolError if it is out of order."""
        neighbour = self._neighbours[edge.peer]
        if isinstance(message, Challenge):
            if neighbour.proving or not self._due(self._rank):
                raise ProtocolError(f"worker {edge.peer} sent a challenge out of order")
            neighbour.proving = True
            self._jobs.prove(edge, message.nonce, lambda found: self._on_proof(neighbour, found))
            return
        if neighbour.nonce is None or neighbour.answered:
            raise ProtocolError(f"worker {edge.peer} sent a renewal that answers no challenge")
        neighbour.answered = True
        self._jobs.verify(edge, neighbour.nonce, message, lambda found: self._on_verdict(neighbour, found))

    def _on_proof(self, neighbour: _Neighbour, found: Renewal | RingfenceError) -> None:
        neighbour.proving = False
        if isinstance(found, Renewal):
            neighbour.edge.send(found)
        else:
            self._fail(AdmissionError(f"worker {self._rank} cannot prove itself again: {found}"), self._rank)

    def _on_verdict(self, neighbour: _Neighbour, found: Verdict) -> None:
        peer = neighbour.edge.peer
        if found.refusal is not None:
            text = f"worker {peer} no longer passes verification by worker {self._rank}: "
            self._fail(found.refusal.with_prefix(text), peer)
        elif found.error is not None:
            text = f"worker {self._rank} cannot verify worker {peer} again: {found.error}"
            self._fail(AdmissionError(text), self._rank)
        else:
            neighbour.nonce, neighbour.late = None, False
