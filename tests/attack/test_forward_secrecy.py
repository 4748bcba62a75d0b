"""An eavesdropper records a join and obtains the secret file afterwards."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Final, NamedTuple, Self

import pytest

from ringfence import keys
from ringfence.admission.entry import format_address
from tests.integration.join_cluster import SECRET, MemoryStore, World
from tests.limits import HANG

KEY_SHARE: Final = 51
PRE_SHARED_KEY: Final = 41
EPHEMERAL: Final = {0x001D: 32, 0x11EC: 32 + 1088}  # X25519, X25519MLKEM768: what a server sends of each
CLIENT_HELLO, SERVER_HELLO = 1, 2


class Tap(MemoryStore):
    """A store that directs every worker to the eavesdropper, which copies both directions of each connection."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[bytearray, bytearray]] = []  # from the dialler, and from the acceptor
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def set(self, key: str, value: str, /) -> None:
        host, _, port = value.rpartition(":")
        listener = socket.create_server(("127.0.0.1", 0))
        self._open.append(listener)
        self._spawn(self._listen, listener, (host, int(port)))
        super().set(key, format_address(listener.getsockname()[:2]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(HANG)
            assert not thread.is_alive()
        for end in self._open:
            end.close()

    def _spawn(self, function: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _listen(self, listener: socket.socket, worker: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                near = listener.accept()[0]
                far = socket.create_connection(worker)
                self._open += [near, far]
                forth, back = bytearray(), bytearray()
                self.taken.append((forth, back))
                self._spawn(self._copy, near, far, forth)
                self._spawn(self._copy, far, near, back)

    def _copy(self, source: socket.socket, sink: socket.socket, taken: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                taken += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


class Greeting(NamedTuple):
    """The first message of one side of a TLS connection, which is in the clear."""

    random: bytes
    extensions: dict[int, bytes]


def greeting(taken: bytes, kind: int) -> Greeting:
    """Return all that an eavesdropper can read of a handshake (RFC 8446, sections 4.1.2 and 4.1.3)."""
    assert (taken[0], taken[5]) == (22, kind)
    random, at = taken[11:43], 43
    at += 1 + taken[at]  # the session id
    at += 2 + int.from_bytes(taken[at : at + 2]) if kind == CLIENT_HELLO else 2  # the cipher suites; the one chosen
    at += 1 + taken[at] if kind == CLIENT_HELLO else 1  # no compression
    end = at + 2 + int.from_bytes(taken[at : at + 2])
    at, found = at + 2, {}
    while at < end:
        size = int.from_bytes(taken[at + 2 : at + 4])
        found[int.from_bytes(taken[at : at + 2])] = bytes(taken[at + 4 : at + 4 + size])
        at += 4 + size
    return Greeting(bytes(random), found)


def recorded_join() -> tuple[bytes, Greeting, Greeting, list[bytes]]:
    """Return all bytes on the wire, both hellos, and what must not be found in the bytes."""
    with Tap() as tap, World(2, store=tap) as world:
        world.start([0, 1])
        members = world.members()
        (taken,) = tap.taken
        hidden = [members[0].session_key.reveal()]
        hidden += [entry.public_key for entry in members[0].roster.entries]
        hidden += [keys.admission_key(SECRET, "none").reveal(), SECRET.reveal()]
        return (
            bytes(taken[0] + taken[1]),
            greeting(bytes(taken[0]), CLIENT_HELLO),
            greeting(bytes(taken[1]), SERVER_HELLO),
            hidden,
        )


@pytest.mark.promise("A secret that leaks later does not open a recorded run.")
def test_a_leaked_secret_does_not_open_a_recorded_join() -> None:
    """The session secret is sent under keys that both sides draw for this connection. Nothing stored takes part, neither a
    key file nor an earlier session, so nothing that outlives the two workers opens the recording.
    """
    joins = [recorded_join() for _ in range(2)]
    halves = []
    for wire, client, server, hidden in joins:
        assert len(wire) > 2000
        assert not [each for each in hidden if each in wire]
        assert PRE_SHARED_KEY not in client.extensions
        assert PRE_SHARED_KEY not in server.extensions
        share = server.extensions[KEY_SHARE]
        assert EPHEMERAL[int.from_bytes(share[:2])] == len(share) - 4, "the server's half of a key agreement"
        halves += [client.extensions[KEY_SHARE], share]
        halves += [client.random, server.random]
    assert len(set(halves)) == len(halves), "a half was used twice"
