"""Sealed checkpoints between processes: resharded, refused on every rank, saved in the background, killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ringfence import checkpoint
from tests.integration import checkpoint_workers as workers
from tests.limits import HANG
from tests.pool import Pool
from tests.unit.checkpoint_samples import key_file, small_state

KILLS = 200


@pytest.fixture
def key(tmp_path: Path) -> str:
    return key_file(tmp_path)


@pytest.mark.promise("A sealed checkpoint loads with the same numbers on another number of ranks.")
@pytest.mark.parametrize("in_background", [False, True], ids=["save", "async_save"])
def test_a_checkpoint_of_four_ranks_loads_on_two_and_three(
    pool: Pool, tmp_path: Path, key: str, in_background: bool
) -> None:
    """FSDP2 with AdamW, a scheduler and random states; only rank 0 has the key."""
    path = str(tmp_path / "saved")
    saved = pool.check(workers.save, world=4, args=(path, key, in_background), timeout=HANG)
    assert len(set(saved)) == 1
    anchor, digest = saved[0]
    for world in (2, 3):
        for before, after in pool.check(workers.load, world=world, args=(path, key, anchor), timeout=HANG):
            assert before != digest and after == digest
    assert sorted(os.listdir(tmp_path)) == ["key", "saved"]
    assert len(os.listdir(path)) == 5  # an index and four shards


def test_tensors_are_resharded_along_any_dimension(pool: Pool, tmp_path: Path, key: str) -> None:
    path = str(tmp_path / "saved")
    pool.check(workers.save_columns, world=3, args=(path, key))
    assert pool.check(workers.load_columns, world=2, args=(path, key)) == [True, True]


def test_integer_keys_of_all_ranks_survive(pool: Pool, tmp_path: Path, key: str) -> None:
    path = str(tmp_path / "saved")
    pool.check(workers.save_parts, world=3, args=(path, key))
    found = checkpoint.load_all(path, key=key)[0]["opt"]
    assert {rank: part["momentum"].tolist() for rank, part in found["state"].items()} == {
        rank: [rank, rank] for rank in range(3)
    }
    assert found["groups"] == {1: {}, 2: {}}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("value", "rank 1: mine.value is a builtins.set"),
        ("key", "key-missing"),
        ("load", "there is no checkpoint at"),
    ],
)
def test_a_failure_is_raised_on_every_rank(pool: Pool, tmp_path: Path, key: str, what: str, message: str) -> None:
    found = pool.check(workers.refusal, world=3, args=(what, str(tmp_path / "saved"), key))
    assert all(message in each for each in found), found
    assert os.listdir(tmp_path) == ["key"]


@pytest.mark.parametrize("in_background", [False, True], ids=["save", "async_save"])
@pytest.mark.parametrize(
    ("what", "rank", "message"),
    [
        ("metadata", 0, "rank 0: metadata['a'] is a torch.Tensor"),
        ("metadata", 1, "rank 1: metadata['a'] is a torch.Tensor"),
        ("empty", 1, "rank 1: ValueError: state must be a dict that is not empty"),
        ("threads", 0, "rank 0: ValueError: threads must be at least 1"),
        ("object", 1, "rank 1: LockedError: the service is down"),
        ("copy", 1, "rank 1: "),
        ("wrap", 0, "rank 0: the key broken does not wrap a data key: the service is down"),
        ("create", 1, "rank 1: LockedError: the service is down"),
    ],
)
def test_what_one_rank_cannot_save_is_raised_on_every_rank(
    pool: Pool, tmp_path: Path, key: str, what: str, rank: int, message: str, in_background: bool
) -> None:
    arguments = (what, rank, in_background, str(tmp_path / "saved"), key)
    found = pool.check(workers.refusal_of_one, world=2, args=arguments)
    assert all(message in each for each in found), found
    assert sorted(os.listdir(tmp_path)) == ["key", "saved"]


def test_a_state_that_does_not_fit_on_one_rank_fails_on_all(pool: Pool, tmp_path: Path, key: str) -> None:
    path = str(tmp_path / "saved")
    assert pool.check(workers.refusal, world=2, args=("save", path, key)) == ["accepted"] * 2
    found = pool.check(workers.refusal, world=2, args=("shape", path, key))
    assert all("rank 1: ValueError: Size mismatch" in each for each in found), found
    for what in ("save", "background"):
        found = pool.check(workers.refusal, world=2, args=(what, path, key))
        assert all("is never overwritten" in each for each in found), found


@pytest.mark.promise("The data key of a checkpoint never travels over a process group that is not sealed.")
@pytest.mark.parametrize("what", ["save", "load", "background"])
def test_a_group_that_is_not_sealed_is_refused(pool: Pool, tmp_path: Path, key: str, what: str) -> None:
    found = pool.check(workers.refusal, world=2, backend="gloo", args=(what, str(tmp_path / "saved"), key))
    assert all("would travel in clear" in each and "gloo" in each for each in found), found
    assert os.listdir(tmp_path) == ["key"]


@pytest.mark.promise("Loading a sealed checkpoint unpickles nothing.")
def test_nothing_is_unpickled(pool: Pool, tmp_path: Path, key: str) -> None:
    path = str(tmp_path / "saved")
    checkpoint.save(small_state(), path, key=key)
    assert pool.check(workers.load_without_pickle, world=1, backend=None, args=(path, key)) == [True]


def test_the_patched_pickle_would_notice(pool: Pool, tmp_path: Path) -> None:
    """The same with plain DCP, which unpickles."""
    dcp.save({"value": {"step": 1}, "weight": torch.ones(2)}, checkpoint_id=str(tmp_path / "plain"), no_dist=True)
    found = pool.run(load_plain_without_pickle, world=1, backend=None, args=(str(tmp_path / "plain"),))
    assert "something is unpickled" in str(found[0])


def load_plain_without_pickle(path: str) -> None:
    def plain(_: str, key: str) -> None:
        try:
            dcp.load({"value": {"step": 0}, "weight": torch.ones(2)}, checkpoint_id=path, no_dist=True)
        except BaseException as error:
            raise AssertionError(str(error)) from error

    kept, workers.checkpoint.load = workers.checkpoint.load, lambda *_, **__: plain(path, "")  # type: ignore
    try:
        workers.load_without_pickle(path, "")
    finally:
        workers.checkpoint.load = kept


@pytest.mark.nightly  # a large tensor
def test_device_tensors_need_no_full_copy_on_the_host(devices: Pool, tmp_path: Path, key: str) -> None:
    size = 512
    saved, loaded, same = devices.check(
        workers.device_cost, world=1, backend=None, args=(str(tmp_path), key, size), timeout=HANG
    )[0]
    assert same
    assert max(saved, loaded) < 96 << 20, (saved >> 20, loaded >> 20)


@pytest.mark.promise("A save that is killed at any moment leaves no incomplete checkpoint.")
def test_a_killed_save_leaves_complete_checkpoints_only(pool: Pool, tmp_path: Path, key: str, full: bool) -> None:
    count = KILLS if full else 20
    left = pool.check(workers.kill_saves, world=1, backend=None, args=(str(tmp_path), key, count), timeout=HANG)[0]
    assert left > count // 4
