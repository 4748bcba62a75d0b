"""A cluster in memory: real engines and real sealing, with pipes in place of sockets that an attacker can tap."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfence.admission.renewal import Challenge, Renewal
from ringfence.backend.binding import bytes_of, dtype_code, reduction_of
from ringfence.collectives import Buffer, Collective, Thresholds, choose, divide
from ringfence.dataplane.buffers import as_bytes
from ringfence.dataplane.request import CollectiveRequest, Request
from ringfence.keys import Secret
from ringfence.link.frames import Call
from ringfence.runtime.communicator import Communicator
from ringfence.runtime.control import Abort, Bye, ControlMessage
from ringfence.runtime.engine import Engine
from ringfence.runtime.events import Network, Platform
from ringfence.runtime.link_keys import LinkKeys
from ringfence.runtime.peer_verification import LinkVerifier
from tests.in_memory_network import Pipe, Wires


class MemoryEdge:
    """A control edge between two engines."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.exporter = b""
        self.other: MemoryEdge
        self.engine: Engine
        self._arrived: list[ControlMessage] = []

    def send(self, message: Abort | Bye | Challenge | Renewal) -> None:
        self.other._arrived.append(message)
        self.other.engine.call_soon(lambda: self.other.engine.on_control(self.other))

    def receive(self) -> list[ControlMessage]:
        arrived, self._arrived = self._arrived, []
        return arrived


class World:
    """The engines of one session, driven by the test. Time advances only when the test advances it."""

    def __init__(
        self,
        size: int,
        seed: int = 0,
        table: Thresholds | None = None,
        capacity: int = 1 << 22,
        verify_peers: Callable[[list[bytes]], Sequence[LinkVerifier | None]] | None = None,
        covers: bool = False,
    ) -> None:
        """`verify_peers` receives the public keys and returns the peer verifier of each worker.

        `covers`: whether the tags of links cover what is forwarded.
        `capacity` is the size of a pipe in bytes. A test may replace the entropy of a worker in `randoms`.
        """
        self.size = size
        self.now = 0.0
        self.wires = Wires(capacity)
        draw = random.Random(seed)
        private = [X25519PrivateKey.from_private_bytes(draw.randbytes(32)) for _ in range(size)]
        public = [key.public_key().public_bytes_raw() for key in private]
        session_key = Secret(draw.randbytes(32))
        edges = self._tree()
        peer_verifiers = verify_peers(public) if verify_peers else [None] * size
        self.randoms: list[Callable[[int], bytes]] = [draw.randbytes] * size
        link_keys = [LinkKeys(session_key, private[rank], public, covers=covers) for rank in range(size)]
        networks = self._networks(link_keys)
        self.engines = [
            Engine(
                rank,
                size,
                link_keys[rank],
                networks[rank],
                table or Thresholds(),
                edges[rank],
                peer_verifiers[rank],
                Platform(clock=lambda: self.now, random=self._random_of(rank)),
            )
            for rank in range(size)
        ]
        for rank, engine in enumerate(self.engines):
            self._serve(rank, engine)
            for edge in edges[rank]:
                edge.engine = engine
        self.communicators = self.add_communicator("world", range(size))

    def _networks(self, link_keys: Sequence[LinkKeys]) -> Sequence[Network]:
        """Return the network of each engine."""
        return [self.wires.network(rank) for rank in range(len(link_keys))]

    def _serve(self, rank: int, engine: Engine) -> None:
        self.wires.serve(rank, engine.acceptor.accept)

    def _random_of(self, rank: int) -> Callable[[int], bytes]:
        return lambda length: self.randoms[rank](length)

    def _tree(self) -> list[list[MemoryEdge]]:
        edges: list[list[MemoryEdge]] = [[] for _ in range(self.size)]
        for child in range(1, self.size):
            parent = (child - 1) // 2
            up, down = MemoryEdge(parent), MemoryEdge(child)
            up.other, down.other = down, up
            edges[child].append(up)
            edges[parent].append(down)
        return edges

    def add_communicator(self, name: str, ranks: Sequence[int]) -> dict[int, Communicator]:
        return {rank: self.engines[rank].add_communicator(name, tuple(ranks)) for rank in ranks}

    def submit(self, communicator: Communicator, request: CollectiveRequest) -> CollectiveRequest:
        engine_of(communicator).submit(communicator, request)
        return request

    def run(
        self,
        requests: Sequence[Request],
        change: Callable[[Pipe, bytes], bytes] | None = None,
        rounds: int = 10_000,
    ) -> None:
        """Drive until every request has ended, or no byte moves and no work is due."""
        for _ in range(rounds):
            for engine in self.engines:
                engine.run_ready()
            if all(request.done for request in requests):
                return
            if not self.wires.deliver(change) and not any(engine.ready for engine in self.engines):
                return
        raise AssertionError("the cluster did not become idle")

    def wait(self, seconds: float) -> None:
        """Advance the time."""
        self.now += seconds
        for engine in self.engines:
            engine.expire()
        for engine in self.engines:
            engine.run_ready()


