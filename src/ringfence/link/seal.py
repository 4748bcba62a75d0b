"""Sealing and opening: AES-256-GCM with counters that are never reused and keys that are stepped (spec/link.md).

A `Sealer` and the `Opener` at the other end hold one direction of one connection. Every frame takes the next counter,
on both sides, so a frame that was dropped, repeated, reordered or taken from elsewhere does not open. `OriginKeys` is
for segments that are sealed once and forwarded: the counter travels with them.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ringfence import keys
from ringfence.errors import AuthenticationError, ProtocolError
from ringfence.keys import COUNTER_LIMIT, IV_BYTES, KEY_BYTES, KEY_PHASE_SHIFT, Secret

Buffer = bytes | bytearray | memoryview

ALIVE: Sequence[int] = b"\1"


def wipe(target: memoryview) -> None:
    """Overwrite what a failed open left behind: until its tag is checked it is the attacker's choice of bytes."""
    target[:] = bytes(len(target))


class _Direction:
    """The state both ends of one direction keep in step."""

    __slots__ = ("_cipher", "_iv", "_secret", "counter", "key_phase")

    def __init__(self, secret: Secret) -> None:
        self.counter = 0
        self.key_phase = 0
        self._secret = secret
        self._cipher, self._iv = _cipher(secret)

    def _nonce(self) -> bytes:
        """The next nonce; steps the key first where a key phase ends, so take it before looking at the cipher."""
        counter = self.counter
        if counter >= COUNTER_LIMIT:
            raise ProtocolError("a connection has used up its counters")
        self.counter = counter + 1  # first of all: whoever interrupts what follows must not get it again
        if counter >> KEY_PHASE_SHIFT != self.key_phase:
            self._ratchet(counter >> KEY_PHASE_SHIFT)
        return (self._iv ^ counter).to_bytes(IV_BYTES, "big")

    def _ratchet(self, key_phase: int) -> None:
        secret = keys.expand(self._secret, keys.RATCHET)
        cipher, iv = _cipher(secret)
        self._secret, self._cipher, self._iv, self.key_phase = secret, cipher, iv, key_phase

    def upcoming_key_phase(self) -> int:
        """The key phase of the next frame, which its header announces."""
        return self.counter >> KEY_PHASE_SHIFT

    def forget(self) -> None:
        """The connection is over. Emptied in place: whoever still holds this object holds no key, and is refused."""
        self.counter = COUNTER_LIMIT
        for name in ("_secret", "_cipher", "_iv"):
            if hasattr(self, name):
                delattr(self, name)


class Sealer(_Direction):
    """Seals the frames of one direction, in wire order.

    `alive` is one byte that reads 0 in a forked child: a copy of this object there must never seal, because it would
    use the parent's counters a second time.
    """

    __slots__ = ("_alive",)

    def __init__(self, secret: Secret, alive: Sequence[int] = ALIVE) -> None:
        super().__init__(secret)
        self._alive = alive

    def seal_into(self, header: Buffer, plaintext: Buffer, target: memoryview) -> None:
        """Write ciphertext and tag of `plaintext` to `target`, which is 16 bytes longer."""
        if not self._alive[0]:
            raise ProtocolError("this is a forked child: it has no part in the parent's links")
        nonce = self._nonce()
        self._cipher.encrypt_into(nonce, plaintext, header, target)

    def tag(self, authenticated: Buffer) -> bytes:
        """A tag over bytes that travel as they are."""
        if not self._alive[0]:
            raise ProtocolError("this is a forked child: it has no part in the parent's links")
        nonce = self._nonce()
        return self._cipher.encrypt(nonce, b"", bytes(authenticated))


class Opener(_Direction):
    """Opens the frames of one direction, in wire order."""

    __slots__ = ()

    def open_into(self, header: Buffer, sealed: Buffer, target: memoryview) -> None:
        """Write the plaintext to `target`, or wipe it and raise."""
        nonce = self._nonce()
        try:
            self._cipher.decrypt_into(nonce, sealed, header, target)
        except InvalidTag:
            wipe(target)
            raise AuthenticationError("a frame does not authenticate") from None

    def check(self, authenticated: Buffer, tag: Buffer) -> None:
        """Check a tag over bytes that travel as they are."""
        nonce = self._nonce()
        try:
            self._cipher.decrypt(nonce, bytes(tag), bytes(authenticated))
        except InvalidTag:
            raise AuthenticationError("a frame does not authenticate") from None


class OriginKeys:
    """The keys of one group instance under which each rank seals what the others forward."""

    __slots__ = ("_alive", "_ciphers", "_instance", "_rank", "counter")

    def __init__(self, instance: Secret, rank: int, alive: Sequence[int] = ALIVE) -> None:
        self.counter = 0
        self._instance: Secret | None = instance
        self._rank = rank
        self._alive = alive
        self._ciphers: dict[tuple[int, int], tuple[AESGCM, int]] = {}

    def seal_into(self, counter: int, authenticated: Buffer, plaintext: Buffer, target: memoryview) -> None:
        """Seal under this rank's key. `counter` is `take()`'s and stands in the authenticated header."""
        if not self._alive[0]:
            raise ProtocolError("this is a forked child: it has no part in the parent's links")
        cipher, iv = self._cipher(self._rank, counter)
        cipher.encrypt_into((iv ^ counter).to_bytes(IV_BYTES, "big"), plaintext, authenticated, target)

    def take(self) -> int:
        """A counter that no other segment of this rank has."""
        counter = self.counter
        if counter >= COUNTER_LIMIT:
            raise ProtocolError("a group has used up its counters")
        self.counter = counter + 1
        return counter

    def open_into(self, origin: int, counter: int, authenticated: Buffer, sealed: Buffer, target: memoryview) -> None:
        """Open what `origin` sealed, or wipe the target and raise."""
        cipher, iv = self._cipher(origin, counter)
        try:
            cipher.decrypt_into((iv ^ counter).to_bytes(IV_BYTES, "big"), sealed, authenticated, target)
        except InvalidTag:
            wipe(target)
            raise AuthenticationError("a forwarded segment does not authenticate") from None

    def _cipher(self, origin: int, counter: int) -> tuple[AESGCM, int]:
        place = (origin, counter >> KEY_PHASE_SHIFT)
        found = self._ciphers.get(place)
        if found is None:
            if self._instance is None:
                raise ProtocolError("the keys of this group are forgotten")
            info = keys.ORIGIN + origin.to_bytes(4, "big") + place[1].to_bytes(8, "big")
            found = self._ciphers[place] = _cipher(keys.expand(self._instance, info))
            self._ciphers.pop((origin, place[1] - 2), None)
        return found

    def forget(self) -> None:
        """The group is over. Emptied in place, as a direction is."""
        self._instance = None
        self._ciphers.clear()


def instance_identifier(instance: Secret, group: bytes) -> bytes:
    """What the frames of one group instance carry; the same ranks and name another time give another one."""
    return keys.digest(keys.GROUP_INSTANCE, instance.reveal(), group)[:16]


def _cipher(secret: Secret) -> tuple[AESGCM, int]:
    material = keys.expand(secret, keys.SEGMENT_KEY, KEY_BYTES + IV_BYTES).reveal()
    return AESGCM(material[:KEY_BYTES]), int.from_bytes(material[KEY_BYTES:], "big")
