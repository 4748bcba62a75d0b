"""The example that changes its parallelism after a loss goes on with the losses and the weights of an undisturbed run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ringfence import checkpoint
from ringfence.config.private_files import new_secret_file
from tests.cli.command import ringfence
from tests.integration.test_readme import ROOT

EXAMPLE = ROOT / "examples" / "change_parallelism.py"
STEPS, KILLED, NEWEST = 8, 6, 4  # the step before which a worker is killed, and that of the newest checkpoint then
# Workers that share a layer add parts of its sums in another order, which rounds a float32 in its seventh digit.
RELATIVE = 1e-5  # of losses
ABSOLUTE = 1e-5  # of weights, which are about 1 and change by 0.003 a step
BEGUN = re.compile(r"(\d x \d) workers go on after step (\d+)")


def trained(folder: Path, steps: int, *arguments: str, workers: int = 4) -> str:
    """Run the example in a folder of its own, or go on there; return its output."""
    if not folder.exists():
        folder.mkdir()
        new_secret_file(folder / "run.secret")
        new_secret_file(folder / "ck.key")
    launch = ("run", "--nproc-per-node", str(workers), "--max-restarts", "1", str(EXAMPLE), "--key", "ck.key")
    words = (*launch, "--steps", str(steps), *arguments)
    done = ringfence(*words, folder=folder, RINGFENCE_SECRET_FILE="run.secret", RINGFENCE_SAME_HOST="sealed")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(text: str, after: int = 0, until: int = STEPS) -> dict[int, float]:
    found = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\d\.\d{6})", text)}
    return {step: loss for step, loss in found.items() if after < step <= until}


def newest(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the newest checkpoint, whole, as one process loads them."""
    named = json.loads((folder / "newest.json").read_text())
    state, info = checkpoint.load_all(folder / named["path"], key=folder / "ck.key", anchor=named["anchor"])
    assert info.step == STEPS
    return dict(tensors(state))


def tensors(state: dict[str, Any], prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    found = []
    for name, value in state.items():
        if isinstance(value, dict):
            found += tensors(value, f"{prefix}{name}/")
        elif isinstance(value, torch.Tensor):
            found.append((prefix + name, value))
    return found


@pytest.mark.nightly
def test_a_run_goes_on_in_another_layout_after_a_loss(tmp_path: Path) -> None:
    undisturbed = trained(tmp_path / "undisturbed", STEPS)
    assert BEGUN.findall(undisturbed) == [("4 x 1", "0")]
    expected = losses(undisturbed)
    assert list(expected) == list(range(1, STEPS + 1)) and expected[STEPS] < expected[1] / 2

    before, after = re.split("(?=2 x 2)", trained(tmp_path / "killed", STEPS, "--kill-at", str(KILLED)))
    assert BEGUN.findall(before + after) == [("4 x 1", "0"), ("2 x 2", str(NEWEST))]
    last = max(losses(before))  # the kill may end the step before it on other workers
    assert NEWEST <= last < KILLED and losses(before) == losses(undisturbed, until=last)
    assert losses(after) == pytest.approx(losses(undisturbed, after=NEWEST), rel=RELATIVE)

    found, wanted = newest(tmp_path / "killed"), newest(tmp_path / "undisturbed")
    assert found.keys() == wanted.keys() and len(found) == 4 * 27  # of each weight: two moments, and a count of steps
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=ABSOLUTE), name


@pytest.mark.nightly
def test_three_workers_go_on_where_four_ended(tmp_path: Path) -> None:
    undisturbed = trained(tmp_path / "undisturbed", STEPS)
    trained(tmp_path / "fewer", NEWEST)
    found = trained(tmp_path / "fewer", STEPS, workers=3)
    assert BEGUN.findall(found) == [("3 x 1", str(NEWEST))]
    assert losses(found) == pytest.approx(losses(undisturbed, after=NEWEST), rel=RELATIVE)
