"""TCP: listening, dialling, and polling of connections. Knows nothing of the protocol above."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from ringfence import keys
from ringfence.errors import PeerLostError
from ringfence.machines import Machines
from ringfence.transport.outage import Handler, dial_briefly, tolerate
from ringfence.transport.unix import LocalNetwork

_ACCEPTS = 32
_LOCAL_PAUSE = (
    0.05  # seconds without local connections after one of another user, who could otherwise flood this worker
)
_OPEN_FILES = 1 << 16  # enough for a large world; the default of many systems is 1024
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # retrying would fail again
_EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_READABLE = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_ENDED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_WRITABLE = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR


def raise_limit_of_files() -> None:
    """Raise the soft limit of open files: every connection is a descriptor, and a large run has thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def resolve(host: str, port: int) -> tuple[int, Any]:
    """Return family and address of a host name, as `socket` and `connect` take them. Blocks while the name is resolved."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PeerLostError(f"{host} does not resolve on this machine ({reason})") from error
    return family, address


def refusal(error: OSError) -> str:
    """The text of an error of this machine, with advice where there is some."""
    advice = ". Raise the limit of open files (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    return f"{error.strerror or error}{advice}"


def connect(stream: socket.socket, address: Any) -> None:
    """Start a non-blocking connect. Raises PeerLostError if it fails immediately, for example without a route."""
    error = stream.connect_ex(address)
    if error not in (0, errno.EINPROGRESS):
        raise PeerLostError(os.strerror(error)) from OSError(error, os.strerror(error))


class TcpNetwork:
    """Connections to the addresses in the roster, and incoming connections of the listener.

    Two nested epolls. `_service` has the descriptors that are always served: the listener, unauthenticated peers, control
    connections, point-to-point links. `_all` has `_service` and the links of collectives, which are served only while a
    collective is in progress; so a peer that starts a collective early does not wake an idle worker.
    """

    def __init__(
        self,
        listener: socket.socket | None,
        addresses: Sequence[tuple[str, int]],
        outage: float = keys.OUTAGE_SECONDS,
        local: LocalNetwork | None = None,
    ) -> None:
        """`listener`: None if another network accepts. `outage`: seconds that a connection may go without an answer.
        `local`: for workers of this machine."""
        self._local = local
        self._outage = outage
        self._service = select.epoll()
        self._all = select.epoll()
        self._all.register(self._service.fileno(), select.EPOLLIN)
        self._idle = select.epoll()  # waits for `_service` without consuming its events
        self._idle.register(self._service.fileno(), select.EPOLLIN)
        self._listener = listener
        self._addresses = addresses
        self._resolved: dict[int, tuple[int, Any]] = {}  # by worker: family and address
        self._handlers: dict[int, Handler] = {}
        self._streams: dict[int, socket.socket] = {}
        self._homes: dict[int, select.epoll] = {}
        self._accept: Callable[[socket.socket, str, bool], None] | None = None
        self._exhausted: Callable[[OSError], None] | None = None
        self._local_resumes: float | None = None  # when local connections are accepted again

    def serve(self, accept: Callable[[socket.socket, str, bool], None], exhausted: Callable[[OSError], None]) -> None:
        """Call `accept` with every incoming connection, its address and whether it is of this machine, and `exhausted` if this
        process cannot accept more."""
        self._accept, self._exhausted = accept, exhausted
        if self._listener is not None:
            self._service.register(self._listener.fileno(), select.EPOLLIN)
        if self._local is not None and self._local.listener is not None:
            self._service.register(self._local.listener.fileno(), select.EPOLLIN)

    @property
    def machines(self) -> Machines:
        """Which workers may share a machine, by the roster."""
        return () if self._local is None else self._local.machines

    def dial(self, link: Any) -> None:
        near = self._local.dial(link.worker) if self._local is not None and link.may_be_local else None
        link.is_local = near is not None
        if near is not None:
            link.stream = near
            self.watch(near, link)
            return
        family, address = self._address_of(link.worker)
        stream = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._tune(stream)
        dial_briefly(stream)
        try:
            connect(stream, address)  # the first write reports the result
        except PeerLostError as error:
            stream.close()
            raise PeerLostError(
                f"worker {link.worker} cannot be dialled at {address[0]}, port {address[1]}: {error}; set "
                "RINGFENCE_INTERFACE or RINGFENCE_ADVERTISE there to an address that this machine can reach"
            ) from error
        link.stream = stream
        self.watch(stream, link)

    def _address_of(self, worker: int) -> tuple[int, Any]:
        """Resolve a worker's address once, because resolving blocks the progress thread."""
        known = self._resolved.get(worker)
        if known is None:
            try:
                known = self._resolved[worker] = resolve(*self._addresses[worker])
            except PeerLostError as error:
                raise PeerLostError(
                    f"worker {worker} cannot be dialled: {error}; set RINGFENCE_ADVERTISE there to an address, or to a "
                    "name that every worker can resolve"
                ) from error
        return known

    def watch(self, stream: Any, handler: Handler) -> None:
        """Notify `handler` of every change from now on."""
        if stream.family != socket.AF_UNIX:  # only TCP has outages
            self._streams[stream.fileno()] = stream
        self._register(stream.fileno(), handler, _EDGES)

    def watch_readable(self, descriptor: int, handler: Handler) -> None:
        """Notify `handler` while there is something to read."""
        self._register(descriptor, handler, select.EPOLLIN | select.EPOLLRDHUP)

    def _register(self, descriptor: int, handler: Handler, events: int) -> None:
        home = self._service if handler.served_always else self._all
        known = self._homes.get(descriptor)
        if known is not home:
            if known is not None:
                known.unregister(descriptor)
            home.register(descriptor, events)
        self._homes[descriptor] = home
        self._handlers[descriptor] = handler

    def forget(self, stream: Any) -> None:
        descriptor = stream.fileno()
        if self._handlers.pop(descriptor, None) is not None:
            self._homes.pop(descriptor).unregister(descriptor)
            self._streams.pop(descriptor, None)

    def connections(self) -> list[tuple[int, Handler, socket.socket]]:
        """Every connection whose peer is known: its rank, its handler and its socket. Thread-safe."""
        streams = list(self._streams.copy().items())  # `copy` is atomic; a garbage collection may interrupt `list`
        known = [(self._handlers.get(descriptor), stream) for descriptor, stream in streams]
        return [
            (handler.worker, handler, stream)
            for handler, stream in known
            if handler is not None and handler.worker >= 0
        ]

    def sleep(self) -> None:
        """Wait until a descriptor of `_service` has an event, or something is due; `poll` handles it."""
        resumes = self._local_resumes
        self._idle.poll(None if resumes is None else max(0.0, resumes - time.monotonic()))

    def poll(self, seconds: float) -> None:
        """Wait for changes and notify the handlers."""
        if self._local_resumes is not None:
            seconds = self._resume_local(self._local_resumes, seconds)
        service = self._service.fileno()
        for descriptor, events in self._all.poll(seconds if seconds < 86400 else -1):
            if descriptor == service:
                self._poll_service()
            else:
                self._notify(descriptor, events)

    def _poll_service(self) -> None:
        for descriptor, events in self._service.poll(0):
            if self._listener is not None and descriptor == self._listener.fileno():
                self._accept_all(self._listener)
            elif (
                self._local is not None
                and self._local.listener is not None
                and descriptor == self._local.listener.fileno()
            ):
                self._accept_local(self._local)
            else:
                self._notify(descriptor, events)

    def _notify(self, descriptor: int, events: int) -> None:
        handler = self._handlers.get(descriptor)
        if handler is not None:
            handler.notify(bool(events & _READABLE), bool(events & _WRITABLE), bool(events & _ENDED))

    def _accept_all(self, listener: socket.socket) -> None:
        assert self._accept is not None and self._exhausted is not None
        for _ in range(_ACCEPTS):  # a flood must not delay the links; the next poll accepts more
            try:
                stream, address = listener.accept()
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._service.unregister(listener.fileno())  # or epoll would report it again without end
                    self._exhausted(error)
                return  # the queue is empty, or the dialler has closed the connection; neither is fatal
            stream.setblocking(False)
            self._tune(stream)
            self._accept(stream, address[0], False)

    def _accept_local(self, local: LocalNetwork) -> None:
        assert self._accept is not None and local.listener is not None
        pause = False
        for _ in range(_ACCEPTS):
            try:
                stream = local.accept()
            except OSError as error:
                pause |= error.errno in EXHAUSTED  # the dialler waits in the queue
                break
            if stream is None:
                pause = True
            else:
                self._accept(stream, "", True)
        if pause:
            self._service.unregister(local.listener.fileno())
            self._local_resumes = time.monotonic() + _LOCAL_PAUSE

    def _resume_local(self, at: float, seconds: float) -> float:
        """Accept local connections again if that is due. Return how long to wait, of `seconds`."""
        left = at - time.monotonic()
        if left > 0:
            return min(left, seconds)
        assert self._local is not None and self._local.listener is not None
        self._service.register(self._local.listener.fileno(), select.EPOLLIN)
        self._local_resumes = None
        return seconds

    def _tune(self, stream: socket.socket) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tolerate(stream, self._outage)

    def close(self) -> None:
        self._handlers.clear()
        self._streams.clear()
        if self._listener is not None:
            self._listener.close()
        if self._local is not None:
            self._local.close()
        self._idle.close()
        self._all.close()
        self._service.close()
