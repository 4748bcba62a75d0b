"""Epochs on processes: one ends everywhere when its age is reached; a change of membership is a new one with new keys."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Failure, Pool, values

AGE = 2  # seconds
POLICY = f'version = 1\nmax_epoch_age = "{AGE}s"\n\n[[admit]]\n[admit.secret]\n'


@pytest.fixture
def aged(tmp_path: Path) -> dict[str, str]:
    """The environment of workers whose policy limits the age of an epoch."""
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    return {"RINGFENCE_POLICY": str(policy)}


def session() -> Any:
    from ringfence import backend

    return backend._session


def all_reduce() -> float:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    return float(tensor[0].item())


def all_reduce_for_ever() -> None:
    while all_reduce() == dist.get_world_size():
        continue


def all_reduce_after_the_age() -> None:
    session()._age_limit.join(60)
    assert not session()._age_limit.is_alive()
    all_reduce()


def leave_and_look_for_threads() -> tuple[list[str], list[str]]:
    before = [thread.name for thread in threading.enumerate()]
    timer = session()._age_limit
    dist.destroy_process_group()
    timer.join(60)
    return before, [thread.name for thread in threading.enumerate()]


def epoch() -> tuple[str, float]:
    """What tells epochs apart, and that this one works."""
    key = session().engine.epoch_key.reveal()
    return hashlib.sha256(key).hexdigest(), all_reduce()


def wait_for_the_death_of(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce_for_ever()


# -- age --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", [all_reduce_for_ever, all_reduce_after_the_age], ids=["busy", "idle"])
def test_an_epoch_that_is_too_old_ends_on_every_worker_and_says_what_to_do(
    pool: Pool, aged: dict[str, str], work: Any
) -> None:
    for result in pool.run(work, 3, env=aged, renew=True):
        assert isinstance(result, Failure), result
        assert result.type == "AbortedError", result
        assert f"this epoch has reached {AGE} s, the policy's max_epoch_age" in result.message
        assert "Destroy the process group and initialise it anew" in result.message


def test_after_it_ended_the_same_workers_form_a_new_epoch(pool: Pool, aged: dict[str, str]) -> None:
    old = values(pool.run(epoch, 3, env=aged, renew=True))
    assert all(isinstance(result, Failure) for result in pool.start(all_reduce_for_ever, 3).wait(60))
    new = values(pool.run(epoch, 3, env=aged, renew=True))
    assert len(set(old)) == len(set(new)) == 1
    assert old[0][0] != new[0][0]
    assert old[0][1] == new[0][1] == 3


def test_an_epoch_that_ends_in_time_leaves_no_clock_behind(pool: Pool, aged: dict[str, str]) -> None:
    for before, after in values(pool.run(leave_and_look_for_threads, 2, env=aged, renew=True)):
        assert "ringfence age" in before
        assert "ringfence age" not in after


def test_a_policy_without_an_age_sets_no_clock(pool: Pool) -> None:
    pool.join("ringfence", 2, renew=True)
    assert values(pool.start(has_no_clock, 2).wait(60)) == [True, True]


def has_no_clock() -> bool:
    return session()._age_limit is None


# -- membership -------------------------------------------------------------------------------------------------------


def test_a_change_of_membership_is_a_new_epoch(pool: Pool) -> None:
    """Four workers, one dies, three go on in the next generation, and four again in the one after."""
    with pool.fresh() as own:
        found = [values(own.run(epoch, 4))]
        for result in own.start(wait_for_the_death_of, 4, (3,)).wait(60):
            assert isinstance(result, Failure)
        found += [values(own.run(epoch, size)) for size in (3, 4)]
        for size, results in zip((4, 3, 4), found, strict=True):
            assert len(set(results)) == 1
            assert results[0][1] == size
        assert len({results[0][0] for results in found}) == 3, "an epoch's keys came back"


def test_a_worker_of_an_older_generation_does_not_come_back(pool: Pool) -> None:
    """It looks where its own generation met, finds nobody, and the new epoch does not wait for it to be let in."""
    with pool.fresh() as own:
        values(own.run(epoch, 2))
        stale = {"RINGFENCE_GENERATION": str(own.generation)}
        results = own.join("ringfence", 2, seconds=3, env=[{}, stale], renew=True)
        assert [type(result) for result in results] == [Failure, Failure]
        assert "1 of 2 workers are missing: rank 1" in results[0].message
        assert f"generation {own.generation - 1}, did not form" in results[1].message
