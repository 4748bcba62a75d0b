"""An unauthenticated peer that exchanges admission messages over real TLS, in memory or over a socket."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace

from ringfence import keys
from ringfence.admission.binding import TlsValues
from ringfence.admission.entry import Entry
from ringfence.admission.messages import HANDSHAKE, Message, MessageSplitter, encode
from ringfence.errors import ProtocolError
from ringfence.transport.tls import Credentials, Tls
from tests.limits import HANG


def channel_of(tls: Tls) -> TlsValues:
    return TlsValues(tls.own_key_digest, tls.peer_key_digest, tls.exporter())


def tls_pair(client: Credentials, server: Credentials) -> tuple[Tls, Tls]:
    """Return both ends of an established connection in memory."""
    one, two = Tls(client, server=False), Tls(server, server=True)
    while not (one.established and two.established):
        two.receive(one.outgoing())
        one.receive(two.outgoing())
    return one, two


class UnauthenticatedPeer:
    """One end of a real connection, which can send any message at any time."""

    def __init__(self, connection: socket.socket, credentials: Credentials, *, server: bool) -> None:
        self.tls = Tls(credentials, server=server)
        self._socket = connection
        self._frames = MessageSplitter(HANDSHAKE, keys.ADMISSION_BYTES)
        connection.settimeout(HANG)
        while not self.tls.established:
            assert self._exchange(), "the worker closed the connection during the TLS handshake"
        self._flush()

    @classmethod
    def dial(cls, address: tuple[str, int], credentials: Credentials | None = None) -> UnauthenticatedPeer:
        """Connect to a worker's admission listener."""
        return cls(socket.create_connection(address), credentials or Credentials(), server=False)

    @classmethod
    def accept(cls, listener: socket.socket, credentials: Credentials) -> UnauthenticatedPeer:
        """Accept a worker that takes this peer for its parent."""
        listener.settimeout(HANG)
        return cls(listener.accept()[0], credentials, server=True)

    def send(self, *messages: Message) -> None:
        self.send_bytes(b"".join(encode(message) for message in messages))

    def send_bytes(self, data: bytes) -> None:
        """Send data. A closed connection is no error: its last messages can still be received."""
        self.tls.send(data)
        self._flush()

    def receive(self) -> Message | None:
        """Return the worker's next message, or None if it has closed the connection."""
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
    """Return the entry with this TLS key."""
    return replace(entry, tls_key_digest=credentials.key_digest)
