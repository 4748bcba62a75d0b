"""The header of a sealed file: which key-encryption key wraps the data key, and the wrapped data key (spec/checkpoint.md)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from ringfence import keys
from ringfence.admission.encoding import Reader, blob, number, text
from ringfence.errors import ProtocolError

MAGIC: Final = b"ringfence sealed"
VERSION: Final = 1
_FIXED: Final = len(MAGIC) + 2 + keys.CHECKPOINT_ID_BYTES
LIMIT: Final = _FIXED + 2 + keys.CHECKPOINT_NAME_BYTES + 4 + keys.CHECKPOINT_WRAPPED_BYTES


class EnvelopeKind(IntEnum):
    """What is sealed after the header."""

    INDEX = 1  # of a checkpoint; the id is that of the save
    FILE = 2  #  the content of a file that `sealed_open` wrote


_LABELS: Final = {EnvelopeKind.INDEX: keys.CHECKPOINT_INDEX, EnvelopeKind.FILE: keys.CHECKPOINT_FILE}


@dataclass(frozen=True)
class Envelope:
    """The header: `id` is random, `key_name` tells people and services which key unwraps `wrapped`."""

    kind: EnvelopeKind
    id: bytes
    key_name: str
    wrapped: bytes

    def encode(self) -> bytes:
        fixed = MAGIC + number(VERSION, 1) + number(self.kind, 1) + self.id
        return fixed + text(self.key_name) + blob(self.wrapped)

    @property
    def associated_data(self) -> bytes:
        """What the stream after the header is bound to."""
        return _LABELS[self.kind] + self.id

    @property
    def context(self) -> bytes:
        """What the wrapped key is bound to."""
        return key_context(self.kind, self.id)


def key_context(kind: EnvelopeKind, identifier: bytes) -> bytes:
    """Return the context of a data key: a wrapped key of one save does not unwrap as that of another."""
    return keys.CHECKPOINT_CONTEXT + number(kind, 1) + identifier


def shard_data(save_id: bytes, shard_id: bytes) -> bytes:
    """Return the associated data of a shard's stream."""
    return keys.CHECKPOINT_SHARD + save_id + shard_id


def parse(data: bytes) -> tuple[Envelope, int]:
    """Parse the header at the beginning of a file; return it and its length. Raises ProtocolError."""
    reader = Reader(data)
    if reader.take(len(MAGIC)) != MAGIC:
        raise ProtocolError("a file that is not sealed by ringfence")
    if (version := reader.number(1)) != VERSION:
        raise ProtocolError(f"a sealed file of version {version}; this release reads version {VERSION}")
    code = reader.number(1)
    if code not in set(EnvelopeKind):
        raise ProtocolError(f"a sealed file of unknown kind {code}")
    identifier = reader.take(keys.CHECKPOINT_ID_BYTES)
    name = reader.text(keys.CHECKPOINT_NAME_BYTES)
    found = Envelope(EnvelopeKind(code), identifier, name, reader.blob(keys.CHECKPOINT_WRAPPED_BYTES))
    return found, len(found.encode())
