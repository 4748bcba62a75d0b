"""An object store that loses, cuts, swaps or changes objects of a checkpoint: every load is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringfence import checkpoint
from ringfence.errors import CheckpointError
from tests.object_stores import ObjectStore, for_each_store, opened
from tests.unit.checkpoint_samples import empty_state, is_same, key_file, small_state

Attack = Callable[
    [ObjectStore, str, str], None
]  # of a store, on the objects at a path; another checkpoint is at the third


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for_each_store(metafunc)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    with opened(request.param, tmp_path) as found:
        yield found


def index_of(store: ObjectStore, path: str) -> str:
    return next(name for name in store.names(path) if name.endswith("index"))


def shard_of(store: ObjectStore, path: str) -> str:
    return next(name for name in store.names(path) if name.endswith(".shard"))


def cut(store: ObjectStore, name: str, length: int) -> None:
    content = store.system.cat_file(name)
    store.system.pipe_file(name, content[:length])


def flip(store: ObjectStore, name: str) -> None:
    content = bytearray(store.system.cat_file(name))
    place = random.Random(len(content)).randrange(len(content))
    content[place] ^= 1
    store.system.pipe_file(name, bytes(content))


ATTACKS: dict[str, Attack] = {
    "no index": lambda store, path, _: store.system.rm_file(index_of(store, path)),
    "an empty index": lambda store, path, _: cut(store, index_of(store, path), 0),
    "half an index": lambda store, path, _: cut(store, index_of(store, path), 100),
    "an index cut by a byte": lambda store, path, _: cut(store, index_of(store, path), -1),
    "a changed index": lambda store, path, _: flip(store, index_of(store, path)),
    "the index of another save": lambda store, path, other: store.system.pipe_file(
        index_of(store, path), store.system.cat_file(index_of(store, other))
    ),
    "no shard": lambda store, path, _: store.system.rm_file(shard_of(store, path)),
    "an empty shard": lambda store, path, _: cut(store, shard_of(store, path), 0),
    "a shard without its last segment": lambda store, path, _: cut(store, shard_of(store, path), 1 << 20),
    "a shard cut by a byte": lambda store, path, _: cut(store, shard_of(store, path), -1),
    "a changed shard": lambda store, path, _: flip(store, shard_of(store, path)),
    "the shard of another save": lambda store, path, other: store.system.pipe_file(
        shard_of(store, path), store.system.cat_file(shard_of(store, other))
    ),
}


@pytest.mark.promise(
    "An object store that loses, cuts, swaps or changes objects of a checkpoint makes every load fail."
)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_changed_object_is_refused(store: ObjectStore, tmp_path: Path, attack: str) -> None:
    key, path, other = key_file(tmp_path), f"{store.url}/one", f"{store.url}/other"
    for place, value in ((path, 1.0), (other, 2.0)):
        checkpoint.save(small_state(value), place, key=key, storage=store.storage)
    ATTACKS[attack](store, path, other)
    with pytest.raises(CheckpointError):
        checkpoint.load(empty_state(), path, key=key, storage=store.storage)
    with pytest.raises(CheckpointError):
        checkpoint.verify(path, key=key, storage=store.storage)
    state = empty_state()
    checkpoint.load(state, other, key=key, storage=store.storage)
    assert is_same(state, small_state(2.0))


@pytest.mark.promise("An older checkpoint in place of a newer one is refused, if the caller has its anchor.")
def test_an_older_checkpoint_in_place_of_the_newest_is_refused_by_an_anchor(store: ObjectStore, tmp_path: Path) -> None:
    key, old, new = key_file(tmp_path), f"{store.url}/old", f"{store.url}/new"
    checkpoint.save(small_state(1.0), old, key=key, step=1, storage=store.storage)
    anchor = checkpoint.save(small_state(2.0), new, key=key, step=2, storage=store.storage)
    for name in store.names(new):
        store.system.rm_file(name)
    for name in store.names(old):
        store.system.pipe_file(f"{new}/{name.rpartition('/')[2]}", store.system.cat_file(name))
    for expected in (anchor, 2):
        with pytest.raises(CheckpointError, match="for example by an older one"):
            checkpoint.load(empty_state(), new, key=key, anchor=expected, storage=store.storage)
    checkpoint.load(empty_state(), new, key=key, storage=store.storage)  # authentic, and not the newest
