"""`save` and `async_save`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NoReturn

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

from ringfence.checkpoint import ranks, recorded, values
from ringfence.checkpoint.folder import LocalStorage, storage_for
from ringfence.checkpoint.key_wrap import Key
from ringfence.checkpoint.planners import Refusal, SealedSavePlanner
from ringfence.checkpoint.ranks import Ranks
from ringfence.checkpoint.storage import Storage
from ringfence.checkpoint.streams import DEFAULT_THREADS, Progress, unseen
from ringfence.checkpoint.writer import SealedWriter
from ringfence.errors import CheckpointError

_STEP_LIMIT = 1 << 63


def save(
    state: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    key: Key,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
    process_group: Any = None,
    threads: int = DEFAULT_THREADS,
    progress: Progress = unseen,
) -> str:
    """Save a state as a sealed checkpoint. All ranks call it together; each writes the tensors or shards that it holds.

    A fresh data key is drawn for each save and wrapped with `key`. Rank 0 sends it to the others in DCP's plan, over the
    process group, which must therefore be ringfence's. The checkpoint appears at `path` as a whole when it is on disk, or not
    at all; an existing one is never overwritten.

    Args:
        state: As for `torch.distributed.checkpoint.save`: nested dicts and lists of tensors, DTensors, numbers, texts, bytes
            and None, or objects with `state_dict` and `load_state_dict`. Nothing is pickled.
        path: The folder to create, on storage that all ranks see.
        key: The path of a key file (`ringfence secret new FILE`), or a `KeyWrapper`. Only rank 0 uses it.
        step: The number of the training step, to recognise the checkpoint by.
        metadata: Values to store in the index, such as a configuration.
        storage: Where paths are; by default a file system of this machine.
        process_group: The ranks that save; by default all.
        threads: How many threads of each rank seal.
        progress: Called with the number of bytes that this rank has sealed since the last call, in any thread.

    Returns:
        The anchor, a digest of the index, on every rank. Keep it outside of the storage and pass it to `load`: nothing on the
        storage itself tells the newest checkpoint from an older one that was put in its place.

    Raises:
        CheckpointError: On every rank, if any of them fails.
        ValueError: An argument is invalid, and this process is alone.
    """
    together = Ranks.of(process_group)
    try:
        values_of_state, writer = _prepared(state, path, key, step, metadata, storage, threads, progress)
    except Exception as error:
        _refuse(together, path, error)
    try:
        with ranks.converted(f"saving {path}"):
            found = dcp.save(
                values_of_state,
                storage_writer=writer,
                planner=SealedSavePlanner(),
                process_group=together.group,
                no_dist=together.is_alone,
            )
    finally:
        writer.discard()
    recorded.add(recorded.WRITTEN, str(found.storage_data))
    return str(found.storage_data)


def async_save(
    state: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    key: Key,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
    process_group: Any = None,
    threads: int = DEFAULT_THREADS,
) -> Future[str]:
    """Save a state in the background: copy it to host memory, return, and seal and write it in a thread.

    Arguments are those of `save`. Wait for one save before the next begins.

    Args:
        process_group: The ranks that save. Their collectives run beside those of the training, so the group must not be
            used by anything else. By default a group of all ranks is created at the first call.

    Returns:
        A future of the anchor. Its exception is a CheckpointError on every rank, if any of them fails.

    Raises:
        CheckpointError: The process group is not ringfence's; or, on the rank where it is so and in the futures of the
            others, an argument is invalid or the state cannot be copied.
        ValueError: An argument is invalid, and this process is alone.
    """
    together = Ranks.of(process_group)
    if not together.is_alone and process_group is None:
        together = Ranks.of(_background_group())
    try:
        values_of_state, writer = _prepared(state, path, key, step, metadata, storage, threads)
        saved = dcp.async_save(
            values_of_state,
            storage_writer=writer,
            planner=SealedSavePlanner(),
            process_group=together.group,
            no_dist=together.is_alone,
        )
    except Exception as error:
        _refuse(together, path, error)
    anchor: Future[str] = Future()
    anchor.set_running_or_notify_cancel()

    def finish(done: Future[Any]) -> None:
        try:
            writer.discard()
            found = str(done.result().storage_data)
            recorded.add(recorded.WRITTEN, found)
            anchor.set_result(found)
        except CheckpointException as error:
            anchor.set_exception(ranks.error_of(f"saving {path}", error))
        except BaseException as error:
            anchor.set_exception(error)

    saved.add_done_callback(finish)
    return anchor


def _prepared(
    state: dict[str, Any],
    path: str | os.PathLike[str],
    key: Key,
    step: int | None,
    metadata: Mapping[str, Any] | None,
    storage: Storage | None,
    threads: int,
    progress: Progress = unseen,
) -> tuple[dict[str, Any], SealedWriter]:
    """Check the arguments and ask objects for their state, before this rank waits for another."""
    if not isinstance(state, dict) or not state:
        raise ValueError("state must be a dict that is not empty")
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < _STEP_LIMIT):
        raise ValueError(f"step must be a number from 0 on, not {step!r}")
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    notes = dict(metadata or {})
    if not all(isinstance(name, str) for name in notes):
        raise CheckpointError("the keys of metadata must be texts")
    notes = values.decode(values.encode(notes, "metadata"))  # a copy: the caller may change its own while this is saved
    target = os.fspath(path)
    writer = SealedWriter(storage or storage_for(target), target, key, step, notes, threads, progress)
    return {name: each.state_dict() if isinstance(each, Stateful) else each for name, each in state.items()}, writer


def _refuse(together: Ranks, path: str | os.PathLike[str], reason: Exception) -> NoReturn:
    """Raise why this rank cannot save. The others wait for its part of the plan: tell them instead."""
    if together.is_alone:
        raise reason
    unused = SealedWriter(LocalStorage(), "", "", None, {}, 1)
    with ranks.converted(f"saving {path}"):
        dcp.save({}, storage_writer=unused, planner=Refusal(reason), process_group=together.group)
    raise reason


_background: tuple[Any, Any] | None = None  # the default group and the group that saves in the background


def _background_group() -> Any:
    """Return a group of all ranks for the collectives of the saving thread; a collective call when it is created."""
    global _background
    if _background is None or _background[0] is not dist.group.WORLD:
        _background = dist.group.WORLD, dist.new_group()
    return _background[1]
