"""The summary of a study: made from raw samples, the same bytes every time, and only when something has changed."""

from __future__ import annotations

import json
import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.tests.unit import study_samples
from ringfence.errors import ConfigurationError
from ringfence_lab.study import summary_table as table
from ringfence_lab.study.folder import Folder
from ringfence_lab.study.rounds import rows_of
from ringfence_lab.study.summary import summarise, summary_of


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "study")
    draw = random.Random(3)
    for size in (4096, 65536, 1 << 20):
        study_samples.write(made, study_samples.cell(size), 7, draw)
    return made


def tables(folder: Folder) -> list[bytes]:
    return [path.read_bytes() for path in (folder.summary, folder.machines)]


def measured_rows(folder: Folder) -> list[dict[str, Any]]:
    return [row for file in folder.raw_files() for row in rows_of(file, {})]


def summary_rows(folder: Folder, **settings: Any) -> list[dict[str, Any]]:
    found = json.loads(folder.summary.read_text())
    return [row for row in found if settings.items() <= row.items()]


def test_a_row_for_each_round_and_variant_with_what_was_measured(folder: Folder) -> None:
    rows = measured_rows(folder)
    assert len(rows) == 3 * 7 * 4
    path = folder.raw_files()[0]
    first = json.loads(path.read_text().splitlines()[1])
    for name, row in zip(study_samples.VARIANTS, rows, strict=False):  # in the order of the case, not of the turns
        sample = first["samples"][name]
        assert (row["cell"], row["variant"], row["round"]) == (path.stem, name, 0)
        assert (row["seconds"], row["cpu_seconds"], row["sent_bytes"]) == (sample["seconds"], sample["cpu"], 1000.5)
        stage = sample["mean"] * 0.125 * 1e9 if "stages" in sample else None
        assert row["stage_seal"] == row["stage_wait"] == stage
        assert (row["machine"], row["source"], row["scaled"]) == ("m1", "0123456789ab", 1.0)


def test_the_summary_says_what_the_rounds_say(folder: Folder) -> None:
    summarise(folder)
    (sealed,) = summary_rows(folder, size=65536, variant="ringfence")
    (path,) = (file for file in folder.raw_files() if "64KiB" in file.name)
    rounds = [json.loads(line)["samples"] for line in path.read_text().splitlines()[1:]]
    ratios = [
        2 * each["ringfence"]["seconds"] / (each["gloo-a"]["seconds"] + each["gloo-b"]["seconds"]) for each in rounds
    ]
    assert sealed["rounds"] == 7
    assert sealed["seconds"] == statistics.median(each["ringfence"]["seconds"] for each in rounds)
    assert sealed["ratio"] == pytest.approx(statistics.median(ratios))
    assert sealed["ratio_low"] <= sealed["ratio"] <= sealed["ratio_high"]
    assert sealed["scored"] == (sealed["resolution"] <= 0.10 and sealed["rounds"] >= 5)
    machine = json.loads(folder.machines.read_text())["m1"]
    assert (machine["cores"], machine["command"]) == (2, "ringfence study")
    assert machine["date"] == machine["last_date"] == study_samples.DATE


def test_the_summary_is_made_once_and_the_same_bytes_whenever_it_is_made_again(folder: Folder) -> None:
    assert summarise(folder)
    first = tables(folder)
    assert not summarise(folder)
    for path in (folder.summary, folder.machines):
        path.unlink()
        assert summarise(folder)
        assert tables(folder) == first
        path.write_bytes(b"something else")
        assert summarise(folder)
        assert tables(folder) == first


def test_a_new_round_makes_the_summary_anew(folder: Folder) -> None:
    summarise(folder)
    study_samples.write(folder, study_samples.cell(4096), 2, random.Random(4))
    assert summarise(folder)
    assert [row["rounds"] for row in summary_rows(folder, size=4096)] == [9] * 4


