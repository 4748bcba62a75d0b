"""What the report reads of a study's folder, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.tests.unit.report_samples import FACTS, RUN, Row, cell, everything, write_study
from ringfence.errors import ConfigurationError
from ringfence_lab.report.study import read


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


@pytest.mark.parametrize("text", ["[]", "[1]", '{"m": 3}', '{"m": {"cores": 2}}', '{"m": {"command": 1, "date": "d"}}'])
def test_machines_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    folder = write_study(tmp_path, one_cell())
    (folder / "summary" / "machines.json").write_text(text)
    if text == "[]":  # empty, as in a study of nothing
        assert read(folder).facts == {}
        return
    with pytest.raises(ConfigurationError, match=r"machines\.json.*ringfence study rebuild"):
        read(folder)


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
    assert (study.left_out, study.days) == (1, "2026-02-01")
    machines["old"]["last_date"] = "2026-02-02"  # back on the first machine, whose rounds a study selected again
    (folder / "summary" / "machines.json").write_text(json.dumps(machines))
    study = read(folder)
    assert [each.name for each in study.cells] == ["old"]
    assert study.days == "2026-01-01 to 2026-02-02"


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
