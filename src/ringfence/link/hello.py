"""The handshake of a link between two workers of the roster, in one round trip (spec/link.md).

    dialler  -> hello    sender, receiver, group, lane, channel, a nonce, a MAC                  112 bytes
    acceptor -> reply    a nonce, its ML-KEM key of this session, a confirmation              1,248 bytes
    dialler  -> confirm  a ciphertext, a confirmation; frames follow in the same flight       1,120 bytes

The MAC rejects unauthenticated peers at the cost of one fixed-size read. It can be replayed, so the acceptor treats a
connection as established only after `confirm`, which requires the dialler's private key. Confirmations need X25519 only and
cover all that was said of ML-KEM, so either side computes with it only after the other has proved its identity.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from ringfence import keys
from ringfence.errors import AuthenticationError
from ringfence.keys import DIGEST_BYTES, NONCE_BYTES, Secret

_MAGIC: Final = b"RFL1"
_HELLO: Final = Struct(f">4sBBBBII{DIGEST_BYTES}s{NONCE_BYTES}s")

HELLO_BYTES: Final = _HELLO.size + DIGEST_BYTES
REPLY_BYTES: Final = NONCE_BYTES + keys.KEM_PUBLIC_BYTES + DIGEST_BYTES
CONFIRM_BYTES: Final = keys.KEM_CIPHERTEXT_BYTES + DIGEST_BYTES

assert HELLO_BYTES == 112


class Lane(IntEnum):
    COLLECTIVE = 0
    POINT_TO_POINT = 1
    PEER_VERIFICATION = 2  # only the two proofs follow
    SAME_MACHINE = 3  # on a Unix socket only; nothing follows
    COLLECTIVE_LOCAL = 4  # on a Unix socket only: frames that are not sealed, and shared memory
    POINT_TO_POINT_LOCAL = 5


LOCAL: Final = {Lane.COLLECTIVE: Lane.COLLECTIVE_LOCAL, Lane.POINT_TO_POINT: Lane.POINT_TO_POINT_LOCAL}


class LinkHello(NamedTuple):
    sender: int
    receiver: int
    lane: int
    group: bytes
    nonce: bytes
    channel: int = 0  # above 0 on collective links only


class Reply(NamedTuple):
    """The acceptor's answer to a hello."""

    nonce: bytes
    kem_key: bytes  # ML-KEM-768, of the acceptor in this session
    confirmation: bytes

    @classmethod
    def read(cls, data: bytes) -> Reply:
        start, end = NONCE_BYTES, NONCE_BYTES + keys.KEM_PUBLIC_BYTES
        return cls(data[:start], data[start:end], data[end:])


class Confirm(NamedTuple):
    """The dialler's answer to a reply."""

    ciphertext: bytes
    confirmation: bytes

    @classmethod
    def read(cls, data: bytes) -> Confirm:
        return cls(data[: keys.KEM_CIPHERTEXT_BYTES], data[keys.KEM_CIPHERTEXT_BYTES :])


class LinkSecrets(NamedTuple):
    """The secrets of a connection that has been confirmed."""

    forth: Secret  # dialler to acceptor
    back: Secret  #  acceptor to dialler
    connection: bytes  # its name in a record, which is not secret


class LinkHandshake:
    """The computations of a connection, the same at both endpoints, once both nonces are known (spec/link.md, section 2)."""

    def __init__(self, session_key: Secret, x25519: bytes, hello: LinkHello, acceptor_nonce: bytes) -> None:
        self._session_key = session_key
        self._x25519 = x25519
        self._nonces = hello.nonce + acceptor_nonce
        ranks = hello.sender.to_bytes(4, "big") + hello.receiver.to_bytes(4, "big")
        self._place = bytes([hello.lane, hello.channel]) + ranks + hello.group
        ikm = Secret(x25519 + session_key.reveal())
        self._secret = keys.derive(ikm, salt=self._nonces, info=keys.LINK_HANDSHAKE + self._place)

    def acceptor_confirms(self, kem_key: bytes) -> bytes:
        """Return the acceptor's proof that it holds its X25519 key and the session key, which also covers its ML-KEM key."""
        label = keys.LINK_CONFIRM_ACCEPTOR
        return keys.mac(keys.expand(self._secret, label), label, kem_key)

    def dialler_confirms(self, kem_key: bytes, ciphertext: bytes) -> bytes:
        """Return the dialler's proof, which covers both messages of ML-KEM."""
        label = keys.LINK_CONFIRM_DIALLER
        return keys.mac(keys.expand(self._secret, label), label, kem_key, ciphertext)

    def secrets(self, kem_secret: bytes, kem_key: bytes, ciphertext: bytes) -> LinkSecrets:
        """Return the secrets of the connection. Both nonces make them fresh, X25519 binds them to the two workers, and the
        session key to this roster; who breaks X25519 later still lacks the secret of ML-KEM."""
        transcript = keys.digest(keys.LINK_KEM, kem_key, ciphertext)
        ikm = Secret(self._x25519 + kem_secret + self._session_key.reveal())
        secret = keys.derive(ikm, salt=self._nonces, info=keys.LINK_SECRET + self._place + transcript)
        forth, back = keys.expand(secret, keys.LINK_FORTH), keys.expand(secret, keys.LINK_BACK)
        return LinkSecrets(forth, back, connection=keys.digest(keys.RECORD_CONNECTION, self._place, self._nonces))


def write_hello(session_key: Secret, hello: LinkHello, version: int = keys.VERSION) -> bytes:
    body = _HELLO.pack(
        _MAGIC,
        version,
        keys.SUITE_AES_256_GCM,
        hello.lane,
        hello.channel,
        hello.sender,
        hello.receiver,
        hello.group,
        hello.nonce,
    )
    return body + _hello_mac(session_key, body)


def read_hello(session_key: Secret, data: bytes, version: int = keys.VERSION) -> LinkHello:
    """Parse a hello after verifying its MAC. Raises AuthenticationError if it does not verify or has another version."""
    body, received = data[: _HELLO.size], data[_HELLO.size :]
    if not keys.same(received, _hello_mac(session_key, body)):
        raise AuthenticationError("a hello from an unauthenticated peer does not authenticate")
    magic, said, suite, lane, channel, sender, receiver, group, nonce = _HELLO.unpack(body)
    if channel >= (keys.CHANNEL_LIMIT if lane == Lane.COLLECTIVE else 1):
        raise AuthenticationError("a hello has a channel that no link has")
    hello = LinkHello(sender, receiver, lane, group, nonce, channel)
    known = (magic, said, suite) == (_MAGIC, version, keys.SUITE_AES_256_GCM) and lane in tuple(Lane)
    if not known or write_hello(session_key, hello, version) != data:
        raise AuthenticationError("a hello has another version")
    return hello


def _hello_mac(session_key: Secret, body: bytes) -> bytes:
    return keys.mac(keys.expand(session_key, keys.LINK_HELLO), keys.LINK_HELLO, body)
