"""The index of a checkpoint (spec/checkpoint.md, The index): which shards it has, and where in them each item is.

Bytes that are accepted re-encode to identical bytes. The index is sealed, and bound to the shards by their ids.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from ringfence import keys
from ringfence.admission.encoding import Reader, blob, number
from ringfence.checkpoint import values
from ringfence.errors import ProtocolError

VERSION: Final = 1
VERSION_WITH_HEAD: Final = 2  # what a run with a record writes
ITEM_BYTES: Final = (  # the dtypes that a checkpoint can hold, and the size of an element
    dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1)
    | dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1)
    | dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2)
    | dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4)
    | dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8)
    | {"complex128": 16}
)
_SIZE_LIMIT: Final = 1 << 63
_VALUE, _TENSOR = 0, 1
_STEP_LIMIT: Final = 1 << 63

Path = tuple[str | int, ...]  # the keys and positions that lead to an item in the nested state
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """A file with items: its random id, and how many bytes it has before sealing."""

    id: bytes
    size: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.id.hex()}.shard"


@dataclass(frozen=True)
class StoredBytes:
    """Where the bytes of an item are: a position in the list of shards, and an offset in that shard's plaintext."""

    shard: int
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and where its elements are, in row-major order."""

    offsets: Shape
    sizes: Shape
    place: StoredBytes


@dataclass(frozen=True)
class TensorItem:
    """A tensor: dtype, global shape and the chunks that it consists of, ordered by offsets."""

    path: Path
    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class ValueItem:
    """An item that is not a tensor, in the encoding of `values`."""

    path: Path
    place: StoredBytes


Item = TensorItem | ValueItem


def name_of(path: Path) -> str:
    """Return the fully-qualified name of an item, as DCP's planners form it."""
    return ".".join(map(str, path))


@dataclass(frozen=True)
class Index:
    """What a checkpoint contains. Items are ordered by name."""

    save_id: bytes
    shards: tuple[Shard, ...]
    items: tuple[Item, ...]
    step: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    head: bytes = b""  # of the record of rank 0 when it saved (spec/record.md, 8), if it wrote one

    def encode(self) -> bytes:
        """Return the bytes that `parse` reads."""
        parts = [
            number(VERSION_WITH_HEAD if self.head else VERSION, 1),
            self.save_id,
            b"\0" if self.step is None else b"\1" + number(self.step, 8),
            blob(values.encode(self.metadata, "metadata")),
            number(len(self.shards), 4),
            *(shard.id + number(shard.size, 8) for shard in self.shards),
            number(len(self.items), 4),
        ]
        for item in self.items:
            _write_item(parts, item)
        return b"".join((*parts, self.head))

    @functools.cached_property
    def anchor(self) -> str:
        """The digest by which this save is recognised, as 64 hexadecimal digits."""
        return keys.digest(keys.CHECKPOINT_ANCHOR, self.encode()).hex()

    @functools.cached_property
    def by_name(self) -> Mapping[str, Item]:
        return MappingProxyType({name_of(item.path): item for item in self.items})


