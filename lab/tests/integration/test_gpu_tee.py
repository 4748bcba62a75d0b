"""Steps on simulated GPU TEEs: the ring sums rightly in every mode, and the study measures, resumes and reports them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.tests.integration import ring_scenarios as scenarios
from ringfence_lab.bench.tee_variants import tee_of
from ringfence_lab.study import grid, tee_cost
from tests.cli.command import ringfence
from tests.limits import HANG
from tests.pool import Pool

MODES: dict[str, dict[str, bool] | None] = {
    "no TEE": None,
    "plain": {"confidential": False},
    "confidential": {},
    "direct": {"direct": True},
    "parallel authentication": {"parallel_authentication": True},
    "overlap": {"overlap": True},
    "all": {"direct": True, "parallel_authentication": True, "overlap": True},
}
GRID = """\
rounds = 2

[[cells]]
kind = "gpu-tee"
models = ["resnet50"]
presets = ["h100"]
workers = [2]
samples = 32
flops = 4e14
most = "2MiB"

[[cells]]
kind = "gpu-tee"
operations = ["copy"]
sizes = ["256KiB"]
presets = ["software"]
workers = [2]
variants = ["confidential"]
"""


Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a function in a process that has the devices."""
    with Pool() as pool:
        yield lambda function, *args: pool.check(function, world=1, backend=None, args=args, timeout=HANG)[0]


@pytest.mark.parametrize("mode", MODES)
def test_the_ring_sums_rightly_in_every_mode(run: Run, mode: str) -> None:
    run(scenarios.sums, 3, [1, 2, 7, 1000, 100_003], MODES[mode])


@pytest.mark.parametrize("devices", [2, 8])
def test_any_number_of_devices_forms_a_ring(run: Run, devices: int) -> None:
    run(scenarios.sums, devices, [5, 4096, 65_537], {})


@pytest.mark.parametrize("scenario", [scenarios.unordered, scenarios.hidden], ids=lambda scenario: scenario.__name__)
def test_steps_are_ordered(run: Run, scenario: Callable[[], None]) -> None:
    run(scenario)


def test_a_flipped_bit_ends_the_ring() -> None:
    with Pool() as pool:  # the devices are unusable afterwards
        pool.check(scenarios.corrupted, world=1, backend=None, timeout=HANG)


def simulated_seconds() -> dict[tuple[str | None, str], float]:
    """The simulated time of each ring and copy of the grid, by model and variant: no run is shorter."""
    found = {}
    for cell in grid.read(GRID, "the test"):
        model, operation = cell.settings["model"], cell.settings["operation"]
        for name in cell.settings["variants"]:
            tee = tee_of(name, cell.settings["tee"])
            found[model, name] = tee_cost.simulated(name, tee, 2, cell.trace, operation, cores=1)
    return found


@pytest.mark.nightly
def test_the_study_measures_resumes_and_reports_both_kinds_of_cells(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(GRID)
    arguments = ("study", "--grid", "grid.toml", "--results", "results")
    first = ringfence(*arguments, folder=tmp_path, timeout=HANG)
    assert first.returncode == 0, first.stderr
    assert "4 rounds of 2 cells are missing and will be measured" in first.stderr
    again = ringfence(*arguments, folder=tmp_path, timeout=HANG)
    assert "nothing to do" in again.stderr
    rows = json.loads((tmp_path / "results" / "summary" / "cells.json").read_text())
    step = {row["variant"]: row for row in rows if row["model"] == "resnet50"}
    switches = ("direct", "parallel-authentication", "overlap", "all")
    assert set(step) == {"plain", "plain-again", "confidential", *switches, "ringfence"}
    least = simulated_seconds()
    assert least["resnet50", "confidential"] > 5 * least["resnet50", "plain"]
    for row in rows:  # a busy machine makes nothing shorter; the wrong mode would
        assert row["variant"] == "ringfence" or row["seconds"] >= 0.999 * least[row["model"], row["variant"]], row
    assert all(row["rounds"] == 2 and row["dilation"] >= 1 and row["wall_seconds"] > 0 for row in rows)
    made = ringfence("report", "--study", "results", "--json", folder=tmp_path, timeout=HANG)
    assert json.loads(made.stdout)["page"] == "results/report/gpu-tee.html"
    assert "What GPU TEEs cost, simulated" in (tmp_path / "results/report/gpu-tee.html").read_text()
