"""Scripts that end without destroying their process group: cleanly if nobody needs them, and named if somebody does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool import ROOT, Pool

SCRIPT = Path(__file__).with_name("exit_script.py")


def run_scripts(tmp_path: Path, way: str, world: int) -> list[tuple[int, str]]:
    """Exit status and standard error of each rank."""
    environment = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        RINGFENCE_SECRET_FILE=str(Pool.new_secret(tmp_path / "secret")),
        RINGFENCE_RUN_ID=way.replace(" ", "-"),
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
        words = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, word) for process, word in zip(processes, words, strict=True)]


@pytest.mark.parametrize("way", ["falls off the end", "sys.exit"])
def test_a_script_that_does_not_destroy_its_group_ends_cleanly(tmp_path: Path, way: str) -> None:
    for status, words in run_scripts(tmp_path, way, world=2):
        assert status == 0, words
        assert "Traceback" not in words
        assert "Error" not in words


def test_a_script_with_work_outstanding_ends(tmp_path: Path) -> None:
    for status, words in run_scripts(tmp_path, "with work outstanding", world=2):
        assert status == 0, words
        assert "Traceback" not in words


def test_an_exit_while_others_still_need_the_worker_is_named_by_them(tmp_path: Path) -> None:
    results = run_scripts(tmp_path, "one leaves early", world=3)
    status, words = results.pop(1)
    assert (status, "Traceback" in words) == (0, False)
    for status, words in results:
        assert status == 1
        assert "PeerLostError" in words or "AbortedError" in words
        assert "worker 1" in words
