"""Someone who controls the storage changes, cuts, mixes and replaces checkpoints, and offers pickles."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ringfence import checkpoint
from ringfence.checkpoint import key_wrap, streams
from ringfence.checkpoint.envelope import EnvelopeKind, shard_data
from ringfence.checkpoint.folder import LocalStorage
from ringfence.checkpoint.index import Chunk, Index, Shard, StoredBytes, TensorItem
from ringfence.checkpoint.storage import INDEX_NAME, Input
from ringfence.checkpoint.streams import SealingThreads, StreamWriter
from ringfence.checkpoint.tensors import memory_of
from ringfence.errors import CheckpointError, ConfigurationError
from tests.attack import checkpoint_attacks
from tests.unit.checkpoint_samples import empty_state, is_same, key_file, small_state

ATTACKS = 10_000


@pytest.fixture
def key(tmp_path: Path) -> str:
    return key_file(tmp_path)


@pytest.mark.promise("No change to a sealed checkpoint on storage loads a wrong number.")
def test_changed_checkpoints_are_refused(tmp_path: Path, full: bool) -> None:
    (tmp_path / "attacks").mkdir()
    count = ATTACKS if full else 330
    refused = checkpoint_attacks.run(tmp_path / "attacks", count)
    assert set(refused) == {attack.__name__ for attack in checkpoint_attacks.ATTACKS}
    assert sum(refused.values()) > 0.97 * count  # the others changed nothing


def save_of_two_ranks(path: Path, key: str) -> list[Path]:
    """Save a tensor as two ranks do, a half of it in a shard each; return the files of the shards."""
    storage, halves = LocalStorage(), (torch.full((4,), 1.0), torch.full((4,), 2.0))
    data_key, header = key_wrap.new_data_key(key_wrap.wrapper_of(key), EnvelopeKind.INDEX)
    place = storage.begin(str(path))
    shards = tuple(Shard(bytes([rank + 1]) * 16, half.nbytes) for rank, half in enumerate(halves))
    with SealingThreads(1) as threads:
        for shard, half in zip(shards, halves, strict=True):
            output = storage.create(place, shard.name, streams.sealed_size(shard.size))
            stream = StreamWriter(output, data_key, shard_data(header.id, shard.id), threads)
            stream.write(memory_of(half))
            stream.finish()
    chunks = tuple(Chunk((4 * rank,), (4,), StoredBytes(rank, 0, shard.size)) for rank, shard in enumerate(shards))
    index = Index(header.id, shards, (TensorItem(("weight",), "float32", (8,), chunks),))
    content = header.encode() + streams.seal(data_key, header.associated_data, index.encode())
    output = storage.create(place, INDEX_NAME, len(content))
    output.write_at(memoryview(content), 0)
    output.finish()
    storage.publish(place, str(path))
    return [path / shard.name for shard in shards]


def test_shards_of_one_save_cannot_be_exchanged_or_repeated(tmp_path: Path, key: str) -> None:
    """They have the same key and the same size."""
    path, state = tmp_path / "checkpoint", {"weight": torch.zeros(8)}
    first, second = save_of_two_ranks(path, key)
    checkpoint.load(state, path, key=key)
    assert state["weight"].tolist() == [1.0] * 4 + [2.0] * 4
    one, two = first.read_bytes(), second.read_bytes()
    for contents in ((two, one), (one, one)):
        first.write_bytes(contents[0])
        second.write_bytes(contents[1])
        with pytest.raises(CheckpointError, match="does not authenticate"):
            checkpoint.load({"weight": torch.zeros(8)}, path, key=key)
        with pytest.raises(CheckpointError, match="does not authenticate"):
            checkpoint.verify(path, key=key)


@pytest.mark.promise("An older checkpoint in place of a newer one is refused, if the caller has its anchor.")
def test_an_older_folder_is_refused_by_anchor_only(tmp_path: Path, key: str) -> None:
    path, older = tmp_path / "newest", tmp_path / "older"
    checkpoint.save(small_state(1.0), older, key=key, step=1)
    anchor = checkpoint.save(small_state(2.0), path, key=key, step=2)
    checkpoint.load(empty_state(), path, key=key, anchor=anchor)
    checkpoint.load(empty_state(), path, key=key, anchor=2)
    shutil.rmtree(path)
    shutil.copytree(older, path)
    for expected in (anchor, 2, anchor.upper(), ""):
        with pytest.raises(CheckpointError, match="is expected"):
            checkpoint.load(empty_state(), path, key=key, anchor=expected)
    state = empty_state()
    checkpoint.load(state, path, key=key)  # without an anchor nothing tells it from the newest one
    assert is_same(state, small_state(1.0))


def test_two_saves_of_one_state_have_different_anchors_and_keys(tmp_path: Path, key: str) -> None:
    first = checkpoint.save(small_state(), tmp_path / "first", key=key, step=1)
    second = checkpoint.save(small_state(), tmp_path / "second", key=key, step=1)
    assert first != second
    opened = [checkpoint.inspect(tmp_path / name, key=key) for name in ("first", "second")]
    assert opened[0].data_key != opened[1].data_key


@pytest.mark.promise("A sealed checkpoint shows its storage no tensor, value or name.")
def test_nothing_of_the_state_is_readable(tmp_path: Path, key: str) -> None:
    mark = b"a sentence that is easy to find"
    values = torch.frombuffer(bytearray(mark * 100), dtype=torch.uint8)
    state = {"secretly.named": values, "text": mark.decode(), "raw": {"bytes": mark}}
    checkpoint.save(state, tmp_path / "saved", key=key, step=123456, metadata={"note": mark.decode()})
    found = b"".join(file.read_bytes() for file in (tmp_path / "saved").iterdir())
    assert mark not in found and b"secretly" not in found and (123456).to_bytes(8, "big") not in found


class Runs:
    """Runs code when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._file),)


