"""The three layers: each made from the one before, the same bytes every time, and only when something has changed."""

from __future__ import annotations

import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.tests.unit import study_samples
from ringfence.errors import ConfigurationError
from ringfence_lab.study import query
from ringfence_lab.study import summary_table as table
from ringfence_lab.study.folder import Folder, replaced
from ringfence_lab.study.schema import SUMMARY, TIDY, SchemaError, batches, opened
from ringfence_lab.study.summary import summarise, summary_of
from ringfence_lab.study.tidy import tidy

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "study")
    draw = random.Random(3)
    for size in (4096, 65536, 1 << 20):
        study_samples.write(made, study_samples.cell(size), 7, draw)
    return made


def tables(folder: Folder) -> list[bytes]:
    return [path.read_bytes() for path in (folder.tidy, folder.summary, folder.summary_json, folder.machines)]


def make(folder: Folder) -> tuple[bool, bool]:
    return tidy(folder), summarise(folder)


def tidy_rows(folder: Folder) -> list[dict[str, Any]]:
    return list(query.rows(folder.tidy, TIDY, {}))


def test_a_row_for_each_round_and_variant_with_what_was_measured(folder: Folder) -> None:
    make(folder)
    rows = tidy_rows(folder)
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
        assert str(row["date"]) == "2026-11-15 12:00:00+00:00"


def test_the_summary_says_what_the_rounds_say(folder: Folder) -> None:
    make(folder)
    rows = list(query.rows(folder.summary, SUMMARY, {"size": [65536], "variant": ["ringfence", "gloo-b"]}))
    assert [row["variant"] for row in rows] == ["gloo-b", "ringfence"]
    (path,) = (file for file in folder.raw_files() if "64KiB" in file.name)
    rounds = [json.loads(line)["samples"] for line in path.read_text().splitlines()[1:]]
    ratios = [
        2 * each["ringfence"]["seconds"] / (each["gloo-a"]["seconds"] + each["gloo-b"]["seconds"]) for each in rounds
    ]
    sealed = rows[1]
    assert sealed["rounds"] == 7
    assert sealed["seconds"] == statistics.median(each["ringfence"]["seconds"] for each in rounds)
    assert sealed["ratio"] == pytest.approx(statistics.median(ratios))
    assert sealed["ratio_low"] <= sealed["ratio"] <= sealed["ratio_high"]
    assert sealed["scored"] == (sealed["resolution"] <= 0.10 and sealed["rounds"] >= 5)
    assert json.loads(folder.summary_json.read_text()) == list(query.rows(folder.summary, SUMMARY, {}))
    assert json.loads(folder.machines.read_text())["m1"]["cores"] == 2


def test_layers_are_made_once_and_the_same_bytes_whenever_they_are_made_again(folder: Folder) -> None:
    assert make(folder) == (True, True)
    first = tables(folder)
    assert make(folder) == (False, False)
    for gone in (folder.tidy, folder.summary, folder.summary_json, folder.machines):
        gone.unlink()
        assert any(make(folder))
        assert tables(folder) == first


def test_a_new_round_makes_both_layers_anew(folder: Folder) -> None:
    make(folder)
    study_samples.write(folder, study_samples.cell(4096), 2, random.Random(4))
    assert make(folder) == (True, True)
    assert [row["rounds"] for row in query.rows(folder.summary, SUMMARY, {"size": [4096]})] == [9] * 4


@pytest.mark.parametrize("chunk", [1, 5, 84, 1000])
def test_rows_do_not_depend_on_chunks(folder: Folder, chunk: int) -> None:
    tidy(folder)
    whole = tidy_rows(folder)
    folder.tidy.unlink()
    tidy(folder, chunk)
    assert tidy_rows(folder) == whole


