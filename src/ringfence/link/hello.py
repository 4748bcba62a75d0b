"""The handshake of a link between two workers of the roster, in one round trip (spec/link.md).

    dialler  -> hello    sender, receiver, group, lane, a nonce, a MAC under a session key      112 bytes
    acceptor -> reply    a nonce, a confirmation                                                64 bytes
    dialler  -> confirm  a confirmation; frames follow in the same flight                       32 bytes

The MAC rejects unauthenticated peers at the cost of one fixed-size read. It can be replayed, so the acceptor treats a
connection as established only after `confirm`, which requires the dialler's private key.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from ringfence import keys
from ringfence.errors import AuthenticationError
from ringfence.keys import DIGEST_BYTES, NONCE_BYTES, Secret

_MAGIC: Final = b"RFL1"
_HELLO: Final = Struct(f">4sBBBxII{DIGEST_BYTES}s{NONCE_BYTES}s")

HELLO_BYTES: Final = _HELLO.size + DIGEST_BYTES
REPLY_BYTES: Final = NONCE_BYTES + DIGEST_BYTES
CONFIRM_BYTES: Final = DIGEST_BYTES

assert HELLO_BYTES == 112


class Lane(IntEnum):
    COLLECTIVE = 0
    POINT_TO_POINT = 1
    PEER_VERIFICATION = 2  # only the two proofs follow
    SAME_MACHINE = 3  # on a Unix socket only; nothing follows


class Hello(NamedTuple):
    sender: int
    receiver: int
    lane: int
    group: bytes
    nonce: bytes


class LinkSecrets(NamedTuple):
    """The secrets that both endpoints of a connection derive once both nonces are known."""

    forth: Secret  # dialler to acceptor
    back: Secret  #  acceptor to dialler
    acceptor_confirms: bytes
    dialler_confirms: bytes


def write_hello(session_key: Secret, hello: Hello) -> bytes:
    body = _HELLO.pack(
        _MAGIC,
        keys.VERSION,
        keys.SUITE_AES_256_GCM,
        hello.lane,
        hello.sender,
        hello.receiver,
        hello.group,
        hello.nonce,
    )
    return body + _hello_mac(session_key, body)


def read_hello(session_key: Secret, data: bytes) -> Hello:
    """Parse a hello after verifying its MAC. Raises AuthenticationError if it does not verify or has another version."""
    body, received = data[: _HELLO.size], data[_HELLO.size :]
    if not keys.same(received, _hello_mac(session_key, body)):
        raise AuthenticationError("a hello from an unauthenticated peer does not authenticate")
    magic, version, suite, lane, sender, receiver, group, nonce = _HELLO.unpack(body)
    hello = Hello(sender, receiver, lane, group, nonce)
    known = (magic, version, suite) == (_MAGIC, keys.VERSION, keys.SUITE_AES_256_GCM) and lane in tuple(Lane)
    if not known or write_hello(session_key, hello) != data:
        raise AuthenticationError("a hello has another version")
    return hello


def link_secrets(session_key: Secret, x25519: bytes, hello: Hello, acceptor_nonce: bytes) -> LinkSecrets:
    """Derive the secrets of a connection: both nonces make them fresh, X25519 binds them to the two workers, and the session
    key to this roster."""
    place = bytes([hello.lane]) + hello.sender.to_bytes(4, "big") + hello.receiver.to_bytes(4, "big") + hello.group
    secret = keys.derive(
        Secret(x25519 + session_key.reveal()), salt=hello.nonce + acceptor_nonce, info=keys.LINK_SECRET + place
    )
    return LinkSecrets(
        forth=keys.expand(secret, keys.LINK_FORTH),
        back=keys.expand(secret, keys.LINK_BACK),
        acceptor_confirms=keys.expand(secret, keys.LINK_CONFIRM_ACCEPTOR).reveal(),
        dialler_confirms=keys.expand(secret, keys.LINK_CONFIRM_DIALLER).reveal(),
    )


def _hello_mac(session_key: Secret, body: bytes) -> bytes:
    return keys.mac(keys.expand(session_key, keys.LINK_HELLO), keys.LINK_HELLO, body)
