"""What the report reads of a study's folder, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringfence.errors import ConfigurationError
from ringfence.report.study import read
from tests.pure.report_samples import FACTS, RUN, cell, everything, write_study


def test_every_row_is_a_line_of_its_cell(tmp_path: Path) -> None:
    rows = everything()
    study = read(write_study(tmp_path, rows))
    assert sum(len(cell.lines) for cell in study.cells) == len(rows)
    assert study.facts["cpu"] == FACTS["cpu"]
    one = next(each for each in study.cells if each.name == "gpt2-2w")
    assert one.lines["ringfence"].ratio is not None
    assert one.lines["ringfence"].ratio.median == pytest.approx(0.99)
    assert one.gloo is not None
    assert one.gloo.median == 1.5
    assert one.lines["ringfence-profiled"].stages["seal"] == pytest.approx(0.18)  # seconds, from nanoseconds


def test_every_run_is_found_in_the_raw_files_among_many_samples(tmp_path: Path) -> None:
    folder = write_study(tmp_path, cell("one", 1.0, {"ringfence": 1.1}, operation="all_reduce", size=4096))
    (folder / "raw").mkdir()
    begins = [
        {"run": str(n), "machine": FACTS, "command": f"ringfence study {n}", "date": f"2026-01-0{n}"} for n in (1, 2)
    ]
    sample = {"run": "1", "case": {"kind": "collective"}, "round": 0, "samples": {}}
    lines = [json.dumps(each) + "\n" for each in (begins[0], sample, sample, begins[1], sample)]
    (folder / "raw" / "one.jsonl").write_text("".join(lines) + '{"run": "3", "mach')  # killed while it wrote
    study = read(folder)
    assert [(run.command, run.date) for run in study.runs_of(study.cells)] == [
        ("ringfence study 1", "2026-01-01"),
        ("ringfence study 2", "2026-01-02"),
    ]


def test_cells_of_two_machines_are_never_put_together(tmp_path: Path) -> None:
    old = cell("old", 1.0, {"ringfence": 5.0}, machine="old", operation="all_reduce", size=4096)
    new = cell("new", 1.0, {"ringfence": 1.1}, machine="new", operation="all_reduce", size=4096)
    folder = write_study(tmp_path, old + new)
    dates = {"old": "2026-01-01", "new": "2026-02-01"}
    machines = {name: {**FACTS, **RUN, "date": date} for name, date in dates.items()}
    (folder / "summary" / "machines.json").write_text(json.dumps(machines))
    study = read(folder)
    assert [each.name for each in study.cells] == ["new"]
    assert {row["cell"] for row in study.rows} == {"new"}
    assert study.left_out == 1


def test_a_folder_without_a_study_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="ringfence study"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["not json", "{}", "[]", "[1]"])
def test_a_summary_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    write_study(tmp_path, [])
    (tmp_path / "summary" / "cells.json").write_text(text)
    with pytest.raises(ConfigurationError, match="ringfence study"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("column", "value"), [("seconds", None), ("seconds", "1"), ("resolution", float("nan")), ("rounds", None)]
)
def test_a_row_that_lacks_a_number_is_refused_by_its_place(tmp_path: Path, column: str, value: object) -> None:
    rows = everything()
    rows[3][column] = value
    with pytest.raises(ConfigurationError, match="row 4"):
        read(write_study(tmp_path, rows))


def test_a_row_that_lacks_a_column_is_refused(tmp_path: Path) -> None:
    rows = everything()
    del rows[0]["wire"]
    with pytest.raises(ConfigurationError, match="wire"):
        read(write_study(tmp_path, rows))
