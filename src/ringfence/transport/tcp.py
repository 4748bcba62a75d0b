"""TCP: listening, dialling, and an epoll that says which streams changed. It moves opaque bytes and knows no protocol."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable, Sequence
from typing import Any

from ringfence import keys
from ringfence.errors import PeerLostError
from ringfence.transport.outage import Handler, dial_briefly, tolerate

_ACCEPTS = 32
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # asking again would be answered the same
_EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_READABLE = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_ENDED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_WRITABLE = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR


def resolve(host: str, port: int) -> tuple[int, Any]:
    """The first address of a name, of whatever family, as `socket` and `connect` take it. The resolver may be slow."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PeerLostError(f"{host} does not resolve on this machine ({reason})") from error
    return family, address


def refusal(error: OSError) -> str:
    """What this machine refuses, and what to do about it where that is known."""
    advice = ". Raise the limit of open files (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    return f"{error.strerror or error}{advice}"


def connect(stream: socket.socket, address: Any) -> None:
    """Begin to. PeerLostError for what fails at once, as where there is no route: the socket keeps no error of that."""
    error = stream.connect_ex(address)
    if error not in (0, errno.EINPROGRESS):
        raise PeerLostError(os.strerror(error)) from OSError(error, os.strerror(error))


class TcpNetwork:
    """Connections to the rostered addresses, and from whoever dials the listener.

    Two epolls, one inside the other. `_service` holds what is served at any time: the listener, unauthenticated peers, control
    edges, point-to-point links. The outer one holds that and the links of collectives, which matter only while a
    collective is under way; an idle worker is not woken by a peer that is early.
    """

    def __init__(
        self, listener: socket.socket, addresses: Sequence[tuple[str, int]], outage: float = keys.OUTAGE_SECONDS
    ) -> None:
        """`outage`: for how many seconds a connection may go without an answer."""
        self._outage = outage
        self._service = select.epoll()
        self._all = select.epoll()
        self._all.register(self._service.fileno(), select.EPOLLIN)
        self._idle = select.epoll()  # waits for `service` without taking its events
        self._idle.register(self._service.fileno(), select.EPOLLIN)
        self._listener = listener
        self._addresses = addresses
        self._resolved: dict[int, tuple[int, Any]] = {}  # worker: its address, as this machine knows it
        self._handlers: dict[int, Handler] = {}
        self._streams: dict[int, socket.socket] = {}
        self._homes: dict[int, select.epoll] = {}
        self._accept: Callable[[socket.socket, str], None] | None = None
        self._exhausted: Callable[[OSError], None] | None = None

    def serve(self, accept: Callable[[socket.socket, str], None], exhausted: Callable[[OSError], None]) -> None:
        """Hand every connection that is dialled to `accept`; tell `exhausted` if this process can take no more."""
        self._accept, self._exhausted = accept, exhausted
        self._service.register(self._listener.fileno(), select.EPOLLIN)

    def dial(self, link: Any) -> None:
        family, address = self._address_of(link.worker)
        stream = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._tune(stream)
        dial_briefly(stream)
        try:
            connect(stream, address)  # what becomes of it shows at the first write
        except PeerLostError as error:
            stream.close()
            raise PeerLostError(
                f"worker {link.worker} cannot be dialled at {address[0]}, port {address[1]}: {error}; set "
                "RINGFENCE_INTERFACE or RINGFENCE_ADVERTISE there to an address that this machine has a way to"
            ) from error
        link.stream = stream
        self.watch(stream, link)

    def _address_of(self, worker: int) -> tuple[int, Any]:
        """The resolver is asked once, because it holds up whoever drives."""
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
        """Tell `handler` of every change, from now on."""
        self._streams[stream.fileno()] = stream
        self._register(stream.fileno(), handler, _EDGES)

    def watch_readable(self, descriptor: int, handler: Handler) -> None:
        """Tell `handler` for as long as there is something to read."""
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

    def connections(self) -> list[tuple[Handler, socket.socket]]:
        """Every connection whose peer is known, with its handler. Any thread may ask."""
        streams = list(self._streams.items())
        known = [(self._handlers.get(descriptor), stream) for descriptor, stream in streams]
        return [(handler, stream) for handler, stream in known if handler is not None and handler.worker >= 0]

    def sleep(self) -> None:
        """Wait until there is something that must be served at any time; it is left for `poll`."""
        self._idle.poll()

    def poll(self, seconds: float) -> None:
        """Wait for changes and tell the handlers."""
        service = self._service.fileno()
        for descriptor, events in self._all.poll(seconds if seconds < 86400 else -1):
            if descriptor == service:
                self._poll_service()
            else:
                self._tell(descriptor, events)

    def _poll_service(self) -> None:
        for descriptor, events in self._service.poll(0):
            if descriptor == self._listener.fileno():
                self._accept_all()
            else:
                self._tell(descriptor, events)

    def _tell(self, descriptor: int, events: int) -> None:
        handler = self._handlers.get(descriptor)
        if handler is not None:
            handler.notify(bool(events & _READABLE), bool(events & _WRITABLE), bool(events & _ENDED))

    def _accept_all(self) -> None:
        assert self._accept is not None and self._exhausted is not None
        for _ in range(_ACCEPTS):  # a flood must not keep the links waiting; the listener is asked again
            try:
                stream, address = self._listener.accept()
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._service.unregister(self._listener.fileno())  # or it would be reported again, without end
                    self._exhausted(error)
                return  # otherwise nobody is left, or the dialler is gone already: neither is the run's end
            stream.setblocking(False)
            self._tune(stream)
            self._accept(stream, address[0])

    def _tune(self, stream: socket.socket) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tolerate(stream, self._outage)

    def close(self) -> None:
        self._handlers.clear()
        self._streams.clear()
        self._listener.close()
        self._idle.close()
        self._all.close()
        self._service.close()
