"""What real workers recorded of the frames between them: both endpoints agree, and a log that says otherwise is named."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringfence.record.agreement import Agreement, Disagreement, Point, compare
from ringfence.record.folder import COMPLETE, LogState
from tests.integration.test_record import recorder, states, until
from tests.pool import IN_SHARED_MEMORY, Failure, Pool

pytestmark = pytest.mark.processes

PLANES = ("compiled", "python", "compiled")  # of the workers


def env(folder: Path, channels: int = 1) -> dict[str, str]:
    return {"RINGFENCE_RECORD": str(folder), "RINGFENCE_CHANNELS": str(channels)}


def points(found: list[LogState]) -> dict[int, list[Point]]:
    """The points in each log, by rank."""
    return {rank: [Point(*point) for point in _recorded(each)] for rank, each in enumerate(found)}


def _recorded(state: LogState) -> list[Any]:
    assert state.log is not None, state.reason
    return [point for entry in state.log.entries if entry.kind == "passed" for point in entry.fields["points"]]


def exchange() -> None:
    """Train a step, and use every kind of connection: collectives that forward, a group that ends early, and transfers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    until(lambda: recorder().head)
    model = DistributedDataParallel(torch.nn.Linear(500, 500))
    for _ in range(3):
        model(torch.ones(4, 500)).sum().backward()
    dist.all_reduce(torch.ones(1_500_000))
    dist.broadcast(torch.ones(1_500_000), 1)
    dist.all_gather([torch.empty(700_000) for _ in range(size)], torch.ones(700_000))
    group = dist.new_group()
    dist.all_reduce(torch.ones(10), group=group)
    dist.destroy_process_group(group)
    if rank == 0:
        dist.send(torch.ones(200_000), 1)
    elif rank == 1:
        dist.recv(torch.empty(200_000), 0)
    dist.barrier()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("channels", [1, 2])
def test_both_ends_agree_on_what_passed(pool: Pool, tmp_path: Path, size: int, channels: int) -> None:
    with pool.fresh([["env", f"RINGFENCE_DATAPLANE={plane}"] for plane in PLANES]) as fresh:
        fresh.check(exchange, size, env=env(tmp_path / "record", channels))
        fresh.leave()
        found = states(tmp_path / "record", size=size)
    assert [each.state for each in found] == [COMPLETE] * size
    said = points(found)
    agreement = compare(said)
    assert (agreement.disagreements, agreement.partial, agreement.uncompared) == ([], 0, 0)
    assert agreement.compared == sum(len({p[:4] for p in each}) for each in said.values()) / 2
    assert {p.channel for each in said.values() for p in each} == set(range(channels))
    ends = {(rank, p.worker, p.direction) for rank, each in said.items() for p in each}
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    assert ends >= {(rank, right, 0) for rank, right in ring} | {(right, rank, 1) for rank, right in ring}
    check_that_a_change_is_named(said)


def check_that_a_change_is_named(said: dict[int, list[Point]]) -> None:
    """The last point of worker 1 is another in its log."""
    *others, last = said[1]
    changed = last._replace(digest="00" * 32)
    (found,) = compare({**said, 1: [*others, changed]}).disagreements
    ends = (last.worker, 1) if last.direction else (1, last.worker)
    digests = (last.digest, changed.digest) if last.direction else (changed.digest, last.digest)
    assert found == Disagreement(*ends, last.connection, last.channel, last.frames, *digests)


def lose_a_worker() -> None:
    exchange()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(1000):
        dist.all_reduce(torch.ones(100_000))


def test_survivors_of_a_failed_session_agree_as_far_as_both_recorded(pool: Pool, tmp_path: Path) -> None:
    with pool.fresh() as fresh:
        failed = fresh.run(lose_a_worker, 3, env=env(tmp_path / "record", 2))
        assert all(isinstance(each, Failure) for each in failed)
        fresh.leave()
        found = states(tmp_path / "record", size=3)
    assert [each.state for each in found][:2] == [COMPLETE] * 2
    said = points(found)
    agreement = compare(said)
    assert not agreement.disagreements
    assert agreement.uncompared > 0  # those of the worker that was killed, which had no time to record them
    between = {rank: [p for p in said[rank] if p.worker == 1 - rank] for rank in range(2)}
    assert compare(between).compared >= 2 and compare(between).uncompared == 0
    assert any(p.frames > 1 for p in between[0])


def test_inside_a_machine_there_is_nothing_to_compare(pool: Pool, tmp_path: Path) -> None:
    with pool.fresh() as fresh:
        fresh.check(exchange, 2, IN_SHARED_MEMORY, env={"RINGFENCE_RECORD": str(tmp_path / "record")})
        fresh.leave()
        found = states(tmp_path / "record", size=2)
    assert [each.state for each in found] == [COMPLETE] * 2
    assert compare(points(found)) == Agreement([], 0, 0, 0)
