"""The StorageReader of sealed checkpoints: each rank opens the ranges that it needs, straight into its tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ringfence import keys
from ringfence.checkpoint import conversion, overlaps
from ringfence.checkpoint.index import Index, Item, TensorItem, name_of
from ringfence.checkpoint.opening import opened_shard
from ringfence.checkpoint.ranks import portable_errors
from ringfence.checkpoint.storage import Storage
from ringfence.checkpoint.streams import Progress, SealingThreads, StreamReader, Want, unseen
from ringfence.checkpoint.tensors import HostBuffer, Piece, memory_of, pieces

_COMPARED_BYTES: Final = 8 << 20  # of tied tensors at a time


class _Read(NamedTuple):
    """A range of a shard: `target` is where it goes, or `piece` is what it is staged for."""

    start: int
    target: memoryview | None
    piece: Piece | None = None
    dtype: torch.dtype = torch.uint8
    name: str = ""


class _Rows(NamedTuple):
    """The rows of a stored chunk that a read needs, as a range of a shard."""

    form: tuple[Any, ...]
    shard: int
    start: int
    size: int


@portable_errors("set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data")
class SealedReader(StorageReader):  # type: ignore[misc]
    """Reads one checkpoint, whose index is verified."""

    def __init__(
        self,
        storage: Storage,
        path: str,
        index: Index,
        data_key: keys.Secret,
        threads: int,
        progress: Progress = unseen,
    ) -> None:
        self._storage, self._path, self._index, self._progress = storage, path, index, progress
        self._data_key, self._threads = data_key, threads
        tensors = (item for item in index.items if isinstance(item, TensorItem))
        self._chunks = {(name_of(item.path), chunk.offsets): chunk for item in tensors for chunk in item.chunks}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_metadata(self) -> Metadata:
        return Metadata(
            state_dict_metadata={name: _metadata_of(item) for name, item in self._index.by_name.items()},
            planner_data={name_of(item.path): item.path for item in self._index.items},
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check that tied tensors are equal in the checkpoint, before any rank writes. Raises CheckpointError."""
        with SealingThreads(self._threads) as threads:
            for one, other in plan.planner_data or ():
                if not self._are_equal(one, other, threads):
                    raise overlaps.not_equal(one.dest_index.fqn, other.dest_index.fqn)
        return dataclasses.replace(plan, planner_data=None)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs."""
        reads: dict[int, list[_Read]] = {}
        afterwards: list[Callable[[], None]] = []
        staging, overflowed = HostBuffer(), set[str]()
        for item in plan.items:
            self._add(item, planner, staging, reads, afterwards)
        with SealingThreads(self._threads) as threads:
            for number in sorted(reads):
                shard = self._index.shards[number]
                with opened_shard(self._storage, self._path, self._index, shard, self._data_key, threads) as stream:
                    ordered = sorted(reads[number], key=lambda read: read.start)
                    overflowed |= _read(stream, ordered, staging, self._progress)
        if overflowed:
            raise conversion.overflow_error(overflowed)
        for each in afterwards:
            each()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _are_equal(self, one: ReadItem, other: ReadItem, threads: SealingThreads) -> bool:
        """Compare the stored rows that two reads are from."""
        sources = self._rows(one), self._rows(other)
        if sources[0] == sources[1] or sources[0].form != sources[1].form:
            return sources[0].form == sources[1].form
        with contextlib.ExitStack() as stack:
            streams = []
            for source in sources:
                shard = self._index.shards[source.shard]
                opened = opened_shard(self._storage, self._path, self._index, shard, self._data_key, threads)
                streams.append(stack.enter_context(opened))
            for at in range(0, sources[0].size, _COMPARED_BYTES):
                parts = [bytearray(min(_COMPARED_BYTES, sources[0].size - at)) for _ in streams]
                for stream, source, part in zip(streams, sources, parts, strict=True):
                    stream.read([Want(source.start + at, memoryview(part))])
                if parts[0] != parts[1]:
                    return False
        return True

    def _rows(self, request: ReadItem) -> _Rows:
        item = self._index.by_name[request.storage_index.fqn]
        assert isinstance(item, TensorItem)
        chunk = self._chunks[request.storage_index.fqn, tuple(request.storage_index.offset)]
        offsets, lengths = tuple(request.storage_offsets), tuple(request.lengths)
        row = math.prod(chunk.sizes[1:]) * getattr(torch, item.dtype).itemsize
        first, count = (offsets[0], lengths[0]) if chunk.sizes else (0, 1)
        form = item.dtype, chunk.sizes, offsets, lengths
        return _Rows(form, chunk.place.shard, chunk.place.offset + first * row, count * row)

    def _add(
        self,
        request: ReadItem,
        planner: LoadPlanner,
        staging: HostBuffer,
        reads: dict[int, list[_Read]],
        afterwards: list[Callable[[], None]],
    ) -> None:
        item = self._index.by_name[request.storage_index.fqn]
        if request.type == LoadItemType.BYTE_IO or not isinstance(item, TensorItem):
            assert not isinstance(item, TensorItem)
            value = bytearray(item.place.length)
            reads.setdefault(item.place.shard, []).append(_Read(item.place.offset, memoryview(value)))
            afterwards.append(lambda: planner.load_bytes(request, io.BytesIO(value)))
            return
        name = request.storage_index.fqn
        chunk = self._chunks[name, tuple(request.storage_index.offset)]
        dtype: torch.dtype = getattr(torch, item.dtype)
        target = planner.resolve_tensor(request)
        conversion.check(name, dtype, target.dtype)
        found = reads.setdefault(chunk.place.shard, [])
        limit = max(1, staging.size // dtype.itemsize)
        for piece in pieces(chunk.sizes, request.storage_offsets, target, dtype, limit):
            start = chunk.place.offset + piece.start * dtype.itemsize
            if piece.shape is None:
                found.append(_Read(start, memory_of(piece.target)))
            else:
                found.append(_Read(start, None, piece, dtype, name))
        afterwards.append(lambda: planner.commit_tensor(request, target))


def _read(stream: StreamReader, reads: list[_Read], staging: HostBuffer, progress: Progress) -> set[str]:
    """Open ranges, in the order of the file; those that need staging in groups that fit it.

    Returns the names of tensors with numbers that are too large for the dtype of their target.
    """
    wants: list[Want] = []
    staged: list[tuple[Piece, torch.Tensor, str]] = []
    overflowed: set[str] = set()

    def flush() -> None:
        stream.read(wants, progress)
        for piece, loaded, name in staged:
            assert piece.shape is not None
            if piece.copy_from(loaded.view(piece.shape)):
                overflowed.add(name)
        wants.clear()
        staged.clear()
        staging.reset()

    for start, target, piece, dtype, name in reads:
        if piece is not None:
            memory = staging.take(piece.elements, dtype, piece.target.device)
            if memory is None:
                flush()
                memory = staging.take(piece.elements, dtype, piece.target.device)
                assert memory is not None
            staged.append((piece, memory, name))
            target = memory_of(memory)
        assert target is not None
        wants.append(Want(start, target))
    flush()
    return overflowed


def _metadata_of(item: Item) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(item, TensorItem):
        return BytesStorageMetadata()
    boxes = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in item.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, item.dtype)), torch.Size(item.shape), boxes)
