"""`ringfence run` goes on after kills of a worker, an agent or the store's host, and ends with the same weights.

`scripts/chaos` does the same at random moments, as often as wanted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.chaos import Baseline, Kill, Plan, Run, tails, undisturbed
from tests.integration.chaos_elastic import shrink_and_grow
from tests.integration.chaos_nodes import Shape

pytestmark = pytest.mark.real_start  # processes are found by their command lines
SHAPE = Shape("ringfence", nodes=2, workers=2)
KILLS = (
    Kill("worker", node=1, worker=1, step=8, delay=0.03),
    Kill("agent", node=1, worker=0, step=17, delay=0.01),
    Kill("host", node=0, worker=0, step=28, delay=0.02),
)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    return undisturbed(SHAPE, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.nightly
@pytest.mark.timeout(480)  # the run itself is bounded, by more on a machine that has to share its processors
def test_training_goes_on_after_kills_of_worker_agent_and_host(baseline: Baseline, tmp_path: Path) -> None:
    """All ranks go on after each kill, no process is left, and the weights are those of an undisturbed training."""
    outcome = Run(SHAPE, Plan(0, 0, "host", KILLS), baseline, tmp_path).go()
    assert [hit.case for hit in outcome.hits] == ["worker", "agent", "host"], f"{outcome}\n{tails(tmp_path)}"
    assert all(hit.next_step is not None for hit in outcome.hits), f"{outcome}\n{tails(tmp_path)}"
    assert outcome.passed, f"{outcome}\n{tails(tmp_path)}"


@pytest.mark.nightly
@pytest.mark.timeout(900)  # three waits, each with a limit of its own
def test_training_goes_on_with_fewer_nodes_and_grows_again(tmp_path: Path) -> None:
    outcome = shrink_and_grow(Shape("ringfence", nodes=2, workers=1, min_nodes=1, steps=2000), tmp_path)
    assert outcome.shrunk is not None, f"{outcome}\n{tails(tmp_path)}"
    assert outcome.grown is not None, f"{outcome}\n{tails(tmp_path)}"
