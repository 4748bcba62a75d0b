"""`load` and `load_all`."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._traverse import set_element

from ringfence import keys
from ringfence.checkpoint import index, key_wrap, nested_keys, ranks, recorded
from ringfence.checkpoint.folder import storage_for
from ringfence.checkpoint.index import Index, TensorItem, name_of
from ringfence.checkpoint.key_wrap import Key
from ringfence.checkpoint.opening import Anchor, Info, open_index
from ringfence.checkpoint.planners import SealedLoadPlanner
from ringfence.checkpoint.ranks import Ranks
from ringfence.checkpoint.reader import SealedReader
from ringfence.checkpoint.storage import Storage
from ringfence.checkpoint.streams import DEFAULT_THREADS, Progress, unseen


def load(
    state: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    key: Key,
    anchor: Anchor | None = None,
    storage: Storage | None = None,
    process_group: Any = None,
    threads: int = DEFAULT_THREADS,
    partial: bool = False,
) -> Info:
    """Load a sealed checkpoint into a state. All ranks call it together; each opens what its tensors need.

    The number of ranks and the sharding may differ from those of the save. Rank 0 opens the index and sends it, with the data
    key, to the others over the process group, so all ranks load by the same index. Every byte is authenticated before it
    counts as loaded; nothing is unpickled.

    A checkpoint that is authentic may still be an old one: anyone who controls the storage can put an older folder in its
    place. Only `anchor` detects that.

    Args:
        state: As for `torch.distributed.checkpoint.load`: a state with the same names. Tensors are filled in place, other
            values replaced.
        path: The folder that `save` created.
        key: The path of the key file, or a `KeyWrapper` of the same name. Only rank 0 uses it.
        anchor: What `save` returned, or the expected step. Any other checkpoint is refused. A step does not tell two runs
            apart that reached the same step; the digest does.
        storage: Where paths are; by default a file system of this machine.
        process_group: The ranks that load; by default all.
        threads: How many threads of each rank open.
        partial: Leave alone what is in `state` and not in the checkpoint, instead of raising an error.

    Returns:
        What the index says: step, metadata, anchor.

    Raises:
        CheckpointError: On every rank, if the checkpoint is missing, incomplete, damaged, changed, not the expected one, or
            does not fit the state. `state` is then undefined.
    """
    together, place = Ranks.of(process_group), os.fspath(path)
    where = storage or storage_for(place)

    def opened() -> tuple[bytes, bytes, Info]:
        found = open_index(where, place, key_wrap.wrapper_of(key), anchor)
        return found.body, found.data_key.reveal(), found.info

    body, data_key, info = together.from_first(opened)
    secret = keys.Secret(data_key)
    try:
        with ranks.converted(f"loading {place}"):
            dcp.load(
                state,
                storage_reader=SealedReader(where, place, index.parse(body), secret, threads),
                planner=SealedLoadPlanner(allow_partial_load=partial),
                process_group=together.group,
                no_dist=together.is_alone,
            )
    finally:
        secret.forget()
    recorded.add(recorded.READ, info.anchor)
    return info


def load_all(
    path: str | os.PathLike[str],
    *,
    key: Key,
    anchor: Anchor | None = None,
    storage: Storage | None = None,
    threads: int = DEFAULT_THREADS,
    progress: Progress = unseen,
) -> tuple[dict[str, Any], Info]:
    """Load a whole checkpoint into host memory, in this process alone, without a state to load into.

    `progress` is that of `verify`. Returns the nested state, with the keys and the empty dicts that it was saved with, and what
    the index says. Dicts are plain ones, ordered by names. Raises CheckpointError.
    """
    place = os.fspath(path)
    where = storage or storage_for(place)
    found = open_index(where, place, key_wrap.wrapper_of(key), anchor)
    try:
        note = nested_keys.noted(found.index.metadata)
        items = _empty_items(found.index)
        with ranks.converted(f"loading {place}"):
            dcp.load(
                items,
                storage_reader=SealedReader(where, place, found.index, found.data_key, threads, progress),
                planner=SealedLoadPlanner(),
                no_dist=True,
            )
    finally:
        found.data_key.forget()
    state: dict[str, Any] = {}
    for item in found.index.items:
        set_element(state, item.path, items[name_of(item.path)])
    note.add_empty(state)
    note.restore_integers(state)
    recorded.add(recorded.READ, found.info.anchor)
    return state, found.info


def _empty_items(found: Index) -> dict[str, Any]:
    """Return all items of an index by name, with tensors that are not initialised.

    A nested state would not do: DCP does not take each apart as it took apart the one that was saved.
    """
    return {
        name: torch.empty(item.shape, dtype=getattr(torch, item.dtype)) if isinstance(item, TensorItem) else None
        for name, item in found.by_name.items()
    }
