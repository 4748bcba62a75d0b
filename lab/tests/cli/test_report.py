"""`ringfence report`: from the folder of a study to a page, in one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.tests.unit.report_samples import everything, from_bench, write_study
from tests.cli.command import ringfence
from tests.limits import HANG

SAMPLES = Path(__file__).parents[3] / "docs" / "results" / "samples.jsonl"


def test_the_projects_own_samples_become_a_page(tmp_path: Path) -> None:
    few = [row for row in from_bench(SAMPLES) if row["workers"] == 2 and row["size"] in (None, 1 << 20, 25 << 20)]
    write_study(tmp_path / "study-results", [row for row in few if row["operation"] in (None, "all_reduce")])
    done = ringfence("report", folder=tmp_path, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "page: study-results/report/report.html"
    assert "not drawn: What gradients travel as: nothing was measured both as float32 and as bfloat16" in done.stdout
    page = (tmp_path / "study-results/report/report.html").read_text()
    assert "resnet50" in page
    assert page.count("<img src=") == len(list((tmp_path / "study-results/report/figures").glob("*.svg")))
    assert "drawing: Overhead by model" in done.stderr


def test_a_part_of_a_study_is_enough_and_scripts_hear_what_is_missing(tmp_path: Path) -> None:
    few = [row for row in everything() if row["kind"] == "collective" and row["hosts"]]
    write_study(tmp_path / "site", few, runs=False)
    (tmp_path / "torch.py").write_text("raise ImportError('a report needs no torch')")
    where: dict[str, Any] = {"folder": tmp_path, "timeout": 250, "PYTHONPATH": str(tmp_path)}
    done = ringfence("report", "--study", "site", "--out", "out", "--json", **where)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["page"] == "out/report.html"
    assert said["figures"] == ["out/figures/rates.svg", "out/figures/rates.png"]
    assert set(said["missing"]) == {"models", "variants", "stages", "buckets", "wires", "sizes"}
    assert all((tmp_path / name).stat().st_size for name in (said["page"], *said["figures"]))


def test_without_a_study_it_says_how_to_make_one(tmp_path: Path) -> None:
    done = ringfence("report", folder=tmp_path)
    assert done.returncode == 2
    assert "ringfence study" in done.stderr
    assert not (tmp_path / "study-results").exists()


def test_a_page_that_cannot_be_written_is_an_error_and_no_trace(tmp_path: Path) -> None:
    write_study(tmp_path / "study-results", everything()[:4])
    (tmp_path / "file").write_text("in the way")
    done = ringfence("report", "--out", "file/report", folder=tmp_path)
    assert done.returncode == 2
    assert "cannot write the report" in done.stderr


@pytest.mark.parametrize("word", ["examples:", "--study", "--out", "study-results"])
def test_the_help_teaches(word: str) -> None:
    assert word in ringfence("report", "--help").stdout
