"""A hostile TCP relay: the workers of a group dial it in place of each other, and it carries out one attack.

It has a port for each worker, at which all other workers dial that worker's links.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

from tests import ports
from tests.attack.attacker import Attacker, AttackPlan
from tests.attack.wire_messages import Wire
from tests.limits import HANG

HOST = "127.0.0.1"


class Relay(Attacker):
    """An attacker between the worker processes of one group. Use it in a `with` statement."""

    def __init__(self, world: int, plan: AttackPlan, hosts: Sequence[str] = ()) -> None:
        """`hosts`: what the roster lists for each worker; by default one address for all."""
        super().__init__(plan)
        self._hosts = hosts or [HOST] * world
        self._lock = threading.Lock()  # one message at a time
        self._targets = [ports.block() for _ in range(world)]  # a worker's link listener takes the first of its ports
        self._sinks: dict[int, socket.socket] = {}
        self._sending: dict[int, threading.Lock] = {}  # for each wire: one message at a time, whole
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._trouble: list[str] = []  # errors of the relay itself, which make a trial invalid
        self._listeners = [socket.create_server((host, 0), backlog=64) for host in self._hosts]
        for rank in range(world):
            self._spawn(self._accept, rank)

    def environments(self) -> list[dict[str, str]]:
        """Return the variables that make each worker listen where the relay expects it and advertise the relay."""
        return [
            {
                "RINGFENCE_PORTS": f"{block[0]}-{block[-1]}",
                "RINGFENCE_ADVERTISE": f"{host}:{listener.getsockname()[1]}",
                **({} if host == HOST else {"RINGFENCE_INTERFACE": host}),
            }
            for host, block, listener in zip(self._hosts, self._targets, self._listeners, strict=True)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for end in [*self._listeners, *self._sockets]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=HANG)
            assert not thread.is_alive()
        for end in [*self._listeners, *self._sockets]:
            end.close()
        for block in self._targets:
            ports.release(block)
        assert not self._trouble

    def stop_attacking(self) -> None:
        """Only forward from now on."""
        with self._lock:
            self.plan = AttackPlan()

    # -- for actions; the lock is held -------------------------------------------------------------------------------

    def inject(self, wire: Wire, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._send(wire, data)

    def cut(self, wire: Wire) -> None:
        with contextlib.suppress(OSError):
            self._sinks[id(wire)].shutdown(socket.SHUT_WR)

    def dial(self, receiver: int, data: bytes) -> None:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((self._hosts[receiver], self._targets[receiver][0]))
            self._sockets.append(connection)
            connection.sendall(data)

    # -- forwarding -------------------------------------------------------------------------------------------------

    def _spawn(self, function: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, rank: int) -> None:
        while True:
            try:
                dialler, _ = self._listeners[rank].accept()
            except OSError:  # the listener was closed
                return
            try:
                worker = socket.create_connection((self._hosts[rank], self._targets[rank][0]))
            except OSError as error:
                self._trouble.append(f"worker {rank} does not listen at its port: {error}")
                dialler.close()
                continue
            self._join(dialler, worker)

    def _join(self, dialler: socket.socket, worker: socket.socket) -> None:
        with self._lock:
            self._sockets += [dialler, worker]
            number = len(self.wires) // 2
            pairs = [(dialler, worker, Wire(number, True)), (worker, dialler, Wire(number, False))]
            for source, sink, wire in pairs:
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.wires.append(wire)
                self._sinks[id(wire)] = sink
                self._sending[id(wire)] = threading.Lock()
        for source, _, wire in pairs:
            self._spawn(self._pump, source, wire)

    def _pump(self, source: socket.socket, wire: Wire) -> None:
        with contextlib.suppress(OSError):  # either end has closed the connection
            while chunk := source.recv(1 << 18):
                for message in wire.splitter.feed(chunk):
                    with self._lock:
                        out = self.forward(wire, message)
                    self._send(wire, out)
            self._send(wire, wire.splitter.remainder())
        self.cut(wire)

    def _send(self, wire: Wire, data: bytes) -> None:
        with self._sending[id(wire)]:
            self._sinks[id(wire)].sendall(data)
