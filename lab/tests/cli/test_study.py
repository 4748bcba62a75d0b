"""`ringfence study` as a user runs it: killed twice and resumed, run twice, and never two at once."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence_lab.study import grid
from tests.cli.command import ringfence, ringfence_here
from tests.limits import HANG

GRID = """\
rounds = 8

[[cells]]
kind = "collective"
sizes = ["4KiB", "64KiB"]
workers = [2]
variants = ["ringfence"]

[[cells]]
kind = "trace"
models = ["resnet50"]
devices = ["cpu"]
flops = 1e14
most = "4MiB"
workers = [2]
variants = ["ringfence", "ringfence-profiled", "alone"]
"""
LAYERS = ("summary/cells.json", "summary/machines.json")


def layers(results: Path) -> list[bytes]:
    return [(results / name).read_bytes() for name in LAYERS]


def start(*arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """The command with a terminal to show its progress on."""
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "ringfence.cli", "study", *arguments]
    process = subprocess.Popen(command, stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    return process, terminal


def read_until(terminal: int, rounds: int, of: str = r"\d+") -> None:
    """Read the progress until so many rounds are done; a busy machine does not show each number."""
    shown = ""
    while not any(int(done) >= rounds for done in re.findall(rf"(\d+)/{of}", shown)):
        shown += os.read(terminal, 4096).decode(errors="replace")


def rounds_in(results: Path) -> dict[str, list[int]]:
    """The numbers of the whole lines of each cell's rounds."""
    found = {}
    for file in sorted((results / "raw").glob("*.jsonl")):
        whole = file.read_bytes().rpartition(b"\n")[0].splitlines()
        found[file.stem] = [record["round"] for line in whole if "round" in (record := json.loads(line))]
    return found


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that was killed twice, with its last line torn off once more by hand, and then left to finish."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "grid.toml").write_text(GRID)
    arguments = ("--grid", str(folder / "grid.toml"), "--results", str(folder / "results"))
    for reached in (3, 8):
        process, terminal = start(*arguments)
        try:
            read_until(terminal, reached)
            if reached == 3:  # a second one is refused while the first is there; stopped, it cannot finish meanwhile
                process.send_signal(signal.SIGSTOP)
                second = ringfence("study", *arguments)
                assert second.returncode == 2
                assert re.search(
                    rf"in use by process {process.pid} on \S+ since 20.*: ringfence study",
                    " ".join(second.stderr.split()),
                )
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            os.close(terminal)
    kept = rounds_in(folder / "results")
    assert sum(map(len, kept.values())) >= 11
    assert not (folder / "results" / LAYERS[0]).exists()
    torn = max((folder / "results" / "raw").glob("*.jsonl"), key=lambda file: file.stat().st_mtime)
    with torn.open("a") as file:
        file.write('{"run": "0123')
    done = ringfence("study", *arguments, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert f"{24 - sum(map(len, kept.values()))} rounds of" in done.stderr
    assert "all_reduce 4 KiB, 2 workers, loopback" in done.stdout
    assert f"`ringfence report --study {folder / 'results'}` shows them" in done.stdout
    assert re.search(r"^  ringfence +[\d.]+ (µs|ms) +[\d.]+ \[[\d.]+, [\d.]+\]", done.stdout, re.M)
    assert sorted(rounds_in(folder / "results").values()) == [list(range(8))] * 3
    return folder


def test_killed_and_resumed_it_has_the_tables_of_an_undisturbed_run_over_the_same_samples(study: Path) -> None:
    other = study / "other"
    shutil.copytree(study / "results" / "raw", other / "raw")
    done = ringfence("study", "rebuild", "--results", str(other))
    assert done.returncode == 0, done.stderr
    assert "rebuilt: summary" in done.stderr
    assert layers(other) == layers(study / "results")


def test_a_second_run_computes_nothing_new(study: Path) -> None:
    files = [file for file in (study / "results").rglob("*") if file.is_file() and file.name != "lock"]
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files}
    again = ringfence("study", "--grid", str(study / "grid.toml"), "--results", str(study / "results"))
    assert again.returncode == 0, again.stderr
    assert "nothing to do" in again.stderr
    assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files} == before


def of_another_machine(line: str) -> str:
    """A line of a raw file as if another machine had measured it."""
    record = json.loads(line)
    record["run"] = "0" * 8
    if "case" in record:
        record["case"]["machine"] = "elsewhere"
    return json.dumps(record) + "\n"


def machines_in(results: Path) -> set[tuple[str, int]]:
    rows = json.loads((results / "summary" / "cells.json").read_text())
    return {("elsewhere" if row["machine"] == "elsewhere" else "here", row["rounds"]) for row in rows}


