"""Scripts that exit without destroying their process group: cleanly, or named by the workers that still need them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringfence.errors import RingfenceError
from tests.integration.exit_script import LARGE
from tests.limits import FAR, FAR_OUTAGE, HANG
from tests.pool import ROOT, Pool

SCRIPT = Path(__file__).with_name("exit_script.py")


def run_scripts(tmp_path: Path, way: str, world: int) -> list[tuple[int, str]]:
    """Return exit status and standard error of each rank. A rank that drains its links until a timeout would hang."""
    environment = dict(
        os.environ,
        **FAR_OUTAGE,
        OMP_NUM_THREADS="1",
        RINGFENCE_SECRET_FILE=str(Pool.new_secret(tmp_path / "secret")),
        RINGFENCE_RUN_ID=way.replace(" ", "-"),
        RINGFENCE_SAME_HOST="sealed",  # a socket that is full shows that work is under way
    )
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), way, str(tmp_path / "store"), str(rank), str(world)],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        words = [process.communicate(timeout=HANG)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, word) for process, word in zip(processes, words, strict=True)]


@pytest.mark.parametrize("way", ["falls off the end", "sys.exit"])
def test_a_script_that_does_not_destroy_its_group_exits_cleanly(tmp_path: Path, way: str) -> None:
    for status, words in run_scripts(tmp_path, way, world=2):
        assert status == 0, words
        assert "Traceback" not in words
        assert "Error" not in words


def test_a_script_with_outstanding_work_exits(tmp_path: Path) -> None:
    for status, words in run_scripts(tmp_path, "with work outstanding", world=2):
        assert status == 0, words
        assert "Traceback" not in words


def test_an_exception_during_a_collective_is_reported(tmp_path: Path) -> None:
    """The worker that raises does not wait until the other one reads."""
    (_, mine), (status, words) = run_scripts(tmp_path, "an exception with work under way", world=2)
    assert "an error in the script" in mine and status == 1
    assert "worker 0 left the run" in words


def abort() -> str:
    """Abort on worker 0 while worker 1 does not read; return the error of this worker."""
    tensor = torch.ones(LARGE)
    dist.all_reduce(tensor[:10])
    if dist.get_rank() == 1:
        try:
            dist.recv(tensor, 0)
        except RingfenceError as error:
            return str(error)
    work = dist.broadcast(tensor, 0, async_op=True)
    engine = dist.group.WORLD._loop.engine  # type: ignore[union-attr]
    while not engine.blocked:
        os.sched_yield()
    dist.group.WORLD.abort()  # type: ignore[union-attr]
    return str(work.exception())


def test_abort_does_not_wait(pool: Pool) -> None:
    mine, theirs = pool.check(abort, 2, seconds=FAR, env=FAR_OUTAGE, renew=True, timeout=HANG)
    assert "left the run" in mine
    assert "worker 0 left the run" in theirs


def test_other_workers_name_a_worker_that_exits_too_early(tmp_path: Path) -> None:
    results = run_scripts(tmp_path, "one leaves early", world=3)
    status, words = results.pop(1)
    assert (status, "Traceback" in words) == (0, False)
    for status, words in results:
        assert status == 1
        assert "PeerLostError" in words or "AbortedError" in words
        assert "worker 1" in words
