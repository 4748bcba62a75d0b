"""Where other workers reach this one: a listener on the interface and ports of the settings."""

from __future__ import annotations

import socket
from typing import Final

from ringfence import keys
from ringfence.admission.policy import Policy
from ringfence.admission.tree import AgreedSession
from ringfence.config.settings import Settings
from ringfence.errors import ConfigurationError
from ringfence.machines import spread
from ringfence.transport.fork import register_fork_cleanup
from ringfence.transport.tcp import EXHAUSTED, refusal
from ringfence.transport.unix import LocalNetwork

_BACKLOG: Final = 128


class _Listener(socket.socket):
    """A listening socket that is closed in every forked child: a child that kept it would answer in its parent's place."""

    def forget(self) -> None:
        self.close()


def listen(settings: Settings) -> socket.socket:
    """Return a non-blocking listener. Raises ConfigurationError if none of the ports is free."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    problem: str | None = None
    for port in settings.ports or (0,):
        listener = _Listener(family, socket.SOCK_STREAM)
        register_fork_cleanup(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restarted worker takes its port again
        try:
            listener.bind((settings.host, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            problem = error.strerror
            continue
        listener.setblocking(False)
        return listener
    ports, need = "", ""
    if settings.ports:
        ports = f"ports {settings.ports[0]}-{settings.ports[-1]} of "
        need = " (a worker needs two ports: one for links, one for admission)"
    raise ConfigurationError(
        f"cannot listen on {ports}{settings.host}: {problem}; set RINGFENCE_INTERFACE or RINGFENCE_PORTS{need}"
    )


def listen_locally(session: AgreedSession, rank: int, policy: Policy) -> LocalNetwork:
    """Return what dials workers of this machine, and listens for them; for nobody, if the policy seals there too."""
    machines = spread(entry.host for entry in session.roster.entries) if policy.same_host == "shared" else ()
    session_key = keys.session_key(session.session_secret, session.roster.digest)
    network = LocalNetwork(lambda worker: keys.local_socket(session_key, worker), rank, machines)
    session_key.forget()
    return network


class JoinListener:
    """The listener for this worker's children."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self._listener = listen(settings)
        self._rank = rank
        host, port = self._listener.getsockname()[:2]
        self.address = settings.admission_address((host, port))  # where children dial it

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> tuple[socket.socket, str] | None:
        """Return a connection and its host, or None if it has disconnected already.

        Raises ConfigurationError if this machine has no descriptors or memory left: the listener would stay readable.
        """
        try:
            connection, (host, *_) = self._listener.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise ConfigurationError(f"rank {self._rank}, joining: {refusal(error)}") from error
            return None
        return connection, host

    def close(self) -> None:
        self._listener.close()
