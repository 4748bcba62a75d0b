"""An entry identifies a worker for one session; a listing is an entry in the roster with its endorsement."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ringfence import keys
from ringfence.admission import encoding
from ringfence.errors import ProtocolError

RUN_ID_BYTES: Final = 128
GENERATION_BYTES: Final = 64
HOST_BYTES: Final = 255
ENDORSEMENT_BYTES: Final = 4096  # an HMAC is 32; certificates with a signature are longer
ENTRY_BYTES: Final = RUN_ID_BYTES + GENERATION_BYTES + HOST_BYTES + 3 * 2 + 2 * 4 + 2 * keys.DIGEST_BYTES + 2
LISTING_BYTES: Final = 4 + ENTRY_BYTES + 1 + keys.DIGEST_BYTES + 4 + ENDORSEMENT_BYTES
WORLD_LIMIT: Final = 1 << 20

_MIDDLE: Final = struct.Struct(f">II{keys.KEY_BYTES}s{keys.DIGEST_BYTES}s")  # rank, world size, keys


def format_address(address: tuple[str, int]) -> str:
    """Format "host:port" or "[v6]:port"."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class Entry:
    """One worker. Run id and generation come from its own environment, never from the store.

    Raises ProtocolError if a field is out of range.
    """

    run_id: str
    generation: str
    rank: int
    world_size: int
    public_key: bytes  #     X25519, for links
    tls_key_digest: bytes  # SHA-256 of the TLS key's SubjectPublicKeyInfo
    host: str  #             where its links are dialled
    port: int

    def __post_init__(self) -> None:
        _check_text("run id", self.run_id, RUN_ID_BYTES)
        _check_text("generation", self.generation, GENERATION_BYTES)
        _check_text("host", self.host, HOST_BYTES)
        if not 1 <= self.world_size <= WORLD_LIMIT or not 0 <= self.rank < self.world_size:
            raise ProtocolError(f"an invalid rank: {self.rank} of {self.world_size}")
        if not 0 <= self.port <= 0xFFFF:
            raise ProtocolError(f"an invalid port: {self.port}")
        if len(self.public_key) != keys.KEY_BYTES or len(self.tls_key_digest) != keys.DIGEST_BYTES:
            raise ProtocolError("a key or digest of the wrong length")

    def encode(self) -> bytes:
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        """Cached: every worker checks, digests and passes on all entries of the roster."""
        return b"".join(
            (
                encoding.text(self.run_id),
                encoding.text(self.generation),
                _MIDDLE.pack(self.rank, self.world_size, self.public_key, self.tls_key_digest),
                encoding.text(self.host),
                encoding.number(self.port, 2),
            )
        )

    @classmethod
    def read(cls, reader: encoding.Reader) -> Entry:
        run_id, generation = reader.text(RUN_ID_BYTES), reader.text(GENERATION_BYTES)
        rank, world_size, public_key, tls_key_digest = _MIDDLE.unpack(reader.take(_MIDDLE.size))
        host, port = reader.text(HOST_BYTES), reader.number(2)
        return cls(
            run_id=run_id,
            generation=generation,
            rank=rank,
            world_size=world_size,
            public_key=public_key,
            tls_key_digest=tls_key_digest,
            host=host,
            port=port,
        )

    @cached_property
    def digest(self) -> bytes:
        return keys.digest(keys.ENTRY, self.encode())

    def __str__(self) -> str:
        return f"rank {self.rank} at {self.host}:{self.port} (key {self.public_key[:4].hex()})"


@dataclass(frozen=True)
class Listing:
    """An entry, the digest of the proof that its worker presented to its parent, and the worker's endorsement of both.

    Raises ProtocolError if a field is malformed.
    """

    entry: Entry
    kind: int  #           of proof
    proof_digest: bytes
    endorsement: bytes  #  shared secret: an HMAC that every member can check

    def __post_init__(self) -> None:
        if not 0 < self.kind <= 0xFF or len(self.proof_digest) != keys.DIGEST_BYTES:
            raise ProtocolError("a malformed listing")
        if len(self.endorsement) > ENDORSEMENT_BYTES:
            raise ProtocolError(
                f"an endorsement of {len(self.endorsement)} bytes, where at most {ENDORSEMENT_BYTES} are allowed"
            )

    def encode(self) -> bytes:
        return b"".join(
            (self.entry.encode(), encoding.number(self.kind, 1), self.proof_digest, encoding.blob(self.endorsement))
        )

    @classmethod
    def read(cls, reader: encoding.Reader) -> Listing:
        return cls(
            entry=Entry.read(reader),
            kind=reader.number(1),
            proof_digest=reader.take(keys.DIGEST_BYTES),
            endorsement=reader.blob(ENDORSEMENT_BYTES),
        )


def _check_text(name: str, value: str, limit: int) -> None:
    if not 1 <= len(value) <= limit or not encoding.is_printable(value):
        raise ProtocolError(f"{name} must be 1 to {limit} printable ASCII characters")
