"""Formats of checkpoints. They are authenticated first, so only someone with the key reaches these parsers."""

from __future__ import annotations

from ringfence import keys
from ringfence.checkpoint import envelope, index, values
from ringfence.checkpoint.envelope import Envelope, EnvelopeKind
from ringfence.checkpoint.index import ITEM_BYTES, Chunk, Index, Shard, StoredBytes, TensorItem, ValueItem
from ringfence.errors import ProtocolError
from tests.fuzz.target import Target

SHARDS = (Shard(b"a" * 16, 4096), Shard(b"b" * 16, 1 << 40))


def _indices() -> list[bytes]:
    scalar = TensorItem(("a", "scalar"), "bool", (), (Chunk((), (), StoredBytes(0, 0, 1)),))
    empty = TensorItem(("b", 0), "complex128", (0, 7), ())
    chunks = tuple(Chunk((2 * each, 0), (2, 3), StoredBytes(each % 2, 24 * each, 24)) for each in range(3))
    tensor = TensorItem(("c", 1, "weight"), "float32", (6, 3), chunks)
    value = ValueItem(("d",), StoredBytes(1, 1 << 30, 12))
    found = [
        Index(b"s" * 16, SHARDS, (scalar, empty, tensor, value), 12, {"run": "name", "lr": [0.5, None]}),
        Index(b"s" * 16, SHARDS[:1], (scalar,)),
        Index(b"t" * 16, (), (), (1 << 63) - 1),
        Index(b"t" * 16, SHARDS[:1], (scalar,), head=b"h" * 32),
    ]
    return [each.encode() for each in found]


def _parse_index(data: bytes) -> None:
    found = index.parse(data)
    assert found.encode() == data
    assert len(found.by_name) == len(found.items)
    assert len(found.anchor) == 64


def _values() -> list[bytes]:
    nested: object = {"a": [1, (2.5, None), {"b": b"c", 3: True}], "é": -(1 << 70), 0: ""}
    return [values.encode(each, "seed") for each in (nested, [nested] * 3, ((), [], {}), 127, -129, "text", b"")]


def _decode(data: bytes) -> None:
    assert values.encode(values.decode(data), "value") == data


def _headers() -> list[bytes]:
    return [Envelope(kind, b"i" * 16, "file:0123456789abcdef", b"w" * 80).encode() for kind in EnvelopeKind]


def _parse_header(data: bytes) -> None:
    found, length = envelope.parse(data)
    assert found.encode() == data[:length] and length <= envelope.LIMIT
    assert found.context != found.associated_data


_WORDS = (
    *(name.encode() for name in ITEM_BYTES),
    b"a" * 16,
    keys.CHECKPOINT_INDEX,
    envelope.MAGIC,
    bytes(8),
    b"\xff" * 8,
)

TARGETS = (
    Target("checkpoint-index", _indices, _parse_index, (ProtocolError,), words=_WORDS),
    Target("checkpoint-value", _values, _decode, (ProtocolError,), words=_WORDS),
    Target("checkpoint-header", _headers, _parse_header, (ProtocolError,), words=_WORDS),
)
