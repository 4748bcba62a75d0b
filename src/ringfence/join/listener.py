"""Where others reach this worker: a port of the interface that its settings choose."""

from __future__ import annotations

import socket
from typing import Final

from ringfence.errors import ConfigurationError
from ringfence.settings import Settings
from ringfence.transport.fork import register_fork_cleanup

_BACKLOG: Final = 128


class _Listener(socket.socket):
    """Closed in every forked child, from the start: a child that kept it would answer for its parent, or seem to."""

    def forget(self) -> None:
        self.close()


def listen(settings: Settings) -> socket.socket:
    """A non-blocking listener on the chosen interface, in the chosen range of ports."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    trouble: str | None = None
    for port in settings.ports or (0,):
        listener = _Listener(family, socket.SOCK_STREAM)
        register_fork_cleanup(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restarted worker takes its port again
        try:
            listener.bind((settings.host, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            trouble = error.strerror
            continue
        listener.setblocking(False)
        return listener
    where, need = "", ""
    if settings.ports:
        where = f"ports {settings.ports[0]}-{settings.ports[-1]} of "
        need = " (a worker needs two ports: one for links, one for admission)"
    raise ConfigurationError(
        f"cannot listen on {where}{settings.host}: {trouble}; set RINGFENCE_INTERFACE or RINGFENCE_PORTS{need}"
    )