@settings(deadline=None)
@given(cut=st.integers(min_value=1, max_value=400))
def test_a_torn_last_line_does_not_count(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """Wherever a kill cut the last line, the rows are those of the lines before it."""
    folder = Folder(tmp_path_factory.mktemp("study"))
    path = study_samples.write(folder, study_samples.cell(4096, ("gloo-a", "gloo-b")), 2, random.Random(5))
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    path.write_bytes(whole[: -min(cut, last)])
    assert [row["round"] for row in measured_rows(folder)] == [0, 0]


def test_rounds_of_other_machines_and_other_code_are_never_put_together(folder: Folder) -> None:
    what = study_samples.cell(4096)
    study_samples.write(folder, what, 3, random.Random(6), machine="m2", source="ffffffffffff")
    summarise(folder)
    rows = summary_rows(folder, size=4096)
    assert {(row["machine"], row["source"], row["rounds"]) for row in rows} == {("m2", "ffffffffffff", 3)}
    assert set(json.loads(folder.machines.read_text())) == {"m1", "m2"}
    study_samples.write(folder, what, 1, random.Random(7))  # back on the first, with all that was measured there
    summarise(folder)
    rows = summary_rows(folder, size=4096)
    assert {(row["machine"], row["rounds"]) for row in rows} == {("m1", 8)}


@pytest.mark.parametrize(("rounds", "scored"), [(1, False), (4, False), (5, True), (7, True)])
def test_few_rounds_are_not_scored_however_alike_they_are(tmp_path: Path, rounds: int, scored: bool) -> None:
    folder = Folder(tmp_path / "study")
    path = study_samples.write(folder, study_samples.cell(4096), rounds, random.Random(9))
    path.write_text(re.sub(r'"seconds": [\d.]+', '"seconds": 0.01', path.read_text()))
    summarise(folder)
    rows = summary_rows(folder)
    assert {(row["rounds"], row["resolution"], row["scored"]) for row in rows} == {(rounds, 0.0, scored)}
    assert ("not scored: fewer than 5 rounds" in table.summary(rows)) is not scored


def test_a_file_without_a_round_has_no_rows(folder: Folder) -> None:
    study_samples.write(folder, study_samples.cell(8192), 0, random.Random(8))
    assert len(measured_rows(folder)) == 3 * 7 * 4
    summarise(folder)
    assert len(summary_rows(folder)) == 3 * 4


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{\n", "line 2: not JSON"),
        (b"3\n", "line 2: not a record"),
        (b'{"case": {}, "samples": {}}\n', "of no study"),
    ],
)
def test_what_is_no_sample_is_refused_with_its_place(folder: Folder, line: bytes, said: str) -> None:
    path = folder.raw_files()[0]
    start, *_ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(start + line)
    with pytest.raises(ConfigurationError, match=said) as error:
        summarise(folder)
    assert path.name in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("seconds", '"soon"', "seconds is 'soon', and no finite number"),
        ("seconds", "0.0", "above zero"),
        ("seconds", "NaN", "no finite number"),
        ("cpu", "null", "cpu is None"),
        ("sent", "true", "sent is True"),
    ],
)
def test_values_that_cannot_be_are_refused_with_their_line(folder: Folder, name: str, value: str, said: str) -> None:
    path = folder.raw_files()[0]
    path.write_text(path.read_text().replace('"repeats": 3', f'"repeats": 3, "{name}": {value}'))
    with pytest.raises(ConfigurationError, match=f"line 2: no sample of a study .*{said}"):
        summarise(folder)
    assert not folder.summary.exists()


def test_a_variant_that_is_not_in_every_round_is_compared_in_its_own(folder: Folder) -> None:
    rows = [row for row in measured_rows(folder) if row["size"] == 4096]
    some = [row for row in rows if row["variant"] != "ringfence" or row["round"] in (1, 4)]
    lines = {row["variant"]: row for row in summary_of(some)}
    assert lines["ringfence"]["rounds"] == 2
    assert lines["gloo-a"]["rounds"] == 7
    assert list(summary_of([row for row in rows if row["variant"] != "gloo-a"])) == []
