"""A cluster in one process whose engines share memory: real Unix sockets and memfds, driven step by step by a test."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from ringfence import keys
from ringfence.dataplane.request import Request
from ringfence.runtime.engine import Engine
from ringfence.runtime.events import Network
from ringfence.runtime.link_keys import LinkKeys
from ringfence.transport.tcp import TcpNetwork
from ringfence.transport.unix import LocalNetwork
from tests.memory_cluster import World

LOOPBACK = "127.0.0.1"
IDLE = 50  # rounds in which nothing moves: then nothing will


class LocalWorld(World):
    """The engines of workers on one machine. Use it in a `with` statement."""

    def __init__(self, size: int) -> None:
        super().__init__(size, seed=secrets.randbits(64))  # the sockets of other tests have other names

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
