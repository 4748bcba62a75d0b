"""A network in memory: pipes between engines of one process, for tests and for groups too large to start as processes.

Bytes stay in a pipe until `Wires.deliver` delivers them, so a test can change, drop, repeat or delay them, as an attacker
on the network can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringfence.machines import Machines


class Pipe:
    """One direction of a connection: bytes written and bytes delivered."""

    def __init__(self, sender: int, receiver: int, capacity: int) -> None:
        self.sender = sender
        self.receiver = receiver
        self.written = bytearray()
        self.delivered = bytearray()
        self.ended = False
        self.capacity = capacity
        self.reader: Any = None  # notified when bytes are delivered
        self.writer: Any = None  # notified when there is room again

    def room(self) -> int:
        return self.capacity - len(self.written) - len(self.delivered)


class MemoryStream:
    """One endpoint of a connection; behaves like a non-blocking socket."""

    def __init__(self, incoming: Pipe, outgoing: Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False

    def send(self, data: memoryview) -> int:
        if self._closed or self._outgoing.ended:
            raise BrokenPipeError(32, "the peer closed the connection")
        room = min(self._outgoing.room(), len(data))
        if room <= 0:
            raise BlockingIOError
        self._outgoing.written += data[:room]
        return room

    def recv_into(self, buffer: memoryview) -> int:
        pipe = self._incoming
        if not pipe.delivered:
            if pipe.ended:
                return 0
            raise BlockingIOError
        count = min(len(buffer), len(pipe.delivered))
        buffer[:count] = pipe.delivered[:count]
        del pipe.delivered[:count]
        if pipe.writer is not None:
            pipe.writer.notify(False, True)
        return count

    def close(self) -> None:
        self._closed = True
        self._incoming.reader = None

    def watched_by(self, handler: Any) -> None:
        self._incoming.reader = handler
        self._outgoing.writer = handler

    @property
    def closing(self) -> bool:
        return self._closed

    @property
    def outgoing(self) -> Pipe:
        return self._outgoing


class Wires:
    """All connections of a cluster in memory."""

    def __init__(self, capacity: int = 1 << 22) -> None:
        self._capacity = capacity
        self._accept: dict[int, Callable[[Any, str], None]] = {}
        self.streams: list[MemoryStream] = []

    def network(self, rank: int) -> MemoryNetwork:
        return MemoryNetwork(self, rank)

    def serve(self, rank: int, accept: Callable[[Any, str], None]) -> None:
        self._accept[rank] = accept

    def connect(self, sender: int, receiver: int) -> MemoryStream:
        """Connect one worker to another; the receiver's engine accepts at once."""
        forth = Pipe(sender, receiver, self._capacity)
        back = Pipe(receiver, sender, self._capacity)
        near, far = MemoryStream(back, forth), MemoryStream(forth, back)
        self.streams += [near, far]
        self._accept[receiver](far, str(sender))
        return near

    def deliver(self, change: Callable[[Pipe, bytes], bytes] | None = None) -> bool:
        """Deliver what was written, through `change` if given. Returns False when nothing moved."""
        moved = False
        for stream in list(self.streams):
            pipe = stream.outgoing
            if pipe.written:
                data = bytes(pipe.written)
                pipe.written.clear()
                pipe.delivered += change(pipe, data) if change else data
                moved = True
                if pipe.reader is not None:
                    pipe.reader.notify(True, False)
            elif stream.closing and not pipe.ended:
                pipe.ended = moved = True
                if pipe.reader is not None:
                    pipe.reader.notify(True, False, True)
        return moved


class MemoryNetwork:
    """The network interface of one engine."""

    machines: Machines = ()

    def __init__(self, wires: Wires, rank: int) -> None:
        self._wires = wires
        self._rank = rank

    def dial(self, link: Any) -> None:
        link.stream = self._wires.connect(self._rank, link.worker)
        self.watch(link.stream, link)
        link.notify(True, True)

    def watch(self, stream: Any, handler: Any) -> None:
        stream.watched_by(handler)

    def forget(self, stream: Any) -> None:
        stream.watched_by(None)
