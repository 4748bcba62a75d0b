"""A cluster in one process whose engines share memory: real Unix sockets and memfds, driven step by step by a test."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from ringfence import keys
from ringfence.dataplane.request import Request
from ringfence.machines import Machines
from ringfence.runtime.engine import Engine
from ringfence.runtime.events import Network
from ringfence.runtime.link_keys import LinkKeys
from ringfence.transport.tcp import TcpNetwork
from ringfence.transport.unix import LocalNetwork
from tests.in_memory_network import MemoryStream, Pipe, Wires
from tests.memory_cluster import World

LOOPBACK = "127.0.0.1"
IDLE = 50  # rounds in which nothing moves: then nothing will


class LocalWorld(World):
    """The engines of workers on one machine. Use it in a `with` statement."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(size, seed=secrets.randbits(64), **options)  # the sockets of other tests have other names

    def _networks(self, link_keys: Sequence[LinkKeys]) -> Sequence[Network]:
        size = len(link_keys)
        listeners = [socket.create_server((LOOPBACK, 0)) for _ in range(size)]
        addresses = [listener.getsockname() for listener in listeners]
        self.networks = []
        for rank, listener in enumerate(listeners):
            listener.setblocking(False)
            names = partial(keys.local_socket, link_keys[rank].session_key)
            local = LocalNetwork(names, rank, (tuple(range(size)),))
            self.networks.append(TcpNetwork(listener, addresses, local=local))
        return self.networks

    def _serve(self, rank: int, engine: Engine) -> None:
        self.networks[rank].serve(engine.acceptor.accept, engine.fail_on_os_error)

    def step(self, rank: int) -> None:
        """Let one engine do what it can do now."""
        self.networks[rank].poll(0)
        self.engines[rank].run_ready()

    def drive(self, requests: Sequence[Request]) -> None:
        """Let all engines go on until every request has ended. Raises AssertionError if they stand still."""
        idle, before = 0, None
        while not all(request.done for request in requests):
            for rank in range(self.size):
                self.step(rank)
            now = [(link.wire_sent, link.wire_received, link.open) for link in self.links()]
            idle, before = (idle + 1 if now == before else 0), now
            assert idle < IDLE, "the engines wait for each other"

    def links(self) -> list[Any]:
        """Return the links of all engines."""
        return [link for engine in self.engines for link in engine.communicators.links()]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine, network in zip(self.engines, self.networks, strict=True):
            engine.leave()
            network.close()


class _MixedNetwork(TcpNetwork):
    """Unix sockets to workers of this machine, pipes in memory to all others."""

    def __init__(self, wires: Wires, rank: int, local: LocalNetwork) -> None:
        super().__init__(None, (), local=local)
        self._wires = wires
        self._rank = rank
        self._near = local.workers

    def dial(self, link: Any) -> None:
        if link.worker in self._near:
            super().dial(link)
            assert link.is_local
            return
        link.is_local = False
        link.stream = self._wires.connect(self._rank, link.worker)
        self.watch(link.stream, link)
        link.notify(True, True)

    def watch(self, stream: Any, handler: Any) -> None:
        if isinstance(stream, MemoryStream):
            stream.watched_by(handler)
        else:
            super().watch(stream, handler)

    def forget(self, stream: Any) -> None:
        if isinstance(stream, MemoryStream):
            stream.watched_by(None)
        else:
            super().forget(stream)


class MachinesWorld(LocalWorld):
    """The engines of workers on several machines: they share memory inside each, and a test can tap the wires between them."""

    def __init__(self, machines: Machines, **options: Any) -> None:
        self._machines = machines
        super().__init__(sum(map(len, machines)), **options)

    def _networks(self, link_keys: Sequence[LinkKeys]) -> Sequence[Network]:
        self.networks = []
        for rank, keys_of in enumerate(link_keys):
            names = partial(keys.local_socket, keys_of.session_key)
            self.networks.append(_MixedNetwork(self.wires, rank, LocalNetwork(names, rank, self._machines)))
        return self.networks

    def _serve(self, rank: int, engine: Engine) -> None:
        super()._serve(rank, engine)
        self.wires.serve(rank, engine.acceptor.accept)

    def run(
        self, requests: Sequence[Request], change: Callable[[Pipe, bytes], bytes] | None = None, rounds: int = 10_000
    ) -> None:
        """Drive until every request has ended. Raises AssertionError if they stand still."""
        idle = 0
        for _ in range(rounds):
            for rank in range(self.size):
                self.step(rank)
            if all(request.done for request in requests):
                return
            moved = self.wires.deliver(change) or any(engine.ready for engine in self.engines)
            idle = 0 if moved else idle + 1
            assert idle < IDLE, "the engines wait for each other"
        raise AssertionError("the cluster did not become idle")
