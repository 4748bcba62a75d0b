"""A worker that is late is not lost: its machine answers."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration.process_signal import ProcessSignal
from tests.limits import FAR, HANG
from tests.pool import Pool

LATE = 1  # the rank of the late worker


def be_late(checks: int, half: str, path: str) -> float:
    """The late worker holds the interpreter's lock, then blocks, until the others have checked their connections so often."""
    dist.all_reduce(torch.ones(1000))
    with ProcessSignal(path) as late_enough:
        if dist.get_rank() == LATE:
            while not os.path.exists(half):
                sum(range(100_000))  # holds the GIL
            late_enough.wait(dist.get_world_size() - 1, HANG)
        else:
            count_checks(checks, Path(half), late_enough)
        tensor = torch.ones(16_000_000)  # more than the kernel's buffers hold: the others' connections stand still
        dist.all_reduce(tensor)
    return tensor[0].item()


def count_checks(checks: int, half: Path, late_enough: ProcessSignal) -> None:
    """Tell the late worker when the outage watch of this one has checked so often; it does so at most once in a second."""
    watch = dist.group.WORLD._loop._outages  # type: ignore[union-attr]
    connections, counter = watch._connections, itertools.count(1)

    def counted() -> Any:
        number = next(counter)
        if number == checks // 2:
            half.touch()
        if number == checks:
            late_enough.notify()
        return connections()

    watch._connections = counted


@pytest.mark.long
def test_a_late_worker_causes_no_failure(pool: Pool, tmp_path: Path, full: bool) -> None:
    """It may be late by more than the outage timeout."""
    checks, outage = (60, "20") if full else (12, "4")
    with ProcessSignal(tmp_path / "late") as late_enough:
        args = checks, str(tmp_path / "half"), late_enough.path
        env = {"RINGFENCE_OUTAGE_TIMEOUT": outage}
        assert pool.check(be_late, 3, args=args, seconds=FAR, timeout=HANG, renew=True, env=env) == [3.0] * 3
