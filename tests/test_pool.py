"""The pool itself: results in rank order, failures as values, hanging and dead workers replaced."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Failure, Pool, WorkersFailed


def add_ranks(start: int) -> tuple[int, int, float]:
    total = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), os.getpid(), total.item()


def fail_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise ValueError("as asked")
    return "well"


def hang_on(rank: int) -> str:
    if dist.get_rank() == rank:
        threading.Event().wait()
    return "well"


def die_on(rank: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "well"


def environment(name: str) -> str | None:
    return os.environ.get(name)


def own_pid() -> int:
    return os.getpid()


def kinds(results: list[Any]) -> list[str]:
    return [result.type if isinstance(result, Failure) else result for result in results]


def test_results_come_in_rank_order_and_workers_are_reused(pool: Pool) -> None:
    first = pool.check(add_ranks, world=3, backend="gloo", args=(10,))
    second = pool.check(add_ranks, world=3, backend="gloo", args=(20,))
    assert [(rank, total) for rank, _, total in first] == [(0, 33.0), (1, 33.0), (2, 33.0)]
    assert [pid for _, pid, _ in first] == [pid for _, pid, _ in second]


def test_the_same_workers_join_a_group_of_another_size(pool: Pool) -> None:
    three = pool.check(add_ranks, world=3, backend="gloo", args=(0,))
    two = pool.check(add_ranks, world=2, backend="gloo", args=(0,))
    assert [pid for _, pid, _ in two] == [pid for _, pid, _ in three[:2]]


def test_workers_that_left_their_group_join_again(pool: Pool) -> None:
    """A test may destroy the group of its workers; the next one asks for the same."""
    pool.check(dist.destroy_process_group, 2, "gloo")
    assert pool.check(dist.get_world_size, 2, "gloo") == [2, 2]


def end_session_quietly() -> None:
    if dist.get_rank() == 0:
        dist.group.WORLD.abort()  # type: ignore[union-attr]


def test_workers_whose_session_has_ended_join_again(pool: Pool) -> None:
    """A test may end it and return; the next one asks for the same group."""
    pool.check(end_session_quietly, 2, renew=True)
    assert [total for _, _, total in pool.check(add_ranks, 2, args=(5,))] == [11.0, 11.0]


def test_an_exception_is_returned_as_a_failure(pool: Pool) -> None:
    results = pool.run(fail_on, world=2, backend="gloo", args=(1,))
    assert results[0] == "well"
    assert (results[1].type, results[1].message) == ("ValueError", "as asked")
    assert "fail_on" in results[1].traceback
    assert "Exception" in results[1].bases
    with pytest.raises(WorkersFailed, match="rank 1: ValueError: as asked"):
        pool.check(fail_on, world=2, backend="gloo", args=(1,))


def test_a_hanging_worker_shows_its_stack_and_is_replaced(pool: Pool) -> None:
    results = pool.run(hang_on, world=2, backend="gloo", args=(0,), timeout=10)
    assert kinds(results) == ["Hang", "well"]
    assert "in hang_on" in results[0].traceback
    assert len(pool.check(add_ranks, world=2, backend="gloo", args=(0,))) == 2


def test_a_dead_worker_is_reported_at_once_and_replaced(pool: Pool) -> None:
    results = pool.run(die_on, world=2, backend="gloo", args=(1,))
    assert kinds(results) == ["well", "Death"]
    assert results[1].message == "killed by SIGKILL"
    assert len(pool.check(add_ranks, world=2, backend="gloo", args=(0,))) == 2


def die_when_leaving(rank: int) -> None:
    if dist.get_rank() == rank:
        dist.destroy_process_group = partial(os.kill, os.getpid(), signal.SIGSEGV)


def test_a_worker_that_dies_when_it_leaves_is_a_failure(pool: Pool) -> None:
    pool.check(die_when_leaving, world=2, backend="gloo", args=(1,))
    with pytest.raises(WorkersFailed, match=r"^rank 1: Death: killed by SIGSEGV"):
        pool.leave()
    assert len(pool.check(add_ranks, world=2, backend="gloo", args=(0,))) == 2


def test_variables_are_set_for_the_join_and_generations_rise(pool: Pool) -> None:
    seen = [
        pool.check(environment, world=2, backend="gloo", args=("RINGFENCE_GENERATION",), renew=True) for _ in range(2)
    ]
    assert int(seen[1][0]) == int(seen[0][0]) + 1
    each = [{"RINGFENCE_PORTS": "1-2"}, {"RINGFENCE_SECRET_FILE": None}]
    assert pool.check(environment, 2, "gloo", ("RINGFENCE_PORTS",), env=each) == ["1-2", None]
    assert pool.check(environment, 2, "gloo", ("RINGFENCE_SECRET_FILE",), env=each)[1] is None
    secret = Path(pool.check(environment, 2, "gloo", ("RINGFENCE_SECRET_FILE",))[1])
    assert secret.stat().st_mode & 0o777 == 0o600


def test_a_failed_join_is_returned_as_a_failure(pool: Pool) -> None:
    results = pool.run(own_pid, world=2, backend="no-such-backend")
    assert all(isinstance(result, Failure) for result in results)
    assert len(pool.check(add_ranks, world=2, backend="gloo", args=(0,))) == 2


def test_a_separate_pool_ends_with_its_block(pool: Pool) -> None:
    with pool.fresh(prefixes=[["env", "POOL_TEST_PLACE=here"]]) as own:
        assert own.check(environment, 2, None, ("POOL_TEST_PLACE",)) == ["here", None]
        pids = own.check(own_pid, world=2, backend=None)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
