"""Predictions from traces: steps are recorded with Gloo, predicted, and measured with ringfence, for real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringfence.cli.plan_trace import check_json, check_text
from ringfence.lab.bench.trace_check import Effort, TraceCase, check, errors
from ringfence.lab.plan.hardware import dump
from tests.cli.command import ringfence
from tests.unit.plan_rows import machine

# The profile is that of no machine, and other tests may run beside this one: the limit only shows that the parts fit together.
FACTOR = 4.0


def test_a_recorded_job_is_predicted_and_measured(tmp_path: Path) -> None:
    case = TraceCase("gpt2-tiny", 0.1, 2)
    (found,) = check(machine(), [case], Effort(repeats=1, steps=3, rounds=3), tmp_path / "kept")
    assert found.case is case
    assert 1 / FACTOR < found.ratio < FACTOR
    (repeat,) = found.repeats
    assert repeat.low < repeat.predicted < repeat.high
    files = sorted(file.name for file in (tmp_path / "kept").rglob("*.json.gz"))
    assert files == ["rank0.json.gz", "rank1.json.gz"]
    assert errors([found]) == (found.error, found.error)
    text = " ".join(check_text([found]).split())
    assert "gpt2-tiny" in text
    assert "median error" in text
    assert json.loads(json.dumps(check_json(machine(), [found])))["cases"][0]["workers"] == 2


@pytest.mark.long
def test_the_check_of_two_jobs_as_a_command(tmp_path: Path) -> None:
    profile = tmp_path / "here.toml"
    profile.write_text(dump(machine(), "made up", "2026-11-16"))
    done = ringfence("plan", "traces", "--quick", "--hardware", str(profile), "--json", timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["cases"]) == 2
    assert found["worst_error"] < FACTOR