def engine_of(communicator: Communicator) -> Engine:
    """Return the engine that a communicator reports to."""
    engine = communicator.context.events
    assert isinstance(engine, Engine)
    return engine


def all_reduce(
    communicator: Communicator, tensor: torch.Tensor, deadline: float = 10.0, reduction: Any = dist.ReduceOp.SUM
) -> CollectiveRequest:
    """Return an all-reduce of a contiguous tensor, bound as the backend binds it."""
    code, combine, average = reduction_of(reduction, tensor.dtype)
    weight, table = bytes_of(tensor), communicator.table
    schedule = choose(Collective.ALL_REDUCE, communicator.size, communicator.rank, 0, weight, table, average=average)
    call = Call(Collective.ALL_REDUCE, code, dtype_code(tensor.dtype), schedule.identifier, 0, tensor.numel())
    passes = divide(Collective.ALL_REDUCE, communicator.size, weight, table)
    tensors = {Buffer.DATA: [as_bytes(tensor)]}
    return CollectiveRequest(call, deadline, tensor, schedule, passes, tensors, tensor.dtype, combine)


def broadcast(
    communicator: Communicator, tensor: torch.Tensor, root: int = 0, deadline: float = 10.0
) -> CollectiveRequest:
    """Return a broadcast of a contiguous tensor."""
    schedule = choose(
        *(Collective.BROADCAST, communicator.size, communicator.rank, root, bytes_of(tensor), communicator.table),
        machines=communicator.machines,
    )
    call = Call(Collective.BROADCAST, 0, dtype_code(tensor.dtype), schedule.identifier, root, tensor.numel())
    passes = divide(Collective.BROADCAST, communicator.size, bytes_of(tensor), communicator.table)
    tensors = {Buffer.DATA: [as_bytes(tensor)]}
    return CollectiveRequest(call, deadline, tensor, schedule, passes, tensors, tensor.dtype, None)


def all_gather(
    communicator: Communicator, whole: torch.Tensor, part: torch.Tensor, deadline: float = 10.0
) -> CollectiveRequest:
    """Return an all-gather of contiguous tensors, in which every rank has the same number of elements."""
    table = communicator.table
    schedule = choose(
        *(Collective.ALL_GATHER, communicator.size, communicator.rank, 0, bytes_of(whole), table),
        machines=communicator.machines,
    )
    call = Call(Collective.ALL_GATHER, 0, dtype_code(part.dtype), schedule.identifier, 0, whole.numel())
    passes = divide(Collective.ALL_GATHER, communicator.size, bytes_of(part), table)
    parts = {Buffer.INPUT: [as_bytes(part)], Buffer.OUTPUT: [as_bytes(each) for each in whole.chunk(communicator.size)]}
    return CollectiveRequest(call, deadline, (whole, part), schedule, passes, parts, part.dtype, None)
