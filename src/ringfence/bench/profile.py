"""Where the time of a sealed collective goes: ringfence with a clock around each stage.

    seal, open      AES-256-GCM, tags of forwarded frames included
    reduce          the addition
    send, receive   system calls on sockets
    wait            in epoll, because nothing could be done
    rest            everything else: Python, and waiting for the interpreter's lock between the calls

The clocks wrap the objects that the engine is made of, from outside: the product's own path has none.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Final

from ringfence.keys import Secret
from ringfence.link.seal import Buffer, Opener, OriginKeys, Sealer
from ringfence.runtime.engine import Engine
from ringfence.runtime.group import Group
from ringfence.runtime.links import Link, Stream
from ringfence.runtime.operation import CollectiveOperation
from ringfence.session import Session

STAGES: Final = ("seal", "open", "reduce", "send", "receive", "wait")


class Stages:
    """Nanoseconds by stage."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(STAGES, 0)

    def clear(self) -> None:
        self.spent.update(dict.fromkeys(STAGES, 0))

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with a clock around it."""
        spent = self.spent

        def run(*arguments: Any, **keywords: Any) -> Any:
            start = perf_counter_ns()
            try:
                return function(*arguments, **keywords)
            finally:
                spent[stage] += perf_counter_ns() - start

        return run


class _TimedSealer(Sealer):
    __slots__ = ("_stages",)

    def __init__(self, secret: Secret, alive: Any, stages: Stages) -> None:
        super().__init__(secret, alive)
        self._stages = stages.spent

    def seal_into(self, header: Buffer, plaintext: Buffer, target: memoryview) -> None:
        start = perf_counter_ns()
        super().seal_into(header, plaintext, target)
        self._stages["seal"] += perf_counter_ns() - start

    def tag(self, authenticated: Buffer) -> bytes:
        start = perf_counter_ns()
        tag = super().tag(authenticated)
        self._stages["seal"] += perf_counter_ns() - start
        return tag


class _TimedOpener(Opener):
    __slots__ = ("_stages",)

    def __init__(self, secret: Secret, stages: Stages) -> None:
        super().__init__(secret)
        self._stages = stages.spent

    def open_into(self, header: Buffer, sealed: Buffer, target: memoryview) -> None:
        start = perf_counter_ns()
        super().open_into(header, sealed, target)
        self._stages["open"] += perf_counter_ns() - start

    def check(self, authenticated: Buffer, tag: Buffer) -> None:
        start = perf_counter_ns()
        super().check(authenticated, tag)
        self._stages["open"] += perf_counter_ns() - start


class _TimedOriginKeys(OriginKeys):
    __slots__ = ("_stages",)

    def __init__(self, instance: Secret, rank: int, alive: Any, stages: Stages) -> None:
        super().__init__(instance, rank, alive)
        self._stages = stages.spent

    def seal_into(self, counter: int, authenticated: Buffer, plaintext: Buffer, target: memoryview) -> None:
        start = perf_counter_ns()
        super().seal_into(counter, authenticated, plaintext, target)
        self._stages["seal"] += perf_counter_ns() - start

    def open_into(self, origin: int, counter: int, authenticated: Buffer, sealed: Buffer, target: memoryview) -> None:
        start = perf_counter_ns()
        super().open_into(origin, counter, authenticated, sealed, target)
        self._stages["open"] += perf_counter_ns() - start


class _TimedStream:
    """A socket with clocks around what moves bytes; all else is the socket's own."""

    def __init__(self, stream: socket.socket, stages: Stages) -> None:
        self._stream = stream
        for name, stage in (
            ("send", "send"),
            ("sendmsg", "send"),
            ("recv_into", "receive"),
            ("recvmsg_into", "receive"),
        ):
            setattr(self, name, stages.timed(stage, getattr(stream, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _TimedNetwork:
    """The engine's side of the network: dialled streams get their clocks here."""

    def __init__(self, network: Any, stages: Stages) -> None:
        self._network = network
        self._stages = stages
        network.poll = stages.timed("wait", network.poll)  # the loop polls this very object

    def dial(self, link: Link) -> None:
        self._network.dial(link)
        if isinstance(link.stream, socket.socket):
            link.stream = _timed_stream(link.stream, self._stages)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def _timed_stream(stream: Any, stages: Stages) -> Stream:
    wrapped: Any = _TimedStream(stream, stages)
    return wrapped  # type: ignore[no-any-return]  # its methods are set one by one


class ProfiledEngine(Engine):
    """An engine that knows where its time went."""

    def __init__(self, *, network: Any, **others: Any) -> None:
        self.stages = Stages()
        super().__init__(network=_TimedNetwork(network, self.stages), **others)

    def sealer(self, secret: Secret) -> Sealer:
        return _TimedSealer(secret, self.alive, self.stages)

    def opener(self, secret: Secret) -> Opener:
        return _TimedOpener(secret, self.stages)

    def origin_keys(self, instance: Secret, rank: int) -> OriginKeys:
        return _TimedOriginKeys(instance, rank, self.alive, self.stages)

    def accept(self, stream: Stream, address: str) -> None:
        super().accept(_timed_stream(stream, self.stages), address)

    def submit(self, group: Group, operation: CollectiveOperation) -> None:
        if operation.combine is not None:
            operation.combine = self.stages.timed("reduce", operation.combine)
        super().submit(group, operation)


class ProfiledSession(Session):
    """Sealed as ever, with clocks."""

    engine_type = ProfiledEngine