@pytest.mark.promise("Loading a sealed checkpoint unpickles nothing.")
def test_pickles_in_place_of_any_file_do_not_run(tmp_path: Path, key: str) -> None:
    path, ran = tmp_path / "saved", tmp_path / "ran"
    checkpoint.save(small_state(), path, key=key)
    names = [file.name for file in path.iterdir()]
    for name in [*names, ".metadata"]:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(path, tmp_path / "copy")
        (tmp_path / "copy" / name).write_bytes(pickle.dumps(Runs(ran)))
        if name in names:
            with pytest.raises(CheckpointError):
                checkpoint.load(empty_state(), tmp_path / "copy", key=key)
        else:
            checkpoint.load(empty_state(), tmp_path / "copy", key=key)
    assert not ran.exists()
    pickle.loads(pickle.dumps(Runs(ran)))
    assert ran.exists(), "the pickle would not have run"


def test_a_plain_checkpoint_is_refused(tmp_path: Path, key: str) -> None:
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    with pytest.raises(CheckpointError, match="not a sealed checkpoint"):
        checkpoint.load({"weight": torch.zeros(3)}, tmp_path / "plain", key=key)


@pytest.mark.promise("No change to a sealed checkpoint on storage loads a wrong number.")
def test_a_fifo_in_place_of_any_file_is_refused(tmp_path: Path, key: str) -> None:
    """It must not wait for a writer either: pytest's limit would end it."""
    path = tmp_path / "saved"
    checkpoint.save(small_state(), path, key=key)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(
            CheckpointError, match=rf"{file.name}.* not a (regular file|sealed checkpoint)|no checkpoint"
        ):
            checkpoint.load(empty_state(), path, key=key)
        file.unlink()
        file.write_bytes(content)
    checkpoint.load(empty_state(), path, key=key)


class Swapping(LocalStorage):
    """Shows a forged checkpoint from the second time on that an index is opened."""

    def __init__(self, forged: Path) -> None:
        self._forged = forged
        self._opened = 0

    def open(self, path: str, name: str) -> Input:
        self._opened += name == INDEX_NAME
        return super().open(path if self._opened <= 1 else str(self._forged), name)


