"""The timeout of a send or recv starts with wait(), not when it is posted."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.limits import FAR, HANG
from tests.pool import Failure, Pool

SECONDS = 4.0  # of the group


def outlast(seconds: float) -> None:
    """Let time pass, in a wait that times out."""
    store = dist.distributed_c10d._get_default_store()
    with pytest.raises(RuntimeError, match="Wait timeout"):
        store.wait(["what nobody sets"], timedelta(seconds=seconds))


def group_of_short_timeout() -> Any:
    """A group whose members are connected already."""
    group = dist.new_group(timeout=timedelta(seconds=FAR))
    dist.all_reduce(torch.ones(1), group=group)
    if hasattr(group, "set_timeout"):
        group.set_timeout(timedelta(seconds=SECONDS))
    else:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SECONDS), group)
    return group


def posted_early() -> tuple[float, int]:
    group = group_of_short_timeout()
    tensor = torch.zeros(3)
    early = []
    if dist.get_rank() == 1:
        early = [dist.irecv(tensor, 0, group, tag=1), dist.isend(torch.full((3,), 2.0), 0, group, tag=2)]
    outlast(1.25 * SECONDS)
    dist.barrier()
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1, group, tag=1)
        dist.recv(tensor, 1, group, tag=2)
    for work in early:
        work.wait()
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    return tensor[0].item(), int(total.item())


def test_timeout_does_not_run_before_wait(pool: Pool, backend: str) -> None:
    assert pool.check(posted_early, 2, backend, renew=True) == [(2.0, 1), (1.0, 1)]


def waited_for(how: str) -> None:
    group = group_of_short_timeout()
    work = dist.irecv(torch.zeros(3), 1 - dist.get_rank(), group)
    work.wait() if how == "wait" else work.get_future().wait()


def test_timeout_runs_during_wait(pool: Pool, backend: str) -> None:
    for result in pool.run(waited_for, 2, backend, ("wait",), timeout=HANG):
        assert isinstance(result, Failure) and result.type not in ("Hang", "Death")


def test_timeout_runs_after_get_future(pool: Pool) -> None:
    # Not on Gloo, whose sends and recvs have no future.
    for result in pool.run(waited_for, 2, "ringfence", ("future",), timeout=HANG):
        assert isinstance(result, Failure) and "did not finish within its timeout" in result.message
