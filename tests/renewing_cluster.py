"""A cluster in memory whose workers verify each other again, by evidence that the test's own chips or services make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringfence.admission.binding import Binding
from ringfence.admission.policy import Policy
from ringfence.admission.renewal import Challenge, Renewal, Renewals
from ringfence.admission.tree import parent_of
from ringfence.errors import AdmissionError, RingfenceError
from ringfence.runtime.aborts import Edge
from ringfence.runtime.engine import Engine
from ringfence.runtime.reverification import Reverification, Verdict
from tests.memory_cluster import MemoryEdge, World
from tests.unit.admission_samples import fixed_bytes
from tests.unit.peer_verification_samples import Circle, Technology, circle

INTERVAL = 600
Message = Challenge | Renewal


class MemoryJobs:
    """The proofs of one worker. A test may replace what it makes, and the policy that it verifies by."""

    def __init__(self, engine: Engine, renewals: Renewals, technology: Technology) -> None:
        self.renewals = renewals
        self.kind = technology.kind
        self.make: Callable[[Binding], bytes] = technology.make
        self.policy: Policy = technology.policy
        self.error: RingfenceError | None = None  # what this machine fails with
        self.silent = False
        self.verified: list[int] = []
        self._engine = engine

    def prove(self, edge: Edge, nonce: bytes, done: Callable[[Renewal | RingfenceError], None]) -> None:
        if self.silent:
            return
        binding = self.renewals.own_binding(edge.peer, edge.exporter, nonce)
        found = Renewal(self.kind, self.make(binding)) if self.error is None else self.error
        self._engine.call_soon(lambda: done(found))

    def verify(self, edge: Edge, nonce: bytes, renewal: Renewal, done: Callable[[Verdict], None]) -> None:
        if self.silent:
            return
        try:
            self.renewals.verify(self.policy, edge.peer, edge.exporter, nonce, renewal)
            found = Verdict()
            self.verified.append(edge.peer)
        except AdmissionError as error:
            found = Verdict(refusal=error)
        if self.error is not None:
            found = Verdict(error=self.error)
        self._engine.call_soon(lambda: done(found))


class RenewingWorld(World):
    """Workers in the admission tree. `on_wire[sender, receiver]` may change what one sends another again, or drop it."""

    def __init__(self, size: int, technology: Technology) -> None:
        self.on_wire: dict[tuple[int, int], Callable[[Message], Message | None]] = {}
        found: list[Circle] = []

        def no_links(public: list[bytes]) -> list[None]:
            found.append(circle(public, technology))
            return [None] * size

        super().__init__(size, verify_peers=no_links)
        (self.circle,) = found
        roster = self.circle.roster
        self.jobs = [MemoryJobs(engine, Renewals(roster, rank), technology) for rank, engine in enumerate(self.engines)]
        for rank, engine in enumerate(self.engines):
            jobs = self.jobs[rank]
            engine.reverification = Reverification(
                rank, INTERVAL, engine.edges, jobs.renewals.due, jobs, engine.fail, self._random_of(rank)
            )

    def _tree(self) -> list[list[MemoryEdge]]:
        edges: list[list[MemoryEdge]] = [[] for _ in range(self.size)]
        for child in range(1, self.size):
            parent = parent_of(child)
            assert parent is not None
            up, down = _TappedEdge(self, child, parent), _TappedEdge(self, parent, child)
            up.other, down.other = down, up
            up.exporter = down.exporter = fixed_bytes(f"connection {child}")
            edges[child].append(up)
            edges[parent].append(down)
        return edges

    def tick(self, *ranks: int) -> None:
        """Let the interval of these workers pass; of all by default."""
        for rank in ranks or range(self.size):
            self.engines[rank].call_soon(self.engines[rank].verify_again)
        while any(engine.ready for engine in self.engines):
            for engine in self.engines:
                engine.run_ready()

    def failures(self) -> list[str]:
        return [f"{type(each.failure).__name__}: {each.failure}" for each in self.engines]


class _TappedEdge(MemoryEdge):
    def __init__(self, world: RenewingWorld, own: int, peer: int) -> None:
        super().__init__(peer)
        self._world, self._own = world, own

    def send(self, message: Any) -> None:
        change = self._world.on_wire.get((self._own, self.peer))
        if change is not None and isinstance(message, Challenge | Renewal):
            message = change(message)
        if message is not None:
            super().send(message)
