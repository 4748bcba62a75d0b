"""Sealing and opening of frames: AES-256-GCM with unique counters and a key ratchet (spec/link.md).

A `Sealer` and the peer's `Opener` hold the keys of one direction of one connection. Both take the next counter for every
frame, so a frame that was dropped, replayed, reordered or taken from another link does not open. `OriginKeys` is for
segments that are sealed once and forwarded; their header carries the counter.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ringfence import keys
from ringfence.errors import AuthenticationError, ProtocolError
from ringfence.keys import COUNTER_LIMIT, IV_BYTES, KEY_BYTES, KEY_PHASE_SHIFT, TAG_BYTES, Secret
from ringfence.link.frames import HEADER_BYTES
from ringfence.link.tag_chain import TagChain

Buffer = bytes | bytearray | memoryview

ALIVE: Sequence[int] = b"\1"


def wipe(target: memoryview) -> None:
    """Zero the output of a failed open: without a valid tag it is unauthenticated data."""
    target[:] = bytes(len(target))


class _Direction:
    """The state that sealer and opener of one direction keep in sync.

    `covers`: whether the tag of a forwarded frame covers its ciphertext too (the policy's `forwarded`).
    """

    __slots__ = ("_cipher", "_covers", "_iv", "_secret", "chain", "counter", "key_phase")

    def __init__(self, secret: Secret, covers: bool = False) -> None:
        self.counter = 0
        self.key_phase = 0
        self.chain: TagChain | None = None  # if the session is recorded
        self._covers = covers
        self._secret = secret
        self._cipher, self._iv = _cipher(secret)

    def _nonce(self) -> bytes:
        """Return the next nonce. Ratchets the key if a key phase ends, so call this before using `_cipher`."""
        counter = self.counter
        if counter >= COUNTER_LIMIT:
            raise ProtocolError("a connection has used all its counters")
        self.counter = counter + 1  # first: an interrupt during what follows must not lead to its reuse
        if counter >> KEY_PHASE_SHIFT != self.key_phase:
            self._ratchet(counter >> KEY_PHASE_SHIFT)
        return (self._iv ^ counter).to_bytes(IV_BYTES, "big")

    def _ratchet(self, key_phase: int) -> None:
        secret = keys.expand(self._secret, keys.RATCHET)
        cipher, iv = _cipher(secret)
        self._secret, self._cipher, self._iv, self.key_phase = secret, cipher, iv, key_phase

    def _authenticated(self, frame: Buffer) -> Buffer:
        """Return what the link's tag covers of a forwarded frame, which ends with its origin's tag.

        The whole frame is not copied. Without the cover: the header and the origin's tag.
        """
        return frame if self._covers else bytes(frame[:HEADER_BYTES]) + bytes(frame[-TAG_BYTES:])

    def upcoming_key_phase(self) -> int:
        """The key phase of the next frame, which its header carries."""
        return self.counter >> KEY_PHASE_SHIFT

    def forget(self) -> None:
        """Delete the keys when the connection ends. Later calls raise, also through other references to this object."""
        self.counter = COUNTER_LIMIT
        if self.chain is not None:
            self.chain.end()
        for name in ("_secret", "_cipher", "_iv"):
            if hasattr(self, name):
                delattr(self, name)


class Sealer(_Direction):
    """Seals the frames of one direction, in wire order.

    `alive` is one byte that reads 0 in a forked child. A copy of this object in a child must never seal, because it would
    reuse the parent's counters.
    """

    __slots__ = ("_alive",)

    def __init__(self, secret: Secret, alive: Sequence[int] = ALIVE, covers: bool = False) -> None:
        super().__init__(secret, covers)
        self._alive = alive

    def seal_into(self, header: Buffer, plaintext: Buffer, target: memoryview) -> None:
        """Write the ciphertext and tag of `plaintext` to `target`, which is 16 bytes longer."""
        if not self._alive[0]:
            raise ProtocolError("a forked child cannot use the links of its parent")
        nonce = self._nonce()
        self._cipher.encrypt_into(nonce, plaintext, header, target)
        if self.chain is not None:
            self.chain.add(header[0], target[-TAG_BYTES:])

    def tag(self, frame: Buffer) -> bytes:
        """Return the link's tag of a forwarded frame: header, ciphertext and the origin's tag."""
        if not self._alive[0]:
            raise ProtocolError("a forked child cannot use the links of its parent")
        nonce = self._nonce()
        tag = self._cipher.encrypt(nonce, b"", self._authenticated(frame))
        if self.chain is not None:
            self.chain.add(frame[0], tag)
        return tag


class Opener(_Direction):
    """Opens the frames of one direction, in wire order."""

    __slots__ = ()

    def open_into(self, header: Buffer, sealed: Buffer, target: memoryview) -> None:
        """Write the plaintext to `target`. On failure, wipes `target` and raises AuthenticationError."""
        nonce = self._nonce()
        try:
            self._cipher.decrypt_into(nonce, sealed, header, target)
        except InvalidTag:
            wipe(target)
            raise AuthenticationError("a frame does not authenticate") from None
        if self.chain is not None:
            self.chain.add(header[0], sealed[-TAG_BYTES:])

    def check(self, frame: Buffer, tag: Buffer) -> None:
        """Verify the link's tag of a forwarded frame (see `Sealer.tag`). Raises AuthenticationError."""
        nonce = self._nonce()
        try:
            self._cipher.decrypt(nonce, bytes(tag), self._authenticated(frame))
        except InvalidTag:
            raise AuthenticationError("a frame does not authenticate") from None
        if self.chain is not None:
            self.chain.add(frame[0], tag)


class OriginKeys:
    """The keys of one group instance: each rank seals under its own key what the others forward."""

    __slots__ = ("_alive", "_ciphers", "_instance", "_rank", "counter")

    def __init__(self, instance: Secret, rank: int, alive: Sequence[int] = ALIVE) -> None:
        self.counter = 0
        self._instance: Secret | None = instance
        self._rank = rank
        self._alive = alive
        self._ciphers: dict[tuple[int, int], tuple[AESGCM, int]] = {}

    def seal_into(self, counter: int, authenticated: Buffer, plaintext: Buffer, target: memoryview) -> None:
        """Seal under this rank's key. `counter` comes from `take()` and is part of the authenticated header."""
        if not self._alive[0]:
            raise ProtocolError("a forked child cannot use the links of its parent")
        cipher, iv = self._cipher(self._rank, counter)
        cipher.encrypt_into((iv ^ counter).to_bytes(IV_BYTES, "big"), plaintext, authenticated, target)

    def take(self) -> int:
        """Return a counter that no other segment of this rank uses."""
        counter = self.counter
        if counter >= COUNTER_LIMIT:
            raise ProtocolError("a group has used all its counters")
        self.counter = counter + 1
        return counter

    def open_into(self, origin: int, counter: int, authenticated: Buffer, sealed: Buffer, target: memoryview) -> None:
        """Open a segment that `origin` sealed. On failure, wipes `target` and raises AuthenticationError."""
        cipher, iv = self._cipher(origin, counter)
        try:
            cipher.decrypt_into((iv ^ counter).to_bytes(IV_BYTES, "big"), sealed, authenticated, target)
        except InvalidTag:
            wipe(target)
            raise AuthenticationError("a forwarded segment does not authenticate") from None

    def _cipher(self, origin: int, counter: int) -> tuple[AESGCM, int]:
        key_phase = counter >> KEY_PHASE_SHIFT
        found = self._ciphers.get((origin, key_phase))
        if found is None:
            if self._instance is None:
                raise ProtocolError("the keys of this group have been deleted")
            info = keys.ORIGIN + origin.to_bytes(4, "big") + key_phase.to_bytes(8, "big")
            found = self._ciphers[origin, key_phase] = _cipher(keys.expand(self._instance, info))
            self._ciphers.pop((origin, key_phase - 2), None)
        return found

    def forget(self) -> None:
        """Delete the keys when the group ends."""
        self._instance = None
        self._ciphers.clear()


def instance_identifier(instance: Secret, group: bytes) -> bytes:
    """The identifier in the frames of one group instance. Another group with the same ranks and name has another one."""
    return keys.digest(keys.GROUP_INSTANCE, instance.reveal(), group)[:16]


def _cipher(secret: Secret) -> tuple[AESGCM, int]:
    material = keys.expand(secret, keys.SEGMENT_KEY, KEY_BYTES + IV_BYTES).reveal()
    return AESGCM(material[:KEY_BYTES]), int.from_bytes(material[KEY_BYTES:], "big")
