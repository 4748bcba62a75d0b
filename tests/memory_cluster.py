"""A world in memory: real engines, real sealing, pipes instead of sockets, and a seat for the attacker."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfence.backend.binding import bytes_of, dtype_code, parts_of, reduction_of
from ringfence.collectives import Buffer, Collective, Table, choose
from ringfence.control import Abort, Bye, ControlMessage
from ringfence.dataplane.request import CollectiveOperation, Operation
from ringfence.keys import Secret
from ringfence.link.frames import Call
from ringfence.runtime.communicator import Group
from ringfence.runtime.engine import Engine
from ringfence.runtime.peer_verification import PeerVerifier
from ringfence.transport.in_memory import Pipe, Wires


class MemoryEdge:
    """A control edge between two engines."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.other: MemoryEdge
        self.engine: Engine
        self._arrived: list[ControlMessage] = []

    def send(self, message: Abort | Bye) -> None:
        self.other._arrived.append(message)
        self.other.engine.later(lambda: self.other.engine.on_control(self.other))

    def receive(self) -> list[ControlMessage]:
        arrived, self._arrived = self._arrived, []
        return arrived


class World:
    """Engines of one session, driven by hand. Time stands still unless a test moves it."""

    def __init__(
        self,
        size: int,
        seed: int = 0,
        table: Table | None = None,
        capacity: int = 1 << 22,
        verify_peers: Callable[[list[bytes]], Sequence[PeerVerifier | None]] | None = None,
    ) -> None:
        """`verify_peers` is told the public keys, and says for each worker who is verified at peer verification."""
        self.size = size
        self.now = 0.0
        self.wires = Wires(capacity)
        draw = random.Random(seed)
        private = [X25519PrivateKey.from_private_bytes(draw.randbytes(32)) for _ in range(size)]
        public = [key.public_key().public_bytes_raw() for key in private]
        session_key = Secret(draw.randbytes(32))
        edges = self._tree()
        peer_verifier = verify_peers(public) if verify_peers else [None] * size
        self.engines = [
            Engine(
                rank,
                size,
                session_key,
                private[rank],
                public,
                self.wires.network(rank),
                table or Table(),
                edges[rank],
                clock=lambda: self.now,
                random=draw.randbytes,
                peer_verifier=peer_verifier[rank],
            )
            for rank in range(size)
        ]
        for rank, engine in enumerate(self.engines):
            self.wires.serve(rank, engine.acceptor.accept)
            for edge in edges[rank]:
                edge.engine = engine
        self.groups = self.add_group("world", range(size))

    def _tree(self) -> list[list[MemoryEdge]]:
        edges: list[list[MemoryEdge]] = [[] for _ in range(self.size)]
        for child in range(1, self.size):
            parent = (child - 1) // 2
            up, down = MemoryEdge(parent), MemoryEdge(child)
            up.other, down.other = down, up
            edges[child].append(up)
            edges[parent].append(down)
        return edges

    def add_group(self, name: str, ranks: Sequence[int]) -> dict[int, Group]:
        return {rank: self.engines[rank].add_group(name, tuple(ranks)) for rank in ranks}

    def submit(self, group: Group, operation: CollectiveOperation) -> CollectiveOperation:
        group.engine.submit(group, operation)
        return operation

    def run(
        self,
        operations: Sequence[Operation],
        change: Callable[[Pipe, bytes], bytes] | None = None,
        rounds: int = 10_000,
    ) -> None:
        """Drive until every operation has ended or nothing moves any more."""
        for _ in range(rounds):
            for engine in self.engines:
                engine.run_ready()
            if all(operation.done for operation in operations):
                return
            if not self.wires.deliver(change) and not any(engine.ready for engine in self.engines):
                return
        raise AssertionError("the world never came to rest")

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        for engine in self.engines:
            engine.expire()
        for engine in self.engines:
            engine.run_ready()


def all_reduce(
    group: Group, tensor: torch.Tensor, deadline: float = 10.0, operation: Any = dist.ReduceOp.SUM
) -> CollectiveOperation:
    """An all-reduce of a contiguous tensor, bound as the backend binds it."""
    code, combine, average = reduction_of(operation, tensor.dtype)
    weight, table = bytes_of(tensor), group.engine.table
    schedule = choose(Collective.ALL_REDUCE, group.size, group.rank, 0, weight, table, average=average)
    call = Call(Collective.ALL_REDUCE, code, dtype_code(tensor.dtype), schedule.identifier, 0, tensor.numel())
    parts = {Buffer.DATA: parts_of(schedule, Buffer.DATA, [tensor])}
    return CollectiveOperation(call, deadline, tensor, schedule, parts, tensor.dtype, combine)


def broadcast(group: Group, tensor: torch.Tensor, root: int = 0, deadline: float = 10.0) -> CollectiveOperation:
    """A broadcast of a contiguous tensor."""
    schedule = choose(Collective.BROADCAST, group.size, group.rank, root, bytes_of(tensor), group.engine.table)
    call = Call(Collective.BROADCAST, 0, dtype_code(tensor.dtype), schedule.identifier, root, tensor.numel())
    parts = {Buffer.DATA: parts_of(schedule, Buffer.DATA, [tensor])}
    return CollectiveOperation(call, deadline, tensor, schedule, parts, tensor.dtype, None)
