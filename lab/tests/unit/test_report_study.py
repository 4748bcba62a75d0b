"""What the report reads of a study's folder, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.tests.unit.report_samples import FACTS, RUN, Row, cell, everything, write_study
from ringfence.errors import ConfigurationError
from ringfence_lab.report.study import read

Line = dict[str, Any]


def one_cell(name: str = "one", **others: Any) -> list[Row]:
    return cell(name, 1.0, {"ringfence": 1.1}, operation="all_reduce", size=4096, **others)


def test_every_row_is_a_line_of_its_cell(tmp_path: Path) -> None:
    rows = everything()
    study = read(write_study(tmp_path, rows))
    assert sum(len(cell.lines) for cell in study.cells) == len(rows)
    assert study.facts["cpu"] == FACTS["cpu"]
    one = next(each for each in study.cells if each.name == "gpt2-2w")
    assert one.lines["ringfence"].ratio is not None
    assert one.lines["ringfence"].ratio.median == pytest.approx(0.99)
    assert one.lines["ringfence-profiled"].stages["seal"] == pytest.approx(0.18)  # seconds, from nanoseconds


def begun(run: str, date: str, **facts: object) -> Line:
    return {"run": run, "machine": {**FACTS, **facts}, "command": f"ringfence study {run}", "date": date}


def measured(run: str, machine: str = "m") -> Line:
    return {"run": run, "case": {"kind": "collective", "machine": machine}, "round": 0, "samples": {}}


def write_raw(folder: Path, name: str, *lines: Line, rest: str = "") -> None:
    (folder / "raw").mkdir(exist_ok=True)
    (folder / "raw" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)


def test_every_run_is_found_in_the_raw_files_among_many_samples(tmp_path: Path) -> None:
    folder = write_study(tmp_path, one_cell())
    lines = (begun("1", "2026-01-01"), measured("1"), measured("1"), begun("2", "2026-01-02"), measured("2"))
    write_raw(folder, "one", *lines, rest='{"run": "3", "mach')  # killed while it wrote
    study = read(folder)
    assert [(run.command, run.date) for run in study.runs_of(study.cells)] == [
        ("ringfence study 1", "2026-01-01"),
        ("ringfence study 2", "2026-01-02"),
    ]


def test_runs_of_another_machine_or_without_a_round_are_not_named(tmp_path: Path) -> None:
    folder = write_study(tmp_path, one_cell())
    others = (begun("2", "2026-01-02", cpu="another"), measured("2", "other"), begun("3", "2026-01-03", cpu="third"))
    write_raw(folder, "one", begun("1", "2026-01-01"), measured("1"), *others)
    study = read(folder)
    assert [run.command for run in study.runs_of(study.cells)] == ["ringfence study 1"]
    assert study.facts["cpu"] == FACTS["cpu"]


def test_a_raw_file_without_rounds_of_this_machine_leaves_what_the_summary_knows(tmp_path: Path) -> None:
    folder = write_study(tmp_path, one_cell())
    write_raw(folder, "one", begun("2", "2026-01-02"), measured("2", "other"))
    study = read(folder)
    assert [run.date for run in study.runs_of(study.cells)] == [RUN["date"]]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "3",
        "[]",
        '{"run": "1"}',
        '{"run": "1", "machine": {}, "date": "2026-01-01"}',
        '{"run": "1", "machine": "<b>", "command": "c", "date": "2026-01-01"}',
        '{"run": "1", "machine": {}, "command": 3, "date": "2026-01-01"}',
        '{"run": "1", "case": {}}',
        '{"run": "1", "case": 3}',
        '{"run": "1", "shown": null}',
        '{"case": {"machine": "m"}}',
    ],
)
def test_a_line_that_is_none_is_refused_with_its_file_and_place(tmp_path: Path, line: str) -> None:
    folder = write_study(tmp_path, one_cell())
    write_raw(folder, "one", begun("1", "2026-01-01"), measured("1"), rest=line + "\n")
    with pytest.raises(ConfigurationError, match=r"one\.jsonl, line 3: .*move the file away"):
        read(folder)


@pytest.mark.parametrize("text", ["[]", "[1]", '{"m": 3}', '{"m": {"cores": 2}}', '{"m": {"command": 1, "date": "d"}}'])
def test_machines_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    folder = write_study(tmp_path, one_cell())
    (folder / "summary" / "machines.json").write_text(text)
    if text == "[]":  # empty, as in a study of nothing
        assert read(folder).facts == {}
        return
    with pytest.raises(ConfigurationError, match=r"machines\.json.*ringfence study rebuild"):
        read(folder)


def test_what_a_study_asked_for_last_is_newer_than_what_was_measured_before(tmp_path: Path) -> None:
    """Back on the first machine nothing is measured; a cell that only the second one has does not hide the others."""
    first, second = one_cell("one"), one_cell("two", machine="other")
    folder = write_study(tmp_path, first + second)
    shown = {"run": "3", "shown": {"machine": "m"}, "date": "2026-01-03"}
    write_raw(folder, "two", begun("2", "2026-01-02"), measured("2", "other"))
    lines = (begun("1", "2026-01-01"), measured("1"), begun("2", "2026-01-02"), measured("2", "other"))
    write_raw(folder, "one", *lines)
    assert [each.name for each in read(folder).cells] == ["two"]
    write_raw(folder, "one", *lines, shown)
    assert [each.name for each in read(folder).cells] == ["one"]


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


@pytest.mark.parametrize(("column", "value"), [
    ("workers", "2\"><script>alert(1)</script>"), ("workers", 2.0), ("workers", True), ("workers", None),
    ("hosts", "../../x"), ("size", "4096"), ("size", 1.5), ("rate_bits", "1<b>"), ("operation", 3), ("model", ["gpt2"]),
    ("strategy", {}), ("device", 1), ("kind", None), ("wire", None), ("busy", 0), ("busy", "no"), ("scored", 1),
    ("bucket_mb", "25"), ("cell", 3), ("variant", None), ("machine", 3), ("source", 1), ("rounds", "7"),
    ("scaled", "12"), ("ratio", "1"), ("ratio_low", None), ("seconds", True), ("seconds", float("inf")),
    ("seconds", 10**400), ("stage_seal", "1"),
])  # fmt: skip
def test_a_value_of_another_type_is_refused_with_what_to_do(tmp_path: Path, column: str, value: object) -> None:
    rows = everything()
    rows[3][column] = value
    with pytest.raises(ConfigurationError, match=r"row 4 of .*ringfence study rebuild"):
        read(write_study(tmp_path, rows))


@pytest.mark.parametrize(("rounds", "few"), [(1, True), (4, True), (5, False)])
def test_a_cell_with_few_rounds_does_not_count_whatever_its_row_says(tmp_path: Path, rounds: int, few: bool) -> None:
    (one,) = read(write_study(tmp_path, one_cell(rounds=rounds))).cells
    assert (one.few, one.scored) == (few, not few)


def test_a_row_that_lacks_a_column_is_refused(tmp_path: Path) -> None:
    rows = everything()
    del rows[0]["wire"]
    with pytest.raises(ConfigurationError, match="wire"):
        read(write_study(tmp_path, rows))
