"""ringfence without its sealing, for the benchmark only: the same engine, frames and schedules, and bytes copied as they are.

Nothing outside this folder imports it; no setting, environment variable or argument of the product leads to it. Where the
sealed variant encrypts into a frame, this one copies into it, so the difference between the two is the cost of AES-256-GCM
over that of a copy.
"""

from __future__ import annotations

from ringfence.keys import TAG_BYTES, Secret
from ringfence.link.seal import Buffer, Opener, OriginKeys, Sealer
from ringfence.runtime.link_keys import LinkKeys
from ringfence.session.session import Session

_NO_TAG = bytes(TAG_BYTES)


class _Copier(Sealer):
    __slots__ = ()

    def seal_into(self, header: Buffer, plaintext: Buffer, target: memoryview) -> None:
        self.counter += 1
        target[: len(plaintext)] = plaintext

    def tag(self, frame: Buffer) -> bytes:
        self.counter += 1
        return _NO_TAG


class _Taker(Opener):
    __slots__ = ()

    def open_into(self, header: Buffer, sealed: Buffer, target: memoryview) -> None:
        self.counter += 1
        target[:] = sealed[: len(target)]

    def check(self, frame: Buffer, tag: Buffer) -> None:
        self.counter += 1


class _NoKeys(OriginKeys):
    __slots__ = ()

    def seal_into(self, counter: int, authenticated: Buffer, plaintext: Buffer, target: memoryview) -> None:
        target[: len(plaintext)] = plaintext

    def open_into(self, origin: int, counter: int, authenticated: Buffer, sealed: Buffer, target: memoryview) -> None:
        target[:] = sealed[: len(target)]


class UnsealedKeys(LinkKeys):
    """Makes sealers and openers that copy plaintext."""

    def sealer(self, secret: Secret) -> Sealer:
        return _Copier(secret, self.alive)

    def opener(self, secret: Secret) -> Opener:
        return _Taker(secret)

    def origin_keys(self, instance: Secret, rank: int) -> OriginKeys:
        return _NoKeys(instance, rank, self.alive)


class UnsealedSession(Session):
    """Admission as ever, then links without sealing."""

    keys_type = UnsealedKeys
