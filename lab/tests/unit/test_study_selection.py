"""Which rounds the layers show, when a raw file holds those of several machines or versions of the code."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from lab.tests.unit import study_samples
from ringfence_lab.study import selection
from ringfence_lab.study.cells import Cell
from ringfence_lab.study.folder import Folder
from ringfence_lab.study.summary import summarise


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "study")
    study_samples.write(made, study_samples.cell(4096), 7, random.Random(3))
    return made


def tables(folder: Folder) -> list[bytes]:
    return [path.read_bytes() for path in (folder.summary, folder.machines)]


def shown_rows(folder: Folder, what: Cell) -> set[tuple[str, int]]:
    summarise(folder)
    rows = json.loads(folder.summary.read_text())
    return {(row["machine"], row["rounds"]) for row in rows if row["cell"] == what.name}


def test_new_code_that_was_stopped_on_the_way_takes_nothing_away(folder: Folder) -> None:
    """What a study does for each cell: hold, add rounds, show."""
    what = study_samples.cell(4096)
    path, case = folder.raw / f"{what.name}.jsonl", {**what.settings, "machine": "m2"}
    for added in (1, 3):  # stopped, and stopped again
        selection.hold(path, "run", case)
        study_samples.write(folder, what, added, random.Random(added), machine="m2")
        assert shown_rows(folder, what) == {("m1", 7)}
    assert selection.show(path, "run", case, study_samples.DATE)
    assert shown_rows(folder, what) == {("m2", 4)}
    assert not selection.show(path, "run", case, study_samples.DATE)  # it is shown already


def test_back_on_the_first_machine_its_rounds_are_shown_again_and_by_a_rebuild_too(folder: Folder) -> None:
    what = study_samples.cell(4096)
    study_samples.write(folder, what, 9, random.Random(6), machine="m2")
    assert shown_rows(folder, what) == {("m2", 9)}
    path = folder.raw / f"{what.name}.jsonl"
    assert selection.show(path, "run", {**what.settings, "machine": "m1"}, study_samples.DATE)
    assert shown_rows(folder, what) == {("m1", 7)}
    before = tables(folder)
    for gone in (folder.summary, folder.machines):
        gone.unlink()
    summarise(folder)
    assert tables(folder) == before


def test_nothing_is_noted_where_a_file_holds_one_machine_only(folder: Folder) -> None:
    what = study_samples.cell(4096)
    path, case = folder.raw / f"{what.name}.jsonl", {**what.settings, "machine": "m1"}
    before = path.read_bytes()
    selection.hold(path, "run", case)
    assert not selection.show(path, "run", case, study_samples.DATE)
    assert path.read_bytes() == before
    selection.hold(folder.raw / "not-there.jsonl", "run", case)
    assert not (folder.raw / "not-there.jsonl").exists()
