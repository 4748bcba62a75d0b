"""Frames between workers of one machine: not sealed, because the kernel passes them on, and nobody else.

These classes take the places of `seal.Sealer` and `seal.Opener` on links whose both ends have proved, through an abstract Unix
socket, that they are on one machine and of one user. A frame has the same layout, with zeros as its tag.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringfence.errors import AuthenticationError, ProtocolError
from ringfence.keys import TAG_BYTES
from ringfence.link.seal import ALIVE, Buffer, Opener, Sealer, wipe

_NO_TAG = bytes(TAG_BYTES)


class LocalSealer:
    """Copies payloads into frames."""

    __slots__ = ("_alive", "counter")

    def __init__(self, alive: Sequence[int] = ALIVE) -> None:
        self.counter = 0
        self._alive = alive

    def seal_into(self, header: Buffer, plaintext: Buffer, target: memoryview) -> None:
        """Write `plaintext` and an empty tag to `target`."""
        self._check()
        target[:-TAG_BYTES] = plaintext
        target[-TAG_BYTES:] = _NO_TAG

    def tag(self, frame: Buffer) -> bytes:
        """Return an empty tag."""
        self._check()
        return _NO_TAG

    def _check(self) -> None:
        if not self._alive[0]:
            raise ProtocolError("a forked child cannot use the links of its parent")

    def upcoming_key_phase(self) -> int:
        return 0

    def forget(self) -> None:
        """Do nothing: there is no key."""


class LocalOpener:
    """Copies payloads out of frames."""

    __slots__ = ("counter",)

    def __init__(self) -> None:
        self.counter = 0

    def open_into(self, header: Buffer, sealed: Buffer, target: memoryview) -> None:
        """Write the payload to `target`. A frame with a tag is an error of the peer."""
        if sealed[-TAG_BYTES:] != _NO_TAG:
            wipe(target)
            raise AuthenticationError("a frame inside a machine has a tag")
        target[:] = sealed[:-TAG_BYTES]

    def check(self, frame: Buffer, tag: Buffer) -> None:
        if tag != _NO_TAG:
            raise AuthenticationError("a frame inside a machine has a tag")

    def upcoming_key_phase(self) -> int:
        return 0

    def forget(self) -> None:
        """Do nothing: there is no key."""


AnySealer = Sealer | LocalSealer
AnyOpener = Opener | LocalOpener
