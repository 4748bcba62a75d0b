"""`ringfence checkpoint convert`: the whole state in host memory, from one form to another. Needs torch."""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import warnings
from collections.abc import Callable
from typing import Any, Final, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ringfence import checkpoint
from ringfence.checkpoint import Info, Key, nested_keys
from ringfence.checkpoint.storage import INDEX_NAME
from ringfence.cli.terminal import Progress
from ringfence.config.private_files import sync_folder
from ringfence.errors import CheckpointError, ConfigurationError

Form = Literal["sealed", "dcp", "torch"]
_TITLES: Final = {"sealed": "sealed", "dcp": "plain DCP", "torch": "torch.save"}


def convert(wanted: argparse.Namespace, key: Key | None, new_key: Key | None) -> dict[str, Any]:
    """Convert a checkpoint. `wanted` are the command's options; `key` opens the source, `new_key` seals the destination.

    Returns what is printed; for plain DCP also the names of the dicts that it does not hold as they are. Raises CheckpointError
    or ConfigurationError.
    """
    form = form_of(wanted.source)
    _check(wanted, form, key, new_key)
    state, info = _load(wanted, form, key)
    done: dict[str, Any] = {
        "source": wanted.source,
        "destination": wanted.destination,
        "from": _TITLES[form],
        "to": _TITLES[wanted.to],
    }
    if wanted.to == "sealed":
        assert new_key is not None
        done["anchor"] = _seal(wanted, new_key, state, info)
    elif wanted.to == "dcp":
        note = nested_keys.note_of(state)
        _write_new(wanted.destination, state, _write_dcp)
        lost = {"integer_keys": note.integers, "empty_dicts": note.empty}
        done |= {what: sorted(".".join(map(str, path)) for path in paths) for what, paths in lost.items() if paths}
    else:
        _write_new(wanted.destination, state, _write_torch)
    return done


def form_of(source: str) -> Form:
    """Return what a path or URL holds. Raises CheckpointError."""
    if "://" in source or os.path.isfile(os.path.join(source, INDEX_NAME)):
        return "sealed"
    if os.path.isfile(os.path.join(source, ".metadata")):
        return "dcp"
    if os.path.isfile(source):
        return "torch"
    raise CheckpointError(
        f"{source} is no checkpoint: it is neither a folder with an index (sealed) or .metadata (plain DCP) nor a file"
    )


def _check(wanted: argparse.Namespace, form: Form, key: Key | None, new_key: Key | None) -> None:
    """Refuse what cannot work before anything is read."""
    if form == "sealed" and key is None:
        raise ConfigurationError(f"{wanted.source} is sealed: give its key with --key")
    if form != "sealed" and key is not None:  # the owner of the storage may have put it there
        raise CheckpointError(
            f"{wanted.source} is {_TITLES[form]} and not sealed, as --key says; to seal a plain checkpoint, give "
            "--new-key and no --key"
        )
    if wanted.to == "sealed" and new_key is None:
        raise ConfigurationError(
            "--to sealed needs a key: give it with --new-key, and make one with `ringfence secret new`"
        )
    if form != "sealed" and wanted.anchor is not None:
        raise ConfigurationError(f"--anchor applies to a sealed source, and {wanted.source} is {_TITLES[form]}")
    if wanted.to != "sealed" and wanted.step is not None:
        raise ConfigurationError(f"--step applies to --to sealed: {_TITLES[wanted.to]} has no step")
    if form == "dcp" and not wanted.trust_pickle:
        raise ConfigurationError(
            f"{wanted.source} is plain DCP: its .metadata and its items that are not tensors are pickled, so reading it "
            "runs whatever code is in it. Give --trust-pickle if nobody else could write to it"
        )
    if wanted.to != "sealed":
        if "://" in wanted.destination:
            raise ConfigurationError(f"{wanted.destination}: plain checkpoints are written to local paths only")
        if os.path.lexists(wanted.destination):
            raise ConfigurationError(f"{wanted.destination} exists, and is not overwritten: name a new path")


# -- reading ----------------------------------------------------------------------------------------------------------


def _load(wanted: argparse.Namespace, form: Form, key: Key | None) -> tuple[dict[str, Any], Info | None]:
    if form == "sealed":
        assert key is not None
        opened = checkpoint.inspect(wanted.source, key=key, anchor=wanted.anchor)
        with Progress("opening", opened.info.size) as progress:
            # the digest: nobody replaces the index between the two calls
            state, info = checkpoint.load_all(
                wanted.source,
                key=key,
                anchor=opened.info.anchor,
                threads=wanted.threads,
                progress=progress.add,
            )
        return state, info
    found: Any = _load_dcp(wanted.source) if form == "dcp" else _load_torch(wanted.source)
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found):
        raise CheckpointError(
            f"{wanted.source} holds a {type(found).__name__} and no state: a dict whose keys are texts, not empty"
        )
    return found, None


def _load_torch(source: str) -> Any:
    """Load a file of torch.save. Only tensors and plain values: weights_only runs no code from the file."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # of other files it raises anything: IndexError, struct.error, ...
        reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        raise CheckpointError(
            f"{source} is no file of torch.save with tensors and plain values only, and nothing else is read: {reason}"
        ) from error


def _load_dcp(source: str) -> dict[str, Any]:
    """Load plain DCP, of any number of ranks. This unpickles."""
    state: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _load_state_dict(
                state,
                storage_reader=dcp.FileSystemReader(source),
                planner=_EmptyStateDictLoadPlanner(),
                no_dist=True,
            )
    except (Exception, dcp.api.CheckpointException) as error:
        raise CheckpointError(f"{source} cannot be read as plain DCP: {type(error).__name__}: {error}") from error
    return state


# -- writing ----------------------------------------------------------------------------------------------------------


def _seal(wanted: argparse.Namespace, key: Key, state: dict[str, Any], info: Info | None) -> str:
    step = wanted.step if wanted.step is not None or info is None else info.step
    with Progress("sealing", _tensor_bytes(state)) as progress:
        return checkpoint.save(
            state,
            wanted.destination,
            key=key,
            step=step,
            metadata=None if info is None else info.metadata,
            threads=wanted.threads,
            progress=progress.add,
        )


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.nbytes)
    if isinstance(value, dict):
        return sum(map(_tensor_bytes, value.values()))
    return sum(map(_tensor_bytes, value)) if isinstance(value, list | tuple) else 0


def _write_new(path: str, state: dict[str, Any], write: Callable[[str, dict[str, Any]], None]) -> None:
    """Write under another name and rename, so that there is all of it or nothing."""
    temporary = f"{os.path.abspath(path)}.partial-{secrets.token_hex(8)}"
    try:
        write(temporary, state)
        if os.path.lexists(path):
            raise ConfigurationError(f"{path} exists by now, and is not overwritten: name a new path")
        os.rename(temporary, path)
        sync_folder(os.path.dirname(os.path.abspath(path)))
    except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigurationError(f"cannot write {path}: {said}") from error
    finally:
        if os.path.isdir(temporary):
            shutil.rmtree(temporary, ignore_errors=True)
        elif os.path.lexists(temporary):
            os.unlink(temporary)


def _write_torch(path: str, state: dict[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(descriptor)


def _write_dcp(path: str, state: dict[str, Any]) -> None:
    os.mkdir(path, 0o700)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True), no_dist=True)
