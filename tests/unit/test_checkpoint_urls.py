"""Checkpoints at URLs: shards first, the index last, never over another checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import checkpoint
from ringfence.checkpoint.folder import LocalStorage, storage_for
from ringfence.checkpoint.fsspec_storage import FsspecStorage
from ringfence.checkpoint.storage import INDEX_NAME, Output
from ringfence.errors import CheckpointError, ConfigurationError
from tests.object_stores import ObjectStore, for_each_store, opened
from tests.unit.checkpoint_samples import empty_state, is_same, key_file, small_state


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for_each_store(metafunc)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    with opened(request.param, tmp_path) as found:
        yield found


@pytest.fixture
def key(tmp_path: Path) -> str:
    return key_file(tmp_path)


def test_a_state_comes_back(store: ObjectStore, key: str) -> None:
    path = f"{store.url}/run/step-3"
    anchor = checkpoint.save(small_state(), path, key=key, step=3, storage=store.storage)
    state = empty_state()
    info = checkpoint.load(state, path, key=key, anchor=anchor, storage=store.storage)
    assert is_same(state, small_state())
    assert (info.step, info.path) == (3, path)
    assert len(store.names(path)) == 2
    assert checkpoint.verify(path, key=key, anchor=3, storage=store.storage).anchor == anchor


def test_a_checkpoint_is_never_overwritten(store: ObjectStore, key: str) -> None:
    path = f"{store.url}/one"
    anchor = checkpoint.save(small_state(), path, key=key, storage=store.storage)
    with pytest.raises(CheckpointError, match="exists and is a checkpoint, which is never overwritten"):
        checkpoint.save(small_state(2.0), path, key=key, storage=store.storage)
    assert checkpoint.verify(path, key=key, storage=store.storage).anchor == anchor


def test_other_files_are_kept(store: ObjectStore, key: str) -> None:
    path = f"{store.url}/one"
    if not store.url.startswith("s3"):  # which has no folders
        store.system.makedirs(path, exist_ok=True)
    store.system.pipe_file(f"{path}/notes.txt", b"precious")
    with pytest.raises(CheckpointError, match="exists and is something else"):
        checkpoint.save(small_state(), path, key=key, storage=store.storage)
    assert store.system.cat_file(f"{path}/notes.txt") == b"precious"


def test_what_a_killed_save_left_is_in_the_way_of_nothing(store: ObjectStore, key: str) -> None:
    path = f"{store.url}/one"
    output = store.storage.create(store.storage.begin(path), "0" * 32 + ".shard", 5)
    output.write_at(memoryview(b"hello"), 0)
    output.finish()
    with pytest.raises(CheckpointError, match="has no index"):
        checkpoint.verify(path, key=key, storage=store.storage)
    checkpoint.save(small_state(), path, key=key, storage=store.storage)
    assert len(store.names(path)) == 3  # nothing tells it from a shard of a running save
    checkpoint.verify(path, key=key, storage=store.storage)


def test_a_running_save_keeps_its_shards_when_another_one_begins_or_fails(store: ObjectStore, key: str) -> None:
    path = f"{store.url}/one"

    class Overlapped(FsspecStorage):
        def create(self, place: str, name: str, size: int) -> Output:
            if name == INDEX_NAME:
                other = store.storage
                other.discard(other.begin(path), ["0" * 32 + ".shard"])
            return super().create(place, name, size)

    anchor = checkpoint.save(small_state(), path, key=key, storage=Overlapped(**store.options))
    assert checkpoint.verify(path, key=key, storage=store.storage).anchor == anchor


def test_a_failing_save_removes_its_own_files_only(store: ObjectStore, key: str) -> None:
    path = f"{store.url}/one"

    class Failing(FsspecStorage):
        def create(self, place: str, name: str, size: int) -> Output:
            if name == INDEX_NAME:
                store.system.pipe_file(f"{path}/notes.txt", b"precious")
                raise OSError("no space left")
            return super().create(place, name, size)

    with pytest.raises(CheckpointError, match="no space left"):
        checkpoint.save(small_state(), path, key=key, storage=Failing(**store.options))
    assert [name.rpartition("/")[2] for name in store.names(path)] == ["notes.txt"]


def test_a_failed_save_leaves_nothing(store: ObjectStore, key: str) -> None:
    path = f"{store.url}/one"
    with pytest.raises(CheckpointError, match="cannot hold"):
        checkpoint.save({**small_state(), "bad": {1, 2}}, path, key=key, storage=store.storage)
    assert store.names(path) == []


def test_two_saves_to_one_path_do_not_mix(store: ObjectStore, key: str) -> None:
    """The second one began before the first had an index: only one index is written."""
    path = f"{store.url}/one"

    class Slow(FsspecStorage):
        def begin(self, path: str) -> str:
            place = super().begin(path)
            anchors.append(checkpoint.save(small_state(), path, key=key, storage=store.storage))
            return place

    anchors: list[str] = []
    with pytest.raises(CheckpointError, match="another save has written"):
        checkpoint.save(small_state(2.0), path, key=key, storage=Slow(**store.options))
    assert checkpoint.verify(path, key=key, storage=store.storage).anchor == anchors[0]


def test_the_key_is_replaced_in_place(store: ObjectStore, key: str, tmp_path: Path) -> None:
    path, other = f"{store.url}/one", key_file(tmp_path, "other")
    anchor = checkpoint.save(small_state(), path, key=key, storage=store.storage)
    checkpoint.rewrap(path, key=key, new_key=other, storage=store.storage)
    assert checkpoint.verify(path, key=other, storage=store.storage).anchor == anchor
    with pytest.raises(CheckpointError, match="was given"):
        checkpoint.verify(path, key=key, storage=store.storage)


def test_writes_in_any_order_make_the_file(store: ObjectStore) -> None:
    place, content = store.storage.begin(f"{store.url}/one"), random.Random(7).randbytes(1000)
    starts = list(range(0, 1000, 10))
    random.Random(1).shuffle(starts)
    output = store.storage.create(place, "x.shard", len(content))
    for start in starts:
        output.write_at(memoryview(content)[start : start + 10], start)
    output.finish()
    assert store.system.cat_file(f"{store.url}/one/x.shard") == content


def test_a_file_with_a_gap_is_not_finished(store: ObjectStore) -> None:
    place = store.storage.begin(f"{store.url}/one")
    output = store.storage.create(place, "x.shard", 20)
    output.write_at(memoryview(b"later"), 10)
    with pytest.raises(CheckpointError, match="before offset 10 was not written"):
        output.finish()
    output.abort()
    output.abort()


# -- which storage ----------------------------------------------------------------------------------------------------


def test_a_url_needs_no_storage(key: str) -> None:
    path = "memory://unit/by-default"
    anchor = checkpoint.save(small_state(), path, key=key)
    assert checkpoint.verify(path, key=key).anchor == anchor
    assert isinstance(storage_for(path), FsspecStorage)
    assert isinstance(storage_for("a/folder"), LocalStorage)


@pytest.mark.parametrize(
    ("url", "said"), [("nonsense://a/b", "not a URL that fsspec knows"), ("memory://nothing", "there is no checkpoint")]
)
def test_a_url_without_a_checkpoint_is_refused(key: str, url: str, said: str) -> None:
    with pytest.raises((CheckpointError, ConfigurationError), match=said):
        checkpoint.verify(url, key=key)


def test_what_a_file_system_raises_is_a_checkpoint_error(key: str) -> None:
    class Broken(FsspecStorage):
        def _at(self, url: str) -> tuple[Any, str]:
            raise RuntimeError("the service is down")

    with pytest.raises(CheckpointError, match="RuntimeError: the service is down"):
        checkpoint.save(small_state(), "memory://unit/broken", key=key, storage=Broken())
