"""The StorageWriter of sealed checkpoints: one shard for each rank, the index last, published as a whole."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ringfence import keys
from ringfence.checkpoint import envelope, key_wrap, recorded, streams
from ringfence.checkpoint.envelope import Envelope, EnvelopeKind
from ringfence.checkpoint.index import Chunk, Index, Item, Path, Shard, StoredBytes, TensorItem, ValueItem, name_of
from ringfence.checkpoint.key_wrap import Key
from ringfence.checkpoint.planners import KEY_NOTE, SealedSavePlanner
from ringfence.checkpoint.ranks import portable_errors
from ringfence.checkpoint.storage import INDEX_NAME, Storage
from ringfence.checkpoint.streams import Progress, SealingThreads, StreamWriter, unseen
from ringfence.checkpoint.tensors import HostBuffer, blocks, is_plain, memory_of
from ringfence.errors import CheckpointError


@dataclasses.dataclass
class Assignment:
    """What rank 0 tells a rank: where its shard goes, and the data key. It travels in DCP's plan, over the process group."""

    place: str
    save_id: bytes
    shard_id: bytes
    data_key: bytes = dataclasses.field(repr=False)

    def take_key(self) -> keys.Secret:
        """Return the data key, and drop it: DCP keeps the plan until the save ends, and longer if it fails."""
        data_key, self.data_key = keys.Secret(self.data_key), b""
        return data_key


@dataclasses.dataclass(frozen=True)
class Written:
    """Where an item was written."""

    shard_id: bytes
    offset: int
    length: int


