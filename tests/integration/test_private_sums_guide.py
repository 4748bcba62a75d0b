"""The guide to private sums: its commands as written, and its example with Opacus."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from opacus.accountants import RDPAccountant

from tests.integration.test_readme import MARKED, ROOT, shell
from tests.members import Consortium
from tests.pool import Pool

COMMANDS = MARKED.findall((ROOT / "docs" / "guides" / "private-sums.md").read_text())

OPACUS = runpy.run_path(str(ROOT / "examples" / "private_sums_opacus.py"))
BATCHES, DELTA = OPACUS["BATCHES"], OPACUS["DELTA"]


def train(epochs: int, noise: float, most: float) -> Any:
    return OPACUS["train"](epochs, noise, most)


@pytest.mark.nightly  # test_private_sums.py has the same sums in the gate
def test_three_clinics_train_and_an_auditor_is_content(tmp_path: Path) -> None:
    assert len(COMMANDS) == 3
    done = shell("\n".join(COMMANDS), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "members clinic-a, clinic-b, clinic-c" in " ".join(done.stdout.split())
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert len(re.findall("^SHOWN: ", done.stdout, re.MULTILINE)) == 8
    assert not re.search("^(NOT SHOWN|REFUTED): ", done.stdout, re.MULTILINE)


def accounted(steps: int, noise: float) -> float:
    """The epsilon of so many Poisson batches, by an accountant that saw no training."""
    account = RDPAccountant()
    for _ in range(steps):
        account.step(noise_multiplier=noise, sample_rate=1 / BATCHES)
    return account.get_epsilon(DELTA)


@pytest.mark.nightly
def test_opacus_keeps_the_account_under_ringfence(pool: Pool, tmp_path: Path) -> None:
    environments = Consortium(tmp_path, ["a", "b", "c"]).environments()
    for epsilon, steps, sampler in pool.check(train, 3, env=environments, args=(1, 1.0, 100.0)):
        assert (steps, sampler) == (BATCHES, "UniformWithReplacementSampler")
        assert epsilon == pytest.approx(accounted(BATCHES, 1.0))


def test_a_spent_account_stops_the_run_on_every_rank_at_one_step(pool: Pool, tmp_path: Path) -> None:
    environments = Consortium(tmp_path, ["a", "b", "c"]).environments()
    limit = (accounted(4, 1.0) + accounted(5, 1.0)) / 2
    for epsilon, steps, _ in pool.check(train, 3, env=environments, args=(1, 1.0, limit)):
        assert steps == 4
        assert epsilon == pytest.approx(accounted(4, 1.0)) and epsilon <= limit