def parse(data: bytes) -> Index:
    """Parse an index and check it. Raises ProtocolError."""
    reader = Reader(data)
    if (version := reader.number(1)) not in (VERSION, VERSION_WITH_HEAD):
        raise ProtocolError(f"an index of version {version}; this release reads {VERSION} and {VERSION_WITH_HEAD}")
    save_id = reader.take(keys.CHECKPOINT_ID_BYTES)
    step = _read_step(reader)
    metadata = values.decode(reader.blob(len(data)))
    if not isinstance(metadata, dict) or not all(isinstance(key, str) for key in metadata):
        raise ProtocolError("metadata that is not a dict with texts as keys")
    shards = tuple(_read_shard(reader) for _ in range(_count(reader, len(data) // 24)))
    if len({shard.id for shard in shards}) != len(shards):
        raise ProtocolError("a shard id that occurs twice")
    items = tuple(_read_item(reader, shards) for _ in range(_count(reader, len(data) // 8)))
    head = reader.take(keys.DIGEST_BYTES) if version == VERSION_WITH_HEAD else b""
    reader.end()
    names = [name_of(item.path) for item in items]
    if any(left >= right for left, right in itertools.pairwise(names)):
        raise ProtocolError("items that are not ordered by name, or two with one name")
    return Index(save_id, shards, items, step, metadata, head)


def _count(reader: Reader, limit: int) -> int:
    count = reader.number(4)
    if count > limit:
        raise ProtocolError(f"a list of {count} entries in an index that has no room for them")
    return count


def _read_step(reader: Reader) -> int | None:
    given = reader.number(1)
    if given > 1:
        raise ProtocolError(f"a step marked with {given}")
    if not given:
        return None
    if (step := reader.number(8)) >= _STEP_LIMIT:
        raise ProtocolError(f"the step {step}")
    return step


def _read_shard(reader: Reader) -> Shard:
    identifier, size = reader.take(keys.CHECKPOINT_ID_BYTES), reader.number(8)
    if not 0 < size < _SIZE_LIMIT:
        raise ProtocolError(f"a shard of {size} bytes")
    return Shard(identifier, size)


# -- items ------------------------------------------------------------------------------------------------------------


def _write_item(parts: list[bytes], item: Item) -> None:
    parts.append(number(len(item.path), 2))
    for part in item.path:
        parts.append(b"\0" + blob(part.encode()) if isinstance(part, str) else b"\1" + number(part, 4))
    if isinstance(item, ValueItem):
        parts.append(
            number(_VALUE, 1) + _PLACE.pack(item.place.shard, item.place.offset) + number(item.place.length, 8)
        )
        return
    dtype, dimensions = item.dtype.encode(), len(item.shape)
    numbers = _numbers(dimensions)
    parts.append(number(_TENSOR, 1) + number(len(dtype), 2) + dtype + number(dimensions, 1) + numbers.pack(*item.shape))
    parts.append(number(len(item.chunks), 4))
    for chunk in item.chunks:
        parts.append(numbers.pack(*chunk.offsets) + numbers.pack(*chunk.sizes))
        parts.append(_PLACE.pack(chunk.place.shard, chunk.place.offset))


_PLACE: Final = struct.Struct(">IQ")


@functools.lru_cache
def _numbers(count: int) -> struct.Struct:
    return struct.Struct(f">{count}Q")


def _read_item(reader: Reader, shards: tuple[Shard, ...]) -> Item:
    path = _read_path(reader)
    kind = reader.number(1)
    if kind == _VALUE:
        shard, offset = _PLACE.unpack(reader.take(_PLACE.size))
        return ValueItem(path, _place(shards, shard, offset, reader.number(8)))
    if kind != _TENSOR:
        raise ProtocolError(f"an item of unknown type {kind}")
    dtype = reader.text(32)
    if dtype not in ITEM_BYTES:
        raise ProtocolError(f"a tensor of the unknown dtype {dtype}")
    dimensions = reader.number(1)
    if dimensions > keys.CHECKPOINT_DIMENSIONS:
        raise ProtocolError(f"a tensor of {dimensions} dimensions")
    shape = _read_shape(reader, dimensions)
    volume = _volume(shape)
    count = reader.number(4)
    chunks = tuple(_chunks(reader, count, shape, ITEM_BYTES[dtype], shards))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != volume:
        raise ProtocolError("a tensor whose chunks do not cover it")
    if any(left.offsets >= right.offsets for left, right in itertools.pairwise(chunks)):
        raise ProtocolError("chunks that are not ordered by offset")
    return TensorItem(path, dtype, shape, chunks)


def _read_path(reader: Reader) -> Path:
    count = reader.number(2)
    if not 0 < count <= keys.CHECKPOINT_PATH_PARTS:
        raise ProtocolError(f"a name of {count} parts")
    found: list[str | int] = []
    for _ in range(count):
        kind = reader.number(1)
        if kind > 1:
            raise ProtocolError(f"a part of a name of unknown type {kind}")
        found.append(reader.number(4) if kind else values.text_of(reader.blob(1 << 16)))
    if isinstance(found[0], int):
        raise ProtocolError("a name that begins with a position")
    return tuple(found)


def _read_shape(reader: Reader, dimensions: int) -> Shape:
    return _numbers(dimensions).unpack(reader.take(8 * dimensions))


def _volume(sizes: Shape) -> int:
    volume = math.prod(sizes)
    if volume >= _SIZE_LIMIT or any(size >= _SIZE_LIMIT for size in sizes):
        raise ProtocolError(f"a tensor of {volume} elements")
    return volume


def _chunks(reader: Reader, count: int, shape: Shape, size: int, shards: tuple[Shard, ...]) -> Iterator[Chunk]:
    for _ in range(count):
        offsets, sizes = _read_shape(reader, len(shape)), _read_shape(reader, len(shape))
        volume = _volume(sizes)
        inside = all(at + length <= end for at, length, end in zip(offsets, sizes, shape, strict=True))
        if not volume or not inside:
            raise ProtocolError("a chunk that is empty, or not within its tensor")
        shard, offset = _PLACE.unpack(reader.take(_PLACE.size))
        yield Chunk(offsets, sizes, _place(shards, shard, offset, volume * size))


def _place(shards: tuple[Shard, ...], shard: int, offset: int, length: int) -> StoredBytes:
    if shard >= len(shards) or not length or offset + length > shards[shard].size:
        raise ProtocolError("an item that is not within its shard")
    return StoredBytes(shard, offset, length)
