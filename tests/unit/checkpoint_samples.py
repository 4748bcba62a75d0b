"""Checkpoints for tests: a key file, a small state, indices."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from ringfence import checkpoint
from ringfence.checkpoint.index import Chunk, Index, Item, Shard, StoredBytes, TensorItem, ValueItem, name_of
from ringfence.checkpoint.storage import Input, Output
from ringfence.config.private_files import new_secret_file
from ringfence.errors import CheckpointError


def key_file(folder: Path, name: str = "key") -> str:
    """Write a new key file."""
    new_secret_file(folder / name)
    return str(folder / name)


def saved_and_loaded(folder: Path, key: str, state: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """Save a state and load it into another one, which is returned."""
    checkpoint.save(state, folder / "saved", key=key)
    checkpoint.load(target, folder / "saved", key=key)
    return target


def small_state(value: float = 1.0) -> dict[str, Any]:
    """Tensors of more than one segment, and values of several types."""
    return {
        "model": {"weight": torch.full((700, 300), value), "bias": torch.full((5,), value, dtype=torch.bfloat16)},
        "moments": [torch.full((300, 700), value + 1), torch.tensor(value)],
        "group": {"betas": (0.9, 0.999), "lr": 1e-3 * value, "name": "adam", "raw": b"\0\1", "none": None},
    }


def empty_state() -> dict[str, Any]:
    """A state to load `small_state` into."""
    return {
        "model": {"weight": torch.zeros(700, 300), "bias": torch.zeros(5, dtype=torch.bfloat16)},
        "moments": [torch.zeros(300, 700), torch.tensor(0.0)],
        "group": {"betas": (), "lr": 0.0, "name": "", "raw": b"", "none": 0},
    }


def is_same(left: Any, right: Any) -> bool:
    """Compare states, tensors element by element."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(is_same(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return isinstance(right, list) and len(left) == len(right) and all(map(is_same, left, right))
    return bool(left == right) and type(left) is type(right)


class MemoryFile(Output, Input):
    """A file in memory."""

    def __init__(self, content: bytes = b"") -> None:
        self._file, self._lock = io.BytesIO(content), threading.Lock()
        self.size = len(content)

    def write_at(self, data: memoryview, offset: int) -> None:
        with self._lock:
            self._file.seek(offset)
            self._file.write(data)

    def read_at(self, target: memoryview, offset: int) -> None:
        with self._lock:
            self._file.seek(offset)
            if self._file.readinto(target) != len(target):
                raise CheckpointError("too short")

    def finish(self) -> None:
        self.size = len(self.content)

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def content(self) -> bytes:
        return self._file.getvalue()


# -- for hypothesis ---------------------------------------------------------------------------------------------------

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"), max_size=8)
    | st.binary(max_size=8)
)
KEYS = st.text(st.characters(codec="utf-8"), max_size=8) | st.integers()
VALUES = st.recursive(
    LEAVES,
    lambda each: (
        st.lists(each, max_size=4) | st.lists(each, max_size=4).map(tuple) | st.dictionaries(KEYS, each, max_size=4)
    ),
    max_leaves=12,
)
PATHS = st.tuples(st.text(st.characters(codec="utf-8"), max_size=6)).flatmap(
    lambda first: st.lists(st.integers(0, 99) | st.text("abc", max_size=3), max_size=2).map(
        lambda rest: (*first, *rest)
    )
)


@st.composite
def indices(draw: st.DrawFn) -> Index:
    """An index as a save makes it, with tensors that are cut along the first dimension."""
    identifiers = st.binary(min_size=16, max_size=16)
    shards = draw(st.lists(identifiers, min_size=1, max_size=3, unique=True))
    size = 1 << 20
    items: list[Item] = []
    for path in draw(st.lists(PATHS, max_size=4, unique_by=name_of)):
        places = st.tuples(st.integers(0, len(shards) - 1), st.integers(0, 1000))
        if draw(st.booleans()):
            items.append(ValueItem(path, StoredBytes(*draw(places), draw(st.integers(1, 1000)))))
            continue
        rows = draw(st.lists(st.integers(1, 5), max_size=3))
        chunks = []
        for number, count in enumerate(rows):
            shard, offset = draw(places)
            chunks.append(Chunk((sum(rows[:number]), 0), (count, 3), StoredBytes(shard, offset, count * 3 * 4)))
        items.append(TensorItem(path, "float32", (sum(rows), 3), tuple(chunks)))
    items.sort(key=lambda item: name_of(item.path))
    notes = draw(st.dictionaries(st.text("abc", max_size=3), LEAVES, max_size=2))
    step = draw(st.none() | st.integers(0, 2**63 - 1))
    head = draw(st.just(b"") | st.binary(min_size=32, max_size=32))
    return Index(draw(identifiers), tuple(Shard(each, size) for each in shards), tuple(items), step, notes, head)