def test_back_where_everything_was_measured_its_rounds_are_shown_again(study: Path) -> None:
    results = study / "back"
    shutil.copytree(study / "results" / "raw", results / "raw")
    for file in (results / "raw").iterdir():  # meanwhile another machine measured all cells, with a round less
        begin, *lines = file.read_text().splitlines()
        rounds = [line for line in lines if "case" in json.loads(line)]
        file.write_text(file.read_text() + "".join(map(of_another_machine, [begin, *rounds[:-1]])))
    assert ringfence("study", "rebuild", "--results", str(results)).returncode == 0
    assert machines_in(results) == {("elsewhere", 7)}
    done = ringfence("study", "--grid", str(study / "grid.toml"), "--results", str(results))
    assert done.returncode == 0, done.stderr
    assert "3 cells were shown as measured on another machine or with other code" in done.stderr
    assert "nothing to do" not in done.stderr
    assert "  8 rounds, Gloo / Gloo" in done.stdout
    assert machines_in(results) == {("here", 8)}
    before = layers(results)
    for name in LAYERS:
        (results / name).unlink()
    assert ringfence("study", "rebuild", "--results", str(results)).returncode == 0
    assert layers(results) == before


@pytest.mark.nightly
def test_new_code_stopped_on_the_way_leaves_what_was_shown(study: Path) -> None:
    results = study / "changed"
    (results / "raw").mkdir(parents=True)
    for file in (study / "results" / "raw").glob("*64KiB*"):
        lines = "".join(map(of_another_machine, file.read_text().splitlines()))
        (results / "raw" / file.name).write_text(lines)
    small = study / "small.toml"
    small.write_text(GRID.partition('[[cells]]\nkind = "trace"')[0].replace('"4KiB", ', ""))
    arguments = ("--grid", str(small), "--results", str(results))
    process, terminal = start(*arguments)
    try:
        read_until(terminal, 3, of="8")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(terminal)
    assert ringfence("study", "rebuild", "--results", str(results)).returncode == 0
    assert machines_in(results) == {("elsewhere", 8)}
    done = ringfence("study", *arguments)
    assert done.returncode == 0, done.stderr
    assert "1 of them are shown as measured on another machine or with other code until" in done.stderr
    assert machines_in(results) == {("here", 8)}


def test_a_row_has_what_was_measured(study: Path) -> None:
    rows = json.loads((study / "results" / "summary" / "cells.json").read_text())
    of_trace = {row["variant"]: row for row in rows if row["model"] == "resnet50"}
    profiled, alone = of_trace["ringfence-profiled"], of_trace["alone"]
    assert profiled["stage_seal"] > 0 and alone["stage_seal"] is None
    assert profiled["scaled"] > 1
    assert alone["ratio"] > 0


def test_the_list_says_what_would_be_measured_and_for_how_long(tmp_path: Path) -> None:
    done = ringfence("study", "--list", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d+ cells, about \d+ min on \d+ cores", done.stdout.splitlines()[-1])
    assert list(tmp_path.iterdir()) == []


def test_without_the_compiled_data_plane_the_profile_is_left_out_and_the_rest_is_measured(tmp_path: Path) -> None:
    trace = GRID.partition('[[cells]]\nkind = "trace"')[2]
    (tmp_path / "grid.toml").write_text(f'rounds = 2\n[[cells]]\nkind = "trace"{trace}')
    done = ringfence("study", "--grid", "grid.toml", folder=tmp_path, RINGFENCE_DATAPLANE="python", timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert (
        "ringfence-profiled is left out of 1 cells: it needs the compiled data plane; RINGFENCE_DATAPLANE"
        in " ".join(done.stderr.split())
    )
    rows = json.loads((tmp_path / "study-results" / "summary" / "cells.json").read_text())
    assert {row["variant"] for row in rows} == {"gloo-a", "gloo-b", "ringfence", "alone"}
    (machine,) = json.loads((tmp_path / "study-results" / "summary" / "machines.json").read_text()).values()
    assert machine["data_plane"] == "python"


def test_where_no_namespaces_can_be_made_it_does_not_say_that_all_was_measured(tmp_path: Path) -> None:
    cells = '[[cells]]\nkind = "collective"\nsizes = ["4KiB"]\nworkers = [2]\nhosts = 2\nvariants = ["ringfence"]\n'
    (tmp_path / "grid.toml").write_text(f"rounds = 1\n{cells}")
    for _ in range(2):
        done = ringfence("study", "--grid", "grid.toml", folder=tmp_path, PATH=str(tmp_path))  # without `ip` and `tc`
        assert done.returncode == 0, done.stderr
        assert "1 cells are skipped: network namespaces need root and iproute2" in done.stderr
        assert "nothing to do" not in done.stderr
    assert "the summary is up to date" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--grid", "nowhere.toml"), "cannot read the grid"),
        (("--grid", "wrong.toml", "--list"), "wrong.toml, block 1, modles: is unknown"),
        (("rebuild",), "contains no samples"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text('[[cells]]\nkind = "training"\nmodles = ["gpt2"]\nworkers = [2]\n')
    done = ringfence("study", *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_help_names_every_built_in_grid() -> None:
    assert {*grid.BUILT_IN} <= {*re.findall(r"[\w-]+", ringfence_here("study", "--help").stdout)}
