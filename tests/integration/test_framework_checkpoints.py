"""Sealed checkpoints in frameworks: a run that was interrupted and goes on equals one that was not.

``--full`` runs the example for Lightning too, and needs `scripts/install --frameworks`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.integration.test_frameworks import FOLDER, run
from tests.unit.checkpoint_samples import key_file

CHEAP = ("fsdp2", "hf_trainer")
ALL = sorted(file.stem.removeprefix("checkpoint_") for file in FOLDER.glob("checkpoint_*.py"))
HALF = {"fsdp2": ("--steps", "4"), "hf_trainer": ("--stop-at", "4"), "lightning": ("--steps", "4")}

pytestmark = pytest.mark.timeout(900)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", ALL if metafunc.config.getoption("--full") else CHEAP)


def trained(name: str, folder: Path, key: str, *arguments: str, fails: bool = False, workers: int = 2) -> str:
    """Run the example in a folder of its own; return what it prints."""
    folder.mkdir(exist_ok=True)
    text = (FOLDER / f"checkpoint_{name}.py").read_text()
    paths = ("--folder", str(folder / "checkpoints"), "--key", key, "--newest", str(folder / "newest.json"))
    done = run(name, workers, text, folder, *paths, *arguments, RINGFENCE_REQUIRE="1")
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr if fails else done.stdout


def losses(text: str, after: int = 0) -> dict[int, str]:
    """Return the losses of the steps after one, to nine digits."""
    found = {int(step): loss for step, loss in re.findall(r"step (\d+): loss (\d\.\d{9})", text)}
    return {step: loss for step, loss in found.items() if step > after}


def test_all_examples_are_run() -> None:
    assert set(HALF) == set(ALL)


@pytest.mark.nightly
def test_a_resumed_run_equals_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    key = key_file(tmp_path)
    undisturbed = trained(name, tmp_path / "one", key)
    first = trained(name, tmp_path / "two", key, *HALF[name])
    second = trained(name, tmp_path / "two", key)
    assert max(losses(undisturbed)) == 8
    assert max(losses(first), default=0) <= 4 and min(losses(second, after=4)) > 4
    assert losses(second, after=4) == losses(undisturbed, after=4)
    assert re.findall("weights: .*", second) == re.findall("weights: .*", undisturbed)


@pytest.mark.nightly
def test_an_older_checkpoint_is_refused(tmp_path: Path) -> None:
    """The folder of step 8 is replaced by that of step 4, which is authentic."""
    key, folder = key_file(tmp_path), tmp_path / "run"
    trained("fsdp2", folder, key)
    newest = json.loads((folder / "newest.json").read_text())["path"]
    Path(newest).rename(folder / "away")
    (folder / "checkpoints" / "step-4").rename(newest)
    said = trained("fsdp2", folder, key, "--steps", "12", fails=True)
    assert "the folder was replaced, for example by an older one" in said
    assert not losses(said)


@pytest.mark.nightly
def test_three_workers_go_on_where_two_ended(tmp_path: Path) -> None:
    key, folder = key_file(tmp_path), tmp_path / "run"
    undisturbed = trained("fsdp2", tmp_path / "one", key)
    trained("fsdp2", folder, key, *HALF["fsdp2"])
    found = losses(trained("fsdp2", folder, key, workers=3), after=4)
    expected = losses(undisturbed, after=4)
    assert found.keys() == expected.keys()
    assert all(abs(float(found[step]) - float(expected[step])) < 1e-5 for step in found)  # another order of sums
