"""What `ringfence checkpoint` prints: as text for people, as JSON for programs."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from ringfence.admission.encoding import escape
from ringfence.checkpoint import Info, Opened, envelope
from ringfence.checkpoint.folder import storage_for
from ringfence.checkpoint.index import ITEM_BYTES, Item, TensorItem, name_of
from ringfence.checkpoint.storage import INDEX_NAME
from ringfence.cli.terminal import size_text, table, wrap
from ringfence.errors import CheckpointError, ProtocolError

_LONGEST = 60  # characters of a name or value in a table


# -- without a key ----------------------------------------------------------------------------------------------------


def clear_json(path: str) -> dict[str, Any]:
    """Read the header of an index, and the sizes of the files. Nothing of it is verified. Raises CheckpointError."""
    storage = storage_for(path)
    names = storage.names(path)
    if INDEX_NAME not in names:
        raise CheckpointError(f"{path} has no index: it is not a sealed checkpoint, or not a complete one")
    with contextlib.closing(storage.open(path, INDEX_NAME)) as file:
        try:
            header, _ = envelope.parse(file.read(envelope.LIMIT))
        except ProtocolError as error:
            raise CheckpointError(f"the index of {path} is refused: {error}") from error
    sizes = {}
    for name in names:
        with contextlib.closing(storage.open(path, name)) as file:
            sizes[name] = file.size
    return {"path": path, "verified": False, "key": header.key_name, "save_id": header.id.hex(), "files": sizes}


def clear_text(clear: dict[str, Any]) -> str:
    rows = [["file", "sealed size"], *([_shown(name), size_text(size)] for name, size in clear["files"].items())]
    note = "Nothing of this is verified. Give --key to verify the index and to print what it contains."
    facts = _facts({"key": clear["key"], "save": clear["save_id"]})
    return "\n".join([wrap(f"{clear['path']}: a sealed checkpoint"), facts, "", table(rows), "", wrap(note)])


# -- with one ---------------------------------------------------------------------------------------------------------


def info_json(info: Info) -> dict[str, Any]:
    return {
        "path": info.path,
        "verified": True,
        "key": info.key_name,
        "save_id": info.save_id,
        "step": info.step,
        "metadata": _plain(info.metadata),
        "anchor": info.anchor,
        "bytes": info.size,
        "items": info.items,
        "shards": info.shards,
    }


def index_json(found: Opened) -> dict[str, Any]:
    items = [
        {
            "name": name_of(item.path),
            "dtype": item.dtype if isinstance(item, TensorItem) else None,
            "shape": list(item.shape) if isinstance(item, TensorItem) else None,
            "bytes": _bytes(item),
            "chunks": len(item.chunks) if isinstance(item, TensorItem) else 1,
        }
        for item in found.index.items
    ]
    shards = [{"file": shard.name, "bytes": shard.size} for shard in found.index.shards]
    return info_json(found.info) | {"items": items, "shards": shards}


def verified_text(info: Info, is_expected: bool) -> str:
    lines = [wrap(f"{info.path}: every byte is authentic ({_amount(info)})."), _summary(info)]
    if not is_expected:
        note = "Whether this is the newest checkpoint, only --anchor tells: give what save() returned, or the step."
        lines += ["", wrap(note)]
    return "\n".join(lines)


def index_text(found: Opened) -> str:
    info = found.info
    items = [["item", "dtype", "shape", "size"], *(_row(item) for item in found.index.items)]
    shards = [["shard", "size"], *([shard.name, size_text(shard.size)] for shard in found.index.shards)]
    lines = [wrap(f"{info.path}: a sealed checkpoint ({_amount(info)}). Its index is authentic."), _summary(info)]
    if info.metadata:
        rows = [["metadata", "value"], *([_shown(name), _shown(repr(value))] for name, value in info.metadata.items())]
        lines += ["", table(rows)]
    return "\n".join([*lines, "", table(items), "", table(shards)])


def _row(item: Item) -> list[str]:
    if not isinstance(item, TensorItem):
        return [_shown(name_of(item.path)), "value", "", size_text(_bytes(item))]
    return [_shown(name_of(item.path)), item.dtype, str(list(item.shape)), size_text(_bytes(item))]


def _bytes(item: Item) -> int:
    return math.prod(item.shape) * ITEM_BYTES[item.dtype] if isinstance(item, TensorItem) else item.place.length


def _summary(info: Info) -> str:
    step = {} if info.step is None else {"step": str(info.step)}
    return _facts({**step, "anchor": info.anchor, "key": info.key_name, "save": info.save_id})


def _facts(facts: dict[str, str]) -> str:
    """Lines of a name and a value; a long value is never broken, so that it can be copied."""
    return "\n".join(f"  {name:<6}  {value}" for name, value in facts.items())


def _amount(info: Info) -> str:
    items, shards = f"{info.items} item{'s' * (info.items != 1)}", f"{info.shards} shard{'s' * (info.shards != 1)}"
    return f"{items}, {shards}, {size_text(info.size)}"


def _shown(text: str) -> str:
    """Return a text of the checkpoint as a terminal may have it: no control characters, and not too long."""
    return escape(text, _LONGEST)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: bytes as hexadecimal digits, keys as texts."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
