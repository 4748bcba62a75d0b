"""Predictions from traces: steps are recorded with Gloo, predicted, and measured with ringfence, for real."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median

import pytest

from lab.tests.unit.plan_rows import machine
from ringfence_lab.bench.trace_check import Effort, TraceCase, check, errors
from ringfence_lab.cli.plan_trace import check_json, check_text
from ringfence_lab.plan.hardware import dump
from tests.cli.command import ringfence


@pytest.mark.nightly
def test_a_recorded_job_is_predicted_and_measured(tmp_path: Path) -> None:
    case, began = TraceCase("gpt2-tiny", 0.1, 2), time.monotonic()
    (found,) = check(machine(), [case], Effort(repeats=1, steps=3, rounds=3), tmp_path / "kept")
    assert found.case is case
    (repeat,) = found.repeats
    steps = (*found.sealed, *found.gloo, repeat.recorded)
    assert all(seconds > 0 for seconds in steps)
    assert sum(steps) < time.monotonic() - began  # all of them are part of it, however busy the machine is
    assert found.ratio == pytest.approx(repeat.predicted / median(found.sealed))
    assert repeat.low < repeat.predicted < repeat.high
    files = sorted(file.name for file in (tmp_path / "kept").rglob("*.json.gz"))
    assert files == ["rank0.json.gz", "rank1.json.gz"]
    assert errors([found]) == (found.error, found.error)
    text = " ".join(check_text([found]).split())
    assert "gpt2-tiny" in text
    assert "median error" in text
    assert json.loads(json.dumps(check_json(machine(), [found])))["cases"][0]["workers"] == 2


@pytest.mark.nightly
@pytest.mark.long
def test_the_check_of_two_jobs_as_a_command(tmp_path: Path) -> None:
    profile = tmp_path / "here.toml"
    profile.write_text(dump(machine(), "made up", "2026-11-16"))
    done = ringfence("plan", "traces", "--quick", "--hardware", str(profile), "--json", timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["cases"]) == 2
    assert found["worst_error"] == max(case["error"] for case in found["cases"])
