"""Sealed checkpoints: encrypted, verified before anything of them is used, and loaded by any number of ranks.

    anchor = ringfence.checkpoint.save(state, "checkpoints/step-100", key="checkpoint.key", step=100)
    ringfence.checkpoint.load(state, "checkpoints/step-100", key="checkpoint.key", anchor=anchor)

    saving.py, loading.py                   `save`, `async_save`, `load`, `load_all`
    writer.py, reader.py, planners.py       the same for torch.distributed.checkpoint, without pickle
    overlaps.py                             tied weights, and tensors that cannot be loaded together
    opening.py, index.py                    what is verified first: the index, and where each item is
    envelope.py, key_wrap.py                a sealed file's header, and the keys that wrap its key
    streams.py                              sealed streams; tensors.py, values.py: what is in them
    conversion.py                           which dtypes a tensor may be loaded into
    storage.py                              where they are: folder.py, fsspec_storage.py
    nested_keys.py                          what DCP's names lose of a nested state
    ranks.py                                the ranks that save or load together
    recorded.py                             what the record of the run says of them
    sealed_file.py                          `sealed_open`

The format is in spec/checkpoint.md. `save`, `async_save`, `load` and `load_all` need torch, which is imported when they are
first used.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringfence.checkpoint.folder import LocalStorage, storage_for
from ringfence.checkpoint.key_wrap import Key, KeyFile, KeyWrapper, wrapper_of
from ringfence.checkpoint.opening import Anchor, Info, Opened, open_index, rewrap_index, verify_shards
from ringfence.checkpoint.sealed_file import sealed_open
from ringfence.checkpoint.storage import Input, Output, Storage
from ringfence.checkpoint.streams import DEFAULT_THREADS, Progress, unseen
from ringfence.errors import CheckpointError

if TYPE_CHECKING:
    from ringfence.checkpoint.loading import load, load_all
    from ringfence.checkpoint.saving import async_save, save

__all__ = ["save", "async_save", "load", "load_all", "inspect", "verify", "rewrap", "sealed_open"]
__all__ += ["Anchor", "CheckpointError", "Info", "Key", "KeyFile", "KeyWrapper", "Opened"]
__all__ += ["Storage", "LocalStorage", "Input", "Output"]

_LAZY = {
    "async_save": "ringfence.checkpoint.saving",
    "load": "ringfence.checkpoint.loading",
    "load_all": "ringfence.checkpoint.loading",
    "save": "ringfence.checkpoint.saving",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ringfence.checkpoint' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def inspect(
    path: str | os.PathLike[str], *, key: Key, anchor: Anchor | None = None, storage: Storage | None = None
) -> Opened:
    """Open the index of a checkpoint and verify it; read no shard.

    `opened.info` has step, metadata and anchor, `opened.index.items` the names, dtypes and shapes.

    Raises CheckpointError, or ConfigurationError if the key file is wrong.
    """
    place = os.fspath(path)
    return open_index(storage or storage_for(place), place, wrapper_of(key), anchor)


def verify(
    path: str | os.PathLike[str],
    *,
    key: Key,
    anchor: Anchor | None = None,
    storage: Storage | None = None,
    threads: int = DEFAULT_THREADS,
    progress: Progress = unseen,
) -> Info:
    """Verify every byte of a checkpoint, in this process alone; arguments are those of `load`.

    Args:
        progress: Called with the number of bytes that were verified since the last call, in any thread.

    Returns:
        What the index says.

    Raises:
        CheckpointError: The checkpoint is missing, incomplete, damaged, changed, or not the expected one.
    """
    found = inspect(path, key=key, anchor=anchor, storage=storage)
    verify_shards(found, threads, progress)
    return found.info


def rewrap(
    path: str | os.PathLike[str],
    *,
    key: Key,
    new_key: Key,
    anchor: Anchor | None = None,
    storage: Storage | None = None,
) -> str:
    """Wrap the data key of a checkpoint with another key-encryption key, and replace the index.

    Shards and anchor stay the same, so it takes milliseconds. The old key still opens copies of the old index: if it leaked,
    save again. The index that is verified, against `anchor` if one is given, is the one that is written.

    Returns the name of the new key. Raises CheckpointError, or ConfigurationError if a key file is wrong.
    """
    return rewrap_index(inspect(path, key=key, anchor=anchor, storage=storage), new_key)
