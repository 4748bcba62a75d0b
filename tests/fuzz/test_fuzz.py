"""The bounded form of fuzzing: some inputs for each parser, the same ones every time, and every input that once broke one."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fuzz.all_targets import TARGETS
from tests.fuzz.mutate import inputs
from tests.fuzz.target import Target
from tests.limits import HANG

FOUND = Path(__file__).parent / "found"
SLOW_SECONDS = 5.0  # of CPU time


@pytest.mark.promise("No fuzzed input crashes a parser or takes it more than 5 s of CPU time.")
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_no_input_crashes_or_hangs(target: Target, full: bool) -> None:
    count = target.bounded * (50 if full else 1)
    for data in itertools.islice(inputs(target.seeds(), target.longest, target.words), count):
        before = time.process_time()
        target.attempt(data)
        assert time.process_time() - before < SLOW_SECONDS, f"slow on {data.hex()}"


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_seeds_are_not_all_refused(target: Target) -> None:
    """Or the fuzzer would not get past the door."""
    assert target.name in NEVER_ACCEPTED or any(target.attempt(seed) for seed in target.seeds())


NEVER_ACCEPTED = {"gpu-chain"}  # it replaces a good certificate; its run refuses whatever is put there


def test_inputs_that_broke_a_parser_before() -> None:
    for path in FOUND.glob("*-*"):
        TARGETS[path.name.rsplit("-", 1)[0]].attempt(path.read_bytes())


@pytest.mark.processes
@pytest.mark.nightly
def test_the_command_counts_and_reports(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "frame-header", "--inputs", "1000", "--engine", "mutate"]
    done = subprocess.run(
        [*command, "--finds", str(tmp_path)], capture_output=True, text=True, timeout=HANG, check=True
    )
    assert "frame-header: 1,000 of 1,000 inputs" in done.stdout
    listed = subprocess.run([*command[:3], "--list"], capture_output=True, text=True, timeout=HANG, check=True)
    assert listed.stdout.split() == list(TARGETS)
