"""An unauthenticated peer with a TLS stack: speaks admission's frames over real TLS, in memory or over a socket."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace

from ringfence import keys
from ringfence.admission.binding import Channel
from ringfence.admission.entry import Entry
from ringfence.admission.messages import HANDSHAKE, Frames, Message, encode
from ringfence.errors import ProtocolError
from ringfence.transport.tls import Credentials, Tls


def channel_of(tls: Tls) -> Channel:
    return Channel(tls.own_key_digest, tls.peer_key_digest, tls.exporter())


def tls_pair(client: Credentials, server: Credentials) -> tuple[Tls, Tls]:
    """Two ends of one connection, shaken hands, joined in memory."""
    one, two = Tls(client, server=False), Tls(server, server=True)
    while not (one.established and two.established):
        two.receive(one.outgoing())
        one.receive(two.outgoing())
    return one, two


class UnauthenticatedPeer:
    """One end of a real connection, that says whatever it likes."""

    def __init__(self, connection: socket.socket, credentials: Credentials, *, server: bool) -> None:
        self.tls = Tls(credentials, server=server)
        self._socket = connection
        self._frames = Frames(HANDSHAKE, keys.ADMISSION_BYTES)
        connection.settimeout(10)
        while not self.tls.established:
            assert self._exchange(), "the worker hung up during the TLS handshake"
        self._flush()

    @classmethod
    def dial(cls, address: tuple[str, int], credentials: Credentials | None = None) -> UnauthenticatedPeer:
        """Meet a worker at its admission listener."""
        return cls(socket.create_connection(address), credentials or Credentials(), server=False)

    @classmethod
    def wait(cls, listener: socket.socket, credentials: Credentials) -> UnauthenticatedPeer:
        """Let a worker come, that takes this for its parent."""
        listener.settimeout(10)
        return cls(listener.accept()[0], credentials, server=True)

    def say(self, *messages: Message) -> None:
        self.say_bytes(b"".join(encode(message) for message in messages))

    def say_bytes(self, data: bytes) -> None:
        """Speaking to a worker that has hung up is no error: what it said last can still be heard."""
        self.tls.send(data)
        self._flush()

    def hear(self) -> Message | None:
        """The worker's next message; None if it has hung up."""
        while (message := self._frames.next()) is None:
            if not self._exchange():
                return None
        return message

    def close(self) -> None:
        self._socket.close()

    def _flush(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(self.tls.outgoing())

    def _exchange(self) -> bool:
        self._flush()
        try:
            data = self._socket.recv(65536)
            self._frames.feed(self.tls.receive(data))
        except (ConnectionError, ProtocolError):
            return False
        return bool(data)


def with_key(entry: Entry, credentials: Credentials) -> Entry:
    """The entry of someone who shows this TLS key."""
    return replace(entry, tls_key_digest=credentials.key_digest)
