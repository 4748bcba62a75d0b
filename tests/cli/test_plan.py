"""`ringfence plan` as a user meets it: without torch, quickly, in words and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import ringfence
from tests.pure.plan_rows import synthetic

WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "numpy", "pyarrow", "matplotlib"):
            raise ImportError(f"{name} is not to be imported")
sys.meta_path.insert(0, Blocked())
from ringfence.cli import main
sys.exit(main(sys.argv[1:]))
"""


def bare(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process in which torch and its kin cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True, timeout=60, cwd=folder
    )


def answered(*arguments: str, folder: Path | None = None) -> Any:
    done = bare(*arguments, "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def study(folder: Path) -> Path:
    """A folder with the summary of a study, made of a known machine's prices."""
    summary = folder / "results" / "summary"
    summary.mkdir(parents=True)
    (summary / "cells.json").write_text(json.dumps(synthetic()))
    (summary / "machines.json").write_text(json.dumps({"m": {"cores": 2}}))
    return folder / "results"


def test_one_point_without_torch() -> None:
    start = time.monotonic()
    done = bare("plan", "--model", "gpt2-xl", "--hardware", "tdx-100g", "--workers", "64")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 10  # under one second on an idle machine
    for words in (
        "64 workers",
        "plaintext, same schedules",
        "sealed hop by hop",
        "dominated by",
        "recommended",
        "assumed",
    ):
        assert words in done.stdout


def test_a_price_in_json_adds_up() -> None:
    found = answered("plan", "--model", "gpt2", "--hardware", "snp-25g", "--workers", "8")
    (point,) = found["points"]
    sealed = point["ways"]["ringfence"]
    assert sum(sealed["terms"].values()) == pytest.approx(sealed["seconds"])
    assert point["sealing_over_plaintext"] == pytest.approx(sealed["seconds"] / point["ways"]["plaintext"]["seconds"])
    assert found["assumed"]


def test_a_sweep_with_a_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "scale.svg"
    done = ringfence("plan", "--model", "gpt2", "--hardware", "tdx-25g", "--chart", str(picture))
    assert done.returncode == 0, done.stderr
    assert "16,384" in done.stdout
    drawn = picture.read_text()
    assert all(words in drawn for words in ("workers", "seconds a step", "sealed hop by hop"))


def test_models_and_hardware_are_listed() -> None:
    listed = {each["name"]: each for each in answered("plan", "models")}
    assert listed["gpt2-xl"]["parameters"] == 1_557_611_200
    assert answered("plan", "hardware")["h100-cc"]["assumed"] > 5
    shown = bare("plan", "hardware", "blackwell").stdout
    assert "crossing.toll = 330 µs" in shown
    assert "assumed: " in shown


def test_published_figures_and_assumptions_are_printed() -> None:
    done = bare("plan", "published")
    assert done.returncode == 0, done.stderr
    for words in ("41.6", "3.03", "84.6 %", "assumed:", "abstract"):
        assert words in done.stdout


def test_the_runtimes_table_by_the_model() -> None:
    found = answered("plan", "table", "--hardware", "tdx-10g")
    assert set(found["proposed"]) == set(found["default"])
    assert found["differences"]


def test_calibrate_then_plan_here_then_validate(tmp_path: Path) -> None:
    folder = study(tmp_path)
    done = bare("plan", "calibrate", "--study", str(folder), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "here.toml" in done.stdout
    found = answered(
        "plan", "--hardware", "here", "--workers", "8", "--model", "gpt2", "--compute", "1.5", folder=tmp_path
    )
    assert "gloo" in found["points"][0]["ways"]
    checked = answered("plan", "validate", "--study", str(folder), folder=tmp_path)
    assert checked["scored_cells"] > 10
    assert checked["ratio"]["median_error"] < 0.1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hardware", "cray"], "no hardware profile"),
        (["--hardware", "here"], "ringfence plan calibrate"),
        (["--model", "gpt5"], "ringfence plan models"),
        (["--workers", "0"], "whole number"),
        (["--compute", "0"], "above zero"),
        (["--chart", "scale.doc"], ".svg or .png"),
        (["calibrate", "--study", "nowhere"], "ringfence study"),
    ],
)
def test_mistakes_are_told_with_a_way_out(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = bare("plan", *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