@portable_errors("set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish")
class SealedWriter(StorageWriter):  # type: ignore[misc]
    """Writes one checkpoint. `key` is used on rank 0 only."""

    def __init__(
        self,
        storage: Storage,
        path: str,
        key: Key,
        step: int | None,
        metadata: Mapping[str, Any],
        threads: int,
        progress: Progress = unseen,
    ) -> None:
        self._storage, self._path, self._key, self._threads = storage, path, key, threads
        self._step, self._metadata, self._progress = step, dict(metadata), progress
        self._place: str | None = None
        self._names: list[str] = []  # of the shards of all ranks
        self._data_key: keys.Secret | None = None
        self._envelope: Envelope | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Draw the data key and the ids, and begin; rank 0 only."""
        data_key, header = key_wrap.new_data_key(key_wrap.wrapper_of(self._key), EnvelopeKind.INDEX)
        self._place = self._storage.begin(self._path)
        self._data_key, self._envelope = data_key, header

        def assignment() -> Assignment:
            shard_id = secrets.token_bytes(keys.CHECKPOINT_ID_BYTES)
            assert self._place is not None
            self._names.append(Shard(shard_id, 0).name)
            return Assignment(self._place, header.id, shard_id, data_key.reveal())

        return [dataclasses.replace(plan, storage_data=assignment()) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SealedSavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shard."""
        done: Future[list[WriteResult]] = Future()
        data_key = plan.storage_data.take_key()
        try:
            size = sum(planner.size_of(item) for item in plan.items)
            done.set_result(self._write_shard(plan, planner, size, data_key) if size else [])
        finally:
            data_key.forget()
        return done

    def _write_shard(
        self, plan: SavePlan, planner: SealedSavePlanner, size: int, data_key: keys.Secret
    ) -> list[WriteResult]:
        assigned: Assignment = plan.storage_data
        shard, results, staging = Shard(assigned.shard_id, size), [], HostBuffer()
        bound = envelope.shard_data(assigned.save_id, shard.id)
        output = self._storage.create(assigned.place, shard.name, streams.sealed_size(size))
        with contextlib.ExitStack() as stack:
            stack.callback(output.abort)
            threads = stack.enter_context(SealingThreads(self._threads))
            stream = StreamWriter(output, data_key, bound, threads, progress=self._progress)
            for item in plan.items:
                start, data = stream.position, planner.resolve_data(item)
                if item.type == WriteItemType.BYTE_IO:
                    stream.write(data.getbuffer())
                else:
                    _write_tensor(stream, data.detach(), staging)
                length = stream.position - start
                if length != planner.size_of(item):
                    raise CheckpointError(f"{item.index.fqn} changed its size while it was saved")
                if length:
                    results.append(WriteResult(item.index, length, Written(shard.id, start, length)))
            stream.finish()
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and publish; rank 0 only."""
        assert self._place is not None and self._data_key is not None and self._envelope is not None
        notes = metadata.planner_data[KEY_NOTE].in_metadata(self._metadata)
        index = index_of(metadata, results, self._envelope.id, self._step, notes)
        index = dataclasses.replace(index, head=recorded.head())
        body = index.encode()
        if len(body) > keys.CHECKPOINT_INDEX_BYTES:
            raise CheckpointError(f"the index has {len(body)} bytes, more than {keys.CHECKPOINT_INDEX_BYTES}")
        header = self._envelope.encode()
        content = header + streams.seal(self._data_key, self._envelope.associated_data, body)
        output = self._storage.create(self._place, INDEX_NAME, len(content))
        try:
            output.write_at(memoryview(content), 0)
            output.finish()
        finally:
            output.abort()
        self._storage.publish(self._place, self._path)
        self._place = None
        metadata.storage_data = index.anchor  # DCP broadcasts it to all ranks
        self._data_key.forget()

    def discard(self) -> None:
        """Remove what was written, if it was not published; does nothing on other ranks than 0."""
        if self._place is not None:
            self._storage.discard(self._place, self._names)
            self._place = None
        if self._data_key is not None:
            self._data_key.forget()


def _write_tensor(stream: StreamWriter, tensor: torch.Tensor, staging: HostBuffer) -> None:
    """Append a tensor: from where it is if possible, otherwise in blocks through a bounded part of host memory."""
    if is_plain(tensor):
        if tensor.nbytes:
            stream.write(memory_of(tensor))
        return
    for block in blocks(tensor, staging.size):
        host = staging.take(block.numel(), block.dtype, block.device)
        if host is None:
            stream.flush()
            staging.reset()
            host = staging.take(block.numel(), block.dtype, block.device)
            assert host is not None
        host.view(block.shape).copy_(block)
        stream.write(memory_of(host))


def index_of(
    metadata: Metadata,
    results: list[list[WriteResult]],
    save_id: bytes,
    step: int | None,
    notes: Mapping[str, Any],
) -> Index:
    """Return the index of a save from DCP's metadata and what the ranks have written. Raises CheckpointError."""
    written: dict[MetadataIndex, Written] = {each.index: each.storage_data for rank in results for each in rank}
    sizes: dict[bytes, int] = {}
    for each in written.values():
        sizes[each.shard_id] = sizes.get(each.shard_id, 0) + each.length
    shards = tuple(Shard(identifier, sizes[identifier]) for identifier in sorted(sizes))
    numbers = {shard.id: number for number, shard in enumerate(shards)}

    def place(index: MetadataIndex) -> StoredBytes:
        if index not in written:
            raise CheckpointError(f"no rank has written {index.fqn} at {index.offset}")
        found = written[index]
        return StoredBytes(numbers[found.shard_id], found.offset, found.length)

    items: list[Item] = []
    paths: Mapping[str, Path] = metadata.planner_data or {}
    for name, found in metadata.state_dict_metadata.items():
        path = tuple(paths.get(name, (name,)))
        if not isinstance(found, TensorStorageMetadata):
            items.append(ValueItem(path, place(MetadataIndex(name))))
            continue
        boxes = [(tuple(each.offsets), tuple(each.sizes)) for each in found.chunks if each.sizes.numel()]
        chunks = [Chunk(offsets, size, place(MetadataIndex(name, offsets))) for offsets, size in sorted(boxes)]
        dtype = str(found.properties.dtype).removeprefix("torch.")
        if sum(torch.Size(chunk.sizes).numel() for chunk in chunks) != found.size.numel():
            raise CheckpointError(
                f"the ranks do not hold all of {name}: save with the ranks that the tensor is sharded over"
            )
        items.append(TensorItem(path, dtype, tuple(found.size), tuple(chunks)))
    return Index(save_id, shards, tuple(sorted(items, key=lambda item: name_of(item.path))), step, dict(notes))
