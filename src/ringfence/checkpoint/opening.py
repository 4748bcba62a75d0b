"""Open a checkpoint: verify its index before anything else is used. Needs no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ringfence import keys
from ringfence.checkpoint import envelope, index, key_wrap, nested_keys, streams
from ringfence.checkpoint.envelope import Envelope, EnvelopeKind
from ringfence.checkpoint.index import Index, Shard
from ringfence.checkpoint.key_wrap import Key, KeyWrapper
from ringfence.checkpoint.storage import INDEX_NAME, Storage
from ringfence.checkpoint.streams import Progress, SealingThreads, StreamReader, unseen
from ringfence.errors import CheckpointError, ProtocolError

Anchor = str | int  # the digest that save() returned, or a step


@dataclass(frozen=True)
class Info:
    """What a checkpoint says of itself, verified.

    `metadata` is what was given to `save`, `anchor` the digest that it returned, `size` the bytes of all items, `key_name` the
    key that wraps its data key.
    """

    path: str
    save_id: str
    step: int | None
    metadata: dict[str, Any]
    anchor: str
    key_name: str
    size: int
    items: int
    shards: int


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose index is verified: with the data key, its shards can be opened."""

    storage: Storage
    path: str
    envelope: Envelope
    body: bytes  # of the index, without sealing
    index: Index
    data_key: keys.Secret

    @property
    def info(self) -> Info:
        found = self.index
        return Info(
            path=self.path,
            save_id=found.save_id.hex(),
            step=found.step,
            metadata=nested_keys.without_note(found.metadata),
            anchor=found.anchor,
            key_name=self.envelope.key_name,
            size=sum(shard.size for shard in found.shards),
            items=len(found.items),
            shards=len(found.shards),
        )


@contextlib.contextmanager
def opened_shard(
    storage: Storage, path: str, index: Index, shard: Shard, data_key: keys.Secret, threads: SealingThreads
) -> Iterator[StreamReader]:
    """Open a shard of a checkpoint. Raises CheckpointError, also for what is raised within; the message names the shard."""
    try:
        file = storage.open(path, shard.name)
        with contextlib.closing(file):
            bound = envelope.shard_data(index.save_id, shard.id)
            yield StreamReader(file, data_key, bound, threads, expected=shard.size)
    except CheckpointError as error:
        raise CheckpointError(f"shard {shard.name} of {path}: {error}. Load another checkpoint") from error


def open_index(storage: Storage, path: str, wrapper: KeyWrapper, anchor: Anchor | None = None) -> Opened:
    """Read and verify the index of a checkpoint.

    Raises CheckpointError if there is none, if it does not authenticate, or if it is not the one that `anchor` expects.
    """
    if not storage.contains_index(path):
        storage.names(path)  # says so if there is no such folder
        raise CheckpointError(
            f"{path} has no index: it is not a sealed checkpoint, or not a complete one. Load another one"
        )
    try:
        found = _open(storage, path, wrapper)
    except (CheckpointError, ProtocolError) as error:
        raise CheckpointError(f"the index of {path} is refused: {error}") from error
    _check_anchor(found, anchor)
    return found


def _open(storage: Storage, path: str, wrapper: KeyWrapper) -> Opened:
    with contextlib.closing(storage.open(path, INDEX_NAME)) as file:
        content = file.read(keys.CHECKPOINT_INDEX_BYTES + envelope.LIMIT + 1)
    if len(content) > keys.CHECKPOINT_INDEX_BYTES + envelope.LIMIT:
        raise CheckpointError(f"it has more than {keys.CHECKPOINT_INDEX_BYTES} bytes")
    header, length = envelope.parse(content[: envelope.LIMIT])
    if header.kind is not EnvelopeKind.INDEX:
        raise CheckpointError("it is another sealed file")
    data_key = key_wrap.unwrap(wrapper, header)
    body = streams.unseal(data_key, header.associated_data, content[length:])
    parsed = index.parse(body)
    if parsed.save_id != header.id:
        raise CheckpointError("it is the index of another save")
    return Opened(storage, path, header, body, parsed, data_key)


def _check_anchor(found: Opened, anchor: Anchor | None) -> None:
    if anchor is None:
        return
    if isinstance(anchor, bool) or not isinstance(anchor, int | str):
        raise TypeError(f"anchor must be the digest that save() returned, or a step, not {type(anchor).__name__}")
    is_step = isinstance(anchor, int)
    if anchor == found.index.step if is_step else keys.same(str(anchor).encode(), found.index.anchor.encode()):
        return
    has = f"of step {found.index.step}" if is_step else f"with the anchor {found.index.anchor}"
    expected = f"step {anchor}" if is_step else f"the anchor {anchor}"
    raise CheckpointError(
        f"{found.path} is a checkpoint {has}, and {expected} is expected: the folder was replaced, for example by an older "
        "one, or another path was meant"
    )


def verify_shards(found: Opened, threads: int, progress: Progress = unseen) -> None:
    """Open every byte of every shard.

    Raises CheckpointError that names the first shard which is missing, damaged or changed.
    """
    with SealingThreads(threads) as pool:
        for shard in found.index.shards:
            with opened_shard(found.storage, found.path, found.index, shard, found.data_key, pool) as stream:
                stream.verify(progress)


def rewrap_index(found: Opened, key: Key) -> str:
    """Wrap the data key with another key-encryption key, and replace the index. Shards and anchor stay the same.

    The old key still opens copies of the old index. Returns the name of the new key. Raises CheckpointError.
    """
    wrapped = key_wrap.wrap(key_wrap.wrapper_of(key), found.data_key, EnvelopeKind.INDEX, found.index.save_id)
    stream = streams.seal(found.data_key, wrapped.associated_data, found.body)
    found.storage.replace(found.path, INDEX_NAME, wrapped.encode() + stream)
    return wrapped.key_name
