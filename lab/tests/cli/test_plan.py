"""`ringfence plan` as a user meets it: without torch, quickly, in words and as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.tests.unit.plan_rows import synthetic, tee_rows
from ringfence.errors import ConfigurationError
from ringfence_lab.cli.plan import read_study
from ringfence_lab.cli.plan_checks import validation_summary
from ringfence_lab.plan.validate import validate
from tests.cli.command import ringfence
from tests.limits import HANG

WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError(f"{name} is not to be imported")
sys.meta_path.insert(0, Blocked())
from ringfence.cli import main
code = main(sys.argv[1:])
assert not {"torch", "transformers", "matplotlib"} & sys.modules.keys()
sys.exit(code)
"""


def bare(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process in which torch and its kin cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True, timeout=HANG, cwd=folder
    )


def answered(*arguments: str, folder: Path | None = None) -> Any:
    done = bare(*arguments, "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def study(folder: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    """A folder with the summary of a study, made of a known machine's costs."""
    summary = folder / "results" / "summary"
    summary.mkdir(parents=True)
    (summary / "cells.json").write_text(json.dumps(synthetic() if rows is None else rows))
    facts = {"cores": 2, "command": "ringfence study", "date": "2026-01-02T03:04:05+00:00"}
    (summary / "machines.json").write_text(json.dumps({"m": facts}))
    return folder / "results"


def test_one_point_without_torch() -> None:
    done = bare("plan", "--model", "gpt2-xl", "--hardware", "tdx-100g", "--workers", "64")
    assert done.returncode == 0, done.stderr
    for words in (
        "64 workers",
        "plaintext, same schedules",
        "sealed hop by hop",
        "dominated by",
        "recommended",
        "assumed",
    ):
        assert words in done.stdout


def test_a_cost_in_json_adds_up() -> None:
    found = answered("plan", "--model", "gpt2", "--hardware", "snp-25g", "--workers", "8")
    (point,) = found["points"]
    sealed = point["variants"]["ringfence"]
    assert sum(sealed["terms"].values()) == pytest.approx(sealed["seconds"])
    assert point["sealing_over_plaintext"] == pytest.approx(
        sealed["seconds"] / point["variants"]["plaintext"]["seconds"]
    )
    assert found["assumed"]


def test_a_sweep_shows_its_progress_on_a_terminal() -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "ringfence.cli", "plan", "--model", "gpt2", "--sweep"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    shown = b""
    with os.fdopen(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # EIO at the end
        while part := terminal.read(1 << 16):
            shown += part
    output, _ = running.communicate(timeout=HANG)
    assert running.returncode == 0
    assert b"16,384" in output
    assert b"predicting" in shown


def test_models_and_hardware_are_listed() -> None:
    listed = {each["name"]: each for each in answered("plan", "models")}
    assert listed["gpt2-xl"]["parameters"] == 1_557_611_200
    assert answered("plan", "hardware")["h100-cc"]["assumed"] > 5
    shown = bare("plan", "hardware", "blackwell").stdout
    assert "device.copy_overhead = 330 µs" in shown
    assert "assumed: " in shown


def test_published_figures_and_assumptions_are_printed() -> None:
    done = bare("plan", "published")
    assert done.returncode == 0, done.stderr
    for words in ("41.6", "3.03", "8.68", "assumed:", "abstract", "decided by", "h100-cc-node"):
        assert words in done.stdout


@pytest.mark.nightly
def test_calibrate_then_plan_here_then_validate(tmp_path: Path) -> None:
    folder = study(tmp_path)
    done = bare("plan", "calibrate", "--study", str(folder), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "here.toml" in done.stdout
    assert "date = '2026-01-02'" in (tmp_path / "here.toml").read_text()  # of the study, not of its file
    found = answered(
        "plan", "--hardware", "here", "--workers", "8", "--model", "gpt2", "--compute", "1.5", folder=tmp_path
    )
    assert "gloo" in found["points"][0]["variants"]
    checked = answered("plan", "validate", "--study", str(folder), folder=tmp_path)
    assert checked["scored_cells"] > 10
    assert checked["ratio"]["median_error"] < 0.1
    assert checked["steps"]["scored_cells"] + checked["collectives"]["scored_cells"] == checked["scored_cells"]


def test_simulated_gpu_tees_are_calibrated(tmp_path: Path) -> None:
    folder = str(study(tmp_path, tee_rows()))
    done = bare("plan", "calibrate", "--study", folder, "--to", "tee.toml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "tee.toml").read_text()
    assert "copy_overhead = { value = 330" in text and "date = '2026-01-02'" in text
    found = answered("plan", "--hardware", "tee", "--workers", "4", "--model", "gpt2", folder=tmp_path)
    assert found["points"][0]["variants"]["hop-by-hop"]["dominant"] == "host-device copy"


def test_a_study_with_several_presets_or_none_says_what_to_do(tmp_path: Path) -> None:
    folder = study(tmp_path, [*tee_rows(), *tee_rows("software")])
    calibrate = ("plan", "calibrate", "--study", str(folder))
    done = bare(*calibrate, folder=tmp_path)
    assert done.returncode == 2 and "choose one with --preset" in " ".join(done.stderr.split())
    assert bare(*calibrate, "--preset", "software", folder=tmp_path).returncode == 0
    none = bare("plan", "calibrate", "--study", str(study(tmp_path / "other")), "--preset", "h100")
    assert none.returncode == 2 and "it has no gpu-tee cells" in " ".join(none.stderr.split())


@pytest.mark.nightly
def test_a_full_disk_leaves_no_partial_profile(tmp_path: Path) -> None:
    folder = study(tmp_path)
    done = ringfence("plan", "calibrate", "--study", str(folder), folder=tmp_path, room=20)
    assert done.returncode == 2
    assert done.stderr == "ringfence: cannot write here.toml: File too large\n"
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.nightly
def test_a_validation_scores_free_communication_too() -> None:
    shown = validation_summary(validate(synthetic()))
    rows = [line.split("  ")[0] for line in shown.splitlines()[2:]]
    assert rows == ["collectives", "steps", "steps, were communication free"]
    only = validate([row for row in synthetic() if row["kind"] == "collective"])
    assert "free" not in validation_summary(only)


def test_the_machine_measured_last_is_read(tmp_path: Path) -> None:
    """As in the report of the same study, however many rows the older one has."""
    folder = study(tmp_path) / "summary"
    rows = synthetic()
    newer = [{**row, "cell": f"new-{row['cell']}", "machine": "n"} for row in rows if row["workers"] == 2]
    (folder / "cells.json").write_text(json.dumps([*rows, *newer]))
    machines = json.loads((folder / "machines.json").read_text())
    machines["n"] = {"cores": 3, "command": "ringfence study", "date": "2026-02-03T00:00:00+00:00"}
    (folder / "machines.json").write_text(json.dumps(machines))
    found, cores, date = read_study(folder.parent)
    assert {row["machine"] for row in found} == {"n"}
    assert (len(found), cores, date) == (len(newer), 3, "2026-02-03")
    (folder / "machines.json").unlink()
    with pytest.raises(ConfigurationError, match="ringfence study rebuild"):
        read_study(folder.parent)


def test_a_model_of_ones_own_by_count_or_tensors(tmp_path: Path) -> None:
    """None of them needs torch or transformers."""
    (tmp_path / "tensors.txt").write_text("1000x1000\n1000\n")
    for arguments, elements in (
        (("--parameters", "7e9"), 7_000_000_000),
        (("--tensors", "tensors.txt"), 1_001_000),
    ):
        found = answered("plan", *arguments, "--workers", "8", folder=tmp_path)
        (point,) = found["points"]
        assert point["variants"]["ringfence"]["seconds"] > 0
        shown = bare("plan", *arguments, "--workers", "8", folder=tmp_path).stdout
        assert f"({elements / 1e9:.3g} G parameters, float32)" in shown
        assert point["source"] in shown


def test_fsdp_is_predicted_beside_ddp() -> None:
    ddp, sharded = (
        answered("plan", "--model", "gpt2", "--workers", "8", "--strategy", strategy)["points"][0]
        for strategy in ("ddp", "fsdp")
    )
    assert (ddp["strategy"], sharded["strategy"]) == ("ddp", "fsdp")
    assert sharded["variants"]["ringfence"]["buckets"] == 13 + 12 + 13  # gathered, again but for the root, scattered
    assert sharded["variants"]["ringfence"]["seconds"] > ddp["variants"]["ringfence"]["seconds"]


def test_workers_of_a_machine_share_memory_and_only_what_leaves_it_is_sealed() -> None:
    command = ("plan", "--model", "gpt2", "--hardware", "tdx-25g", "--workers", "8")
    shown = bare(*command, "--workers-per-machine", "4").stdout
    assert "4 workers on a machine, which share memory; sealed between machines" in shown
    assert "share memory" not in bare(*command).stdout
    one, two, each = (
        answered(*command, *more)["points"][0]["variants"]["ringfence"]["terms"]
        for more in (("--workers-per-machine", "8"), ("--workers-per-machine", "4"), ())
    )
    assert one.get("crypto", 0.0) == 0.0 < two["crypto"] < each["crypto"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hardware", "cray"], "no hardware profile"),
        (["--workers-per-machine", "0"], "not a number from 1"),
        (["--hardware", "here"], "ringfence plan calibrate"),
        (["--model", "gpt5"], "ringfence plan models"),
        (["--strategy", "ring"], "choose from"),
        (["--strategy", "fsdp", "--bucket-cap-mb", "25"], "--bucket-cap-mb does not apply to --strategy fsdp"),
        (["--channels", "4"], "choose from 1, 2"),
        (["--unit-blocks", "2"], "--unit-blocks does not apply to --strategy ddp"),
        (["--model", "gpt2", "--parameters", "7e9"], "not allowed with argument"),
        (["--tensors", "nowhere.json"], "cannot read nowhere.json"),
        (["--workers", "0"], "not a number from 1"),
        (["--workers", "16385"], "from 1 to 16384"),
        (["--compute", "0"], "above zero"),
        (["--compute", "inf"], "finite"),
        (["--bucket-cap-mb", "inf"], "finite"),
        (["--bucket-cap-mb", "nan"], "finite"),
        (["calibrate", "--study", "nowhere"], "ringfence study"),
        (["calibrate", "--study", "nowhere", "--to", "nowhere/here.toml"], "in a folder that is there"),
        (
            ["calibrate", "--study", "nowhere", "--to", "taken.toml"],
            "taken.toml exists, and is not overwritten",
        ),
    ],
)
def test_mistakes_are_reported_with_a_remedy(arguments: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "taken.toml").write_text("mine")
    done = bare("plan", *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert (tmp_path / "taken.toml").read_text() == "mine"


def test_counts_are_those_of_the_schedules() -> None:
    text = bare("plan", "counts", "--collective", "all_gather", "--size", "1GiB", "--workers-per-machine", "8").stdout
    assert "16,384" in text and "0.15%" in text
    found = answered("plan", "counts")
    assert [each["workers"] for each in found] == [1 << power for power in range(1, 15)]
    assert found[-1]["rounds"] == 28 and found[-1]["device_copies"] == 4
    assert "whole number of float32" in bare("plan", "counts", "--size", "3").stderr


def test_int8_is_planned() -> None:
    command = ("plan", "--workers", "2", "--workers-per-machine", "1", "--hardware", "tdx-10g", "int8")
    done = ringfence(*command)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^1 Gbit/s +[\d.]+ ms +[\d.]+ ms +[23]\.\d\d$", done.stdout, re.M)
    assert re.search(r"int8 pays below [\d.]+ Gbit/s", done.stdout) and "shipped" in done.stdout
    measured = json.loads(ringfence(*command, "--measure", "--json").stdout)
    assert measured["codec"]["measured"] and measured["codec"]["quantise"] > measured["codec"]["read"] > 0
    assert [each["rate"] for each in measured["rates"]][:3] == [0.1, 0.5, 1.0]
    alone = ringfence("plan", "--workers", "1", "int8")
    assert alone.returncode == 2 and "one worker sends nothing" in alone.stderr


def test_regions_are_compared_by_rate_and_delay() -> None:
    text = bare("plan", "regions", "--elements", "1e6", "--seconds", "0.1").stdout
    assert "2.5 Gbit/s" in text and "DiLoCo, int8" in text and "*" in text
    found = answered("plan", "regions")
    assert len(found) == 8 and found[0]["DiLoCo"] < found[0]["int8"] < found[0]["float32"]
    for wrong in (["--sites", "1"], ["--round", "0"], ["--seconds", "inf"], ["--elements", "nan"]):
        assert "are above zero, and --sites is 2 to 64" in bare("plan", "regions", *wrong).stderr
