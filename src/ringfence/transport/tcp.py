"""TCP: listening, dialling, and an epoll that says which streams changed. It moves opaque bytes and knows no protocol."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

_EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_READABLE = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_WRITABLE = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR


class Handler(Protocol):
    def notify(self, readable: bool, writable: bool) -> None: ...


def tune(stream: socket.socket) -> None:
    """What every data connection wants: no delay, and a kernel that notices when the other host is gone."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


class TcpNetwork:
    """Connections to the rostered addresses, and from whoever dials the listener."""

    def __init__(self, listener: socket.socket, addresses: Sequence[tuple[str, int]]) -> None:
        self.epoll = select.epoll()
        self._listener = listener
        self._addresses = addresses
        self._handlers: dict[int, Any] = {}
        self._accept: Callable[[socket.socket, str], None] | None = None

    def serve(self, accept: Callable[[socket.socket, str], None]) -> None:
        """Hand every connection that is dialled to `accept`."""
        self._accept = accept
        self.epoll.register(self._listener.fileno(), select.EPOLLIN)

    def dial(self, link: Any) -> None:
        host, port = self._addresses[link.worker]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        stream = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        tune(stream)
        link.stream = stream
        stream.connect_ex((host, port))  # what became of it shows at the first write
        self.watch(stream, link)

    def watch(self, stream: Any, handler: Handler) -> None:
        descriptor = stream.fileno()
        if descriptor not in self._handlers:
            self.epoll.register(descriptor, _EDGES)
        self._handlers[descriptor] = handler

    def watch_readable(self, descriptor: int, handler: Handler) -> None:
        """Level-triggered, for reading only."""
        self.epoll.register(descriptor, select.EPOLLIN | select.EPOLLRDHUP)
        self._handlers[descriptor] = handler

    def forget(self, stream: Any) -> None:
        self.forget_descriptor(stream.fileno())

    def forget_descriptor(self, descriptor: int) -> None:
        if self._handlers.pop(descriptor, None) is not None:
            self.epoll.unregister(descriptor)

    def poll(self, seconds: float) -> None:
        """Wait for changes and tell the handlers."""
        handlers = self._handlers
        for descriptor, events in self.epoll.poll(seconds if seconds < 86400 else -1):
            handler = handlers.get(descriptor)
            if handler is not None:
                handler.notify(bool(events & _READABLE), bool(events & _WRITABLE))
            elif descriptor == self._listener.fileno():
                self._accept_all()

    def _accept_all(self) -> None:
        assert self._accept is not None
        while True:
            try:
                stream, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                return  # out of descriptors, or the dialler is gone already: neither is the run's end
            stream.setblocking(False)
            tune(stream)
            self._accept(stream, address[0])

    def close(self) -> None:
        self._handlers.clear()
        self._listener.close()
        self.epoll.close()
