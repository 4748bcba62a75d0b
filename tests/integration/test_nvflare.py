"""The example for NVFlare runs in its simulator: two sites average their models, and in each two workers train over ringfence.

Needs `scripts/install --frameworks`; collected with `--full` only, and if it is named.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from subprocess import run as start

import pytest
import torch
from torch import nn

from ringfence.config.private_files import new_secret_file
from tests.integration.test_frameworks import ALONE
from tests.integration.test_readme import ROOT, environment

EXAMPLE = ROOT / "examples/nvflare"
SECONDS = 1500
ROUNDS = 3
SITES = 2

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(SECONDS + 10)]


def simulated(folder: Path, **variables: str) -> tuple[int, str]:
    """Run the job in a network namespace; return its exit status and everything that it printed."""
    for file in EXAMPLE.glob("*.py"):
        shutil.copy(file, folder)
    command = [*ALONE, sys.executable, "job.py", "--sites", str(SITES), "--rounds", str(ROUNDS)]
    env = environment(folder) | variables
    done = start(command, cwd=folder, env=env, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, text=True, timeout=SECONDS)
    return done.returncode, done.stdout


def test_two_sites_average_models_that_two_workers_each_train_over_ringfence(tmp_path: Path) -> None:
    new_secret_file(tmp_path / "run.secret")
    status, printed = simulated(tmp_path, RINGFENCE_SECRET_FILE=str(tmp_path / "run.secret"))
    assert status == 0, printed
    runs = re.findall(r" 2 workers, run (\w+), .* admitted by shared secret", printed)
    assert len(set(runs)) == SITES, printed  # each site is a run of its own
    assert printed.count(f"Aggregated {SITES}/{SITES} results") == ROUNDS, printed
    losses = {
        (site, int(number)): float(loss)
        for site, number, loss in re.findall(r"(site-\d), round (\d): loss ([\d.]+)", printed)
    }
    assert len(losses) == SITES * ROUNDS
    assert losses["site-1", 0] != losses["site-2", 0]  # each trains on its own points
    assert all(losses[site, ROUNDS - 1] < losses[site, 0] / 2 for site in ("site-1", "site-2"))
    assert right_answers(tmp_path) > 0.95


def right_answers(folder: Path) -> float:
    """The share of points that the last average of both sites' models puts on the right side of the circle."""
    (file,) = folder.glob("simulation/circles/server/**/FL_global_model.pt")
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    saved = torch.load(file, weights_only=True)["model"]
    model.load_state_dict({name.removeprefix("layers."): torch.as_tensor(value) for name, value in saved.items()})
    points = torch.cartesian_prod(torch.linspace(-1.5, 1.5, 101), torch.linspace(-1.5, 1.5, 101))
    with torch.no_grad():
        return float(((model(points) > 0).squeeze(1) == (points.norm(dim=1) < 1)).float().mean())


def test_a_site_without_its_secret_trains_nothing(tmp_path: Path) -> None:
    _, printed = simulated(tmp_path)
    assert "RINGFENCE_SECRET_FILE" in printed and "Aggregated" not in printed
    assert not re.search(r"loss \d", printed)