@pytest.mark.promise("An older checkpoint in place of a newer one is refused, if the caller has its anchor.")
def test_rewrap_writes_the_index_that_it_verified(tmp_path: Path, key: str) -> None:
    """The attacker has the old key, which is why it is replaced, and swaps the folder after the anchor was compared."""
    path, forged, new = tmp_path / "saved", tmp_path / "forged", key_file(tmp_path, "new")
    anchor = checkpoint.save(small_state(1.0), path, key=key, step=7)
    checkpoint.save(small_state(666.0), forged, key=key, step=7)
    checkpoint.rewrap(path, key=key, new_key=new, anchor=anchor, storage=Swapping(forged))
    assert checkpoint.inspect(path, key=new).info.anchor == anchor


@pytest.mark.promise("A checkpoint opens only with the key that wraps its data key.")
def test_other_keys_are_refused(tmp_path: Path, key: str) -> None:
    path, other = tmp_path / "saved", key_file(tmp_path, "other")
    checkpoint.save(small_state(), path, key=key)
    with pytest.raises(CheckpointError, match="is wrapped with the key file:"):
        checkpoint.load(empty_state(), path, key=other)

    class Renamed(key_wrap.KeyFile):
        """Another key that claims the name of the right one."""

        name = key_wrap.KeyFile(key).name

    with pytest.raises(CheckpointError, match="does not authenticate"):
        checkpoint.load(empty_state(), path, key=Renamed(other))
    os.chmod(key, 0o644)
    with pytest.raises(CheckpointError, match="chmod 600"):
        checkpoint.load(empty_state(), path, key=key)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        checkpoint.verify(path, key=key)


def test_a_wrapped_key_of_another_save_is_refused(tmp_path: Path, key: str) -> None:
    checkpoint.save(small_state(), tmp_path / "one", key=key)
    checkpoint.save(small_state(), tmp_path / "two", key=key)
    wrapper = key_wrap.wrapper_of(key)
    one, two = (checkpoint.inspect(tmp_path / name, key=key).envelope for name in ("one", "two"))
    with pytest.raises(CheckpointError, match="does not authenticate"):
        wrapper.unwrap(one.wrapped, two.context)


def test_a_service_that_does_not_encrypt_is_refused(tmp_path: Path) -> None:
    class Plain:
        name = "plain"

        def wrap(self, key: bytes, context: bytes) -> bytes:
            return b"not wrapped: " + key

        def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
            return wrapped[13:]

    with pytest.raises(CheckpointError, match="does not encrypt"):
        checkpoint.save(small_state(), tmp_path / "saved", key=Plain())
    assert not os.listdir(tmp_path)


def test_an_older_wrapping_key_opens_nothing_after_a_rewrap(tmp_path: Path, key: str) -> None:
    path, new = tmp_path / "saved", key_file(tmp_path, "new")
    anchor = checkpoint.save(small_state(), path, key=key, step=4)
    checkpoint.rewrap(path, key=key, new_key=new)
    state = empty_state()
    assert checkpoint.load(state, path, key=new, anchor=anchor).step == 4
    assert is_same(state, small_state())
    with pytest.raises(CheckpointError, match="is wrapped with the key"):
        checkpoint.load(empty_state(), path, key=key)


def test_a_failed_save_leaves_nothing(tmp_path: Path, key: str) -> None:
    class Fails(checkpoint.LocalStorage):
        def publish(self, place: str, path: str) -> None:
            raise CheckpointError("the disk is full")

    with pytest.raises(CheckpointError, match="the disk is full"):
        checkpoint.save(small_state(), tmp_path / "saved", key=key, storage=Fails())
    assert os.listdir(tmp_path) == ["key"]
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="never overwritten"):
        checkpoint.save(small_state(), tmp_path / "taken", key=key)
