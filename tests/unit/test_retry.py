"""Which failures scripts.retry tries again: only those of processes that did not answer, and only a few."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.retry import Failed, flaky_before, read_failures, reason_against, record

HANG = "E   tests.pool.WorkersFailed: rank 0: Hang: no answer within 60 s\nE   rank 1: Hang: no answer within 60 s\n"
CHAINED = "\nDuring handling of the above exception, another exception occurred:\n"
BY_LOAD = [
    HANG,
    "E       rank 2: Death: killed by SIGKILL",
    "E       subprocess.TimeoutExpired: Command '['python']' timed out after 120 seconds",
    "E       Failed: Timeout (>300.0s) from pytest-timeout.",
]
FAULTS = [
    "E       AssertionError: assert 3.0 == 4.0",
    "E       assert 'Hang: ' in 'rank 1: PeerLostError'",
    "E       rank 1: Death: exit status 1",
    "E       rank 1: Death: killed by SIGSEGV",
    "E       rank 0: AuthenticationError: Hang on",
    "E   tests.pool.WorkersFailed: rank 0: AssertionError: 3\nE   rank 1: Hang: no answer within 60 s\n",
    "E   tests.pool.WorkersFailed: rank 0: Hang: no answer within 60 s\nE   rank 1: Death: killed by SIGSEGV\n",
    "E   subprocess.TimeoutExpired: Command" + CHAINED + "E   AssertionError: assert 3.0 == 4.0",
    "E       assert 'x.Hang: ' in 'rank 1'",
    "",
]


@pytest.mark.parametrize("text", BY_LOAD)
def test_a_process_that_did_not_answer_may_be_tried_again(text: str) -> None:
    assert reason_against([Failed("tests/integration/test_join.py::test_a", text)]) == ""


@pytest.mark.parametrize("text", FAULTS)
def test_other_failures_are_final(text: str) -> None:
    assert "another reason" in reason_against([Failed("tests/cli/test_demo.py::test_a", text)])


@pytest.mark.parametrize("folder", ["unit", "conformance", "attack", "vectors", "fuzz"])
def test_only_tests_of_processes_are_tried_again(folder: str) -> None:
    assert "not a test of processes" in reason_against([Failed(f"tests/{folder}/test_a.py::test_a", HANG)])


def test_one_final_failure_among_others_is_final() -> None:
    failures = [Failed("tests/cli/test_a.py::test_a", HANG), Failed("tests/cli/test_a.py::test_b", FAULTS[0])]
    assert reason_against(failures)


def test_a_run_that_failed_without_a_test_is_final() -> None:
    assert "no test did" in reason_against([])


def test_at_most_three_are_tried_again() -> None:
    failures = [Failed(f"tests/cli/test_a.py::test_{number}", HANG) for number in range(4)]
    assert reason_against(failures[:3]) == ""
    assert "at most 3" in reason_against(failures)


def test_every_failure_of_a_test_must_allow_it(tmp_path: Path) -> None:
    """A wrong result stays one if a fixture of the same test then hangs."""
    file = tmp_path / "failures"
    file.write_text("".join(json.dumps({"test": "tests/cli/a", "text": text}) + "\n" for text in (FAULTS[0], HANG)))
    assert "another reason" in reason_against(read_failures(file))
    assert reason_against([Failed("tests/cli/a", HANG)] * 4) == ""


def test_what_was_tried_again_lately_is_not_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "flaky.jsonl"
    name = "tests/cli/test_a.py::test_a"
    assert flaky_before(file) == set()
    record(file, [Failed(name, HANG)])
    assert "mend it" in reason_against([Failed(name, HANG)], flaky_before(file))
    file.write_text(json.dumps({"time": "2020-01-01T00:00:00+00:00", "test": name, "text": HANG}) + "\n")
    assert reason_against([Failed(name, HANG)], flaky_before(file)) == ""


def test_the_record_keeps_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "build" / "flaky.jsonl"
    for name in ("a", "b"):
        record(file, [Failed(name, HANG)])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["test"], line["text"]) for line in lines] == [("a", HANG), ("b", HANG)]
    assert all(line["time"] for line in lines)
