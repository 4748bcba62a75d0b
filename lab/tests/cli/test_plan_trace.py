"""`ringfence plan --trace` as a user meets it: without torch, in words, as JSON, and with mistakes.

`python -m lab.tests.cli.test_plan_trace` writes the printed answer anew; look at the difference before you keep it.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from lab.tests.cli.test_plan import answered, bare
from lab.tests.unit.test_plan_trace_files import TRACES

SNAPSHOT = TRACES / "answer.txt"
RANKS = (str(TRACES / "ddp-rank0.json.gz"), str(TRACES / "ddp-rank1.json.gz"))
NCCL = str(TRACES / "nccl-hand-made.json")


def answer() -> str:
    with mock.patch.dict(os.environ, COLUMNS="80"):
        done = bare("plan", "--trace", NCCL, "--hardware", "h100-cc", "--workers", "8")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_printed_answer() -> None:
    assert answer() == SNAPSHOT.read_text()


def test_the_answer_in_json() -> None:
    found = answered("plan", "--trace", *RANKS, "--hardware", "tdx-25g")
    sealed = found["sealed"]
    assert sealed["interval"][0] <= sealed["seconds"] <= sealed["interval"][1]
    assert sealed["seconds"] == found["variants"]["ringfence"]["seconds"]
    assert (found["trace"]["workers"], found["trace"]["files"], found["trace"]["backend"]) == (2, 2, "gloo")
    assert [each["operation"] for each in found["trace"]["collectives"]] == ["all_reduce", "all_reduce"]
    assert 0 < found["computing"]["seconds"] < found["recorded_seconds"]
    assert len(found["bucket_sizes"]) > 3


def test_ranks_may_be_of_either_format() -> None:
    graph = str(TRACES / "ddp-execution-trace-rank0.json.gz")
    found = answered("plan", "--trace", graph, "--compute", "0.02")
    assert found["recorded_seconds"] is None
    assert found["computing"] == {"seconds": 0.02, "from": "as given"}
    assert answered("plan", "--trace", graph, RANKS[0])["trace"]["steps"] == 3


def test_steps_by_repetition_are_announced() -> None:
    done = bare("plan", "--trace", str(TRACES / "ddp-without-steps-rank0.json.gz"))
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "steps: by what repeats, 2 collectives each" in words
    assert "one rank's file" in words


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.json"], "cannot read the trace nowhere.json"),
        (["."], "cannot read the trace"),
        (["empty.json"], "is truncated"),
        ([str(TRACES / "README.md")], "is not a trace"),
        ([str(TRACES / "ddp-without-shapes-rank0.json.gz")], "record_shapes=True"),
        ([str(TRACES / "ddp-execution-trace-rank0.json.gz")], "--compute"),
        ([RANKS[0], RANKS[0]], "two files are of rank 0"),
        ([RANKS[0], NCCL], "two files are of rank 0"),
        ([RANKS[1], NCCL], "runs with 2 and 4 ranks"),
        ([NCCL, "--sweep"], "--sweep does not apply to --trace"),
        ([NCCL, "--bucket-cap-mb", "5"], "--bucket-cap-mb does not apply to --trace"),
        ([NCCL, "--model", "gpt2"], "not allowed with argument"),
        ([NCCL, "--compute", "0"], "above zero"),
        ([NCCL, "--step", "-1"], "above zero"),
        ([NCCL, "--step", "1", "--compute", "1"], "--step goes with --trace, in place of --compute"),
    ],
)
def test_mistakes_are_reported_with_a_remedy(arguments: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "empty.json").touch()
    done = bare("plan", "--trace", *arguments, folder=tmp_path)
    assert done.returncode == 2, done.stdout
    assert says in " ".join(done.stderr.split())


def test_a_check_needs_a_profile_of_this_machine() -> None:
    done = bare("plan", "traces", "--hardware", "tdx-100g")
    assert done.returncode == 2
    assert "ringfence plan calibrate" in " ".join(done.stderr.split())


if __name__ == "__main__":
    SNAPSHOT.write_text(answer())