@settings(deadline=None)
@given(cut=st.integers(min_value=1, max_value=400))
def test_a_torn_last_line_does_not_count(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """Wherever a kill cut the last line, the rows are those of the lines before it."""
    folder = Folder(tmp_path_factory.mktemp("study"))
    path = study_samples.write(folder, study_samples.cell(4096, ("gloo-a", "gloo-b")), 2, random.Random(5))
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    path.write_bytes(whole[: -min(cut, last)])
    tidy(folder)
    assert [row["round"] for row in tidy_rows(folder)] == [0, 0]


def test_rounds_of_other_machines_and_other_code_are_never_put_together(folder: Folder) -> None:
    what = study_samples.cell(4096)
    study_samples.write(folder, what, 3, random.Random(6), machine="m2", source="ffffffffffff")
    make(folder)
    rows = list(query.rows(folder.summary, SUMMARY, {"size": [4096]}))
    assert {(row["machine"], row["source"], row["rounds"]) for row in rows} == {("m2", "ffffffffffff", 3)}
    assert set(json.loads(folder.machines.read_text())) == {"m1", "m2"}
    study_samples.write(folder, what, 1, random.Random(7))  # back on the first, with all that was measured there
    make(folder)
    rows = list(query.rows(folder.summary, SUMMARY, {"size": [4096]}))
    assert {(row["machine"], row["rounds"]) for row in rows} == {("m1", 8)}


@pytest.mark.parametrize(("rounds", "scored"), [(1, False), (4, False), (5, True), (7, True)])
def test_few_rounds_are_not_scored_however_alike_they_are(tmp_path: Path, rounds: int, scored: bool) -> None:
    folder = Folder(tmp_path / "study")
    path = study_samples.write(folder, study_samples.cell(4096), rounds, random.Random(9))
    path.write_text(re.sub(r'"seconds": [\d.]+', '"seconds": 0.01', path.read_text()))
    make(folder)
    rows = list(query.rows(folder.summary, SUMMARY, {}))
    assert {(row["rounds"], row["resolution"], row["scored"]) for row in rows} == {(rounds, 0.0, scored)}
    assert ("not scored: fewer than 5 rounds" in table.summary(rows)) is not scored


def test_a_file_without_a_round_has_no_rows(folder: Folder) -> None:
    study_samples.write(folder, study_samples.cell(8192), 0, random.Random(8))
    make(folder)
    assert len(tidy_rows(folder)) == 3 * 7 * 4


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
        tidy(folder)
    assert path.name in str(error.value)


def test_a_sample_of_the_wrong_type_is_refused(folder: Folder) -> None:
    path = folder.raw_files()[0]
    path.write_text(path.read_text().replace('"repeats": 3', '"repeats": 3, "seconds": "soon"'))
    with pytest.raises(SchemaError, match="soon"):
        tidy(folder)
    assert not folder.tidy.exists()


def test_the_schema_is_checked_when_a_layer_is_read(folder: Folder) -> None:
    make(folder)
    table = pq.read_table(folder.tidy)
    pq.write_table(table.drop_columns(["busy"]), folder.tidy)
    with pytest.raises(SchemaError, match="rebuild"):
        opened(folder.tidy, TIDY)
    folder.tidy.write_bytes(b"something else")
    with pytest.raises(SchemaError, match="rebuild"):
        opened(folder.tidy, TIDY)
    assert make(folder) == (True, False)  # made again, and the same as before
    assert pq.read_table(folder.tidy) == table


@pytest.mark.parametrize(("column", "value", "said"), [
    ("workers", None, "workers is missing"),
    ("seconds", 0.0, "above zero"),
    ("seconds", float("nan"), "finite"),
    ("round", 2**40, "too large"),
])  # fmt: skip
def test_values_that_cannot_be_are_refused(folder: Folder, column: str, value: object, said: str) -> None:
    make(folder)
    rows = tidy_rows(folder)[:3]
    assert next(batches(iter(rows), TIDY, 5, "a test")).num_rows == 3
    rows[1][column] = value
    with pytest.raises(SchemaError, match=said):
        next(batches(iter(rows), TIDY, 5, "a test"))


def test_a_variant_that_is_not_in_every_round_is_compared_in_its_own(folder: Folder) -> None:
    make(folder)
    rows = [row for row in tidy_rows(folder) if row["size"] == 4096]
    some = [row for row in rows if row["variant"] != "ringfence" or row["round"] in (1, 4)]
    lines = {row["variant"]: row for row in summary_of(some)}
    assert lines["ringfence"]["rounds"] == 2
    assert lines["gloo-a"]["rounds"] == 7
    assert list(summary_of([row for row in rows if row["variant"] != "gloo-a"])) == []


def test_a_query_takes_values_and_nothing_else(folder: Folder) -> None:
    make(folder)
    found = list(query.rows(folder.summary, SUMMARY, {"variant": ["ringfence", "x' OR 1=1 --"], "model": [None]}))
    assert len(found) == 3
    assert list(query.rows(folder.summary, SUMMARY, {"variant": ["x' OR '1'='1"]})) == []
    with pytest.raises(ConfigurationError, match="no column is called"):
        list(query.rows(folder.summary, SUMMARY, {"1=1; --": [1]}))
    with pytest.raises(ConfigurationError, match="is no int32"):
        list(query.rows(folder.summary, SUMMARY, {"workers": ["two"]}))


def test_half_a_file_never_takes_the_place_of_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "layer"
    path.write_bytes(b"whole")
    with contextlib.suppress(RuntimeError), replaced(path) as file:
        file.write(b"ha")
        raise RuntimeError("the disk is full")
    assert path.read_bytes() == b"whole"
    with replaced(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def peak_of(rows: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "lab.tests.unit.study_samples", str(rows)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=280)
    result: dict[str, Any] = json.loads(done.stdout)
    print(result)
    return result


@pytest.mark.processes
@pytest.mark.nightly
@pytest.mark.long
def test_memory_does_not_grow_with_the_rows(full: bool) -> None:
    """The raw samples of the larger study take 25 MB more, or 350."""
    few, many = (100_000, 1_000_000) if full else (30_000, 90_000)
    small, large = peak_of(few), peak_of(many)
    assert large["rows"]["tidy"] == many
    assert large["peak_mib"] < small["peak_mib"] * 1.25
