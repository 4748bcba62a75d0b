"""The order of a staged collective: right results under delays, and each wait that is left out is noticed."""

from __future__ import annotations

import pytest

from tests.integration import device_scenarios
from tests.integration.device_scenarios import FAULTS, SCENARIOS
from tests.pool import Pool

pytestmark = pytest.mark.processes

ATTEMPTS = 5  # on a loaded machine, a copy that is too early may still be late enough
NAMES = [scenario.__name__ for scenario in SCENARIOS]


@pytest.mark.parametrize("confidential", [False, True], ids=["normal", "confidential"])
def test_every_scenario_is_right(devices: Pool, confidential: bool) -> None:
    assert devices.check(device_scenarios.run, 2, "ringfence", (NAMES, None, confidential)) == [[], []]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_wait_is_needed(devices: Pool, fault: str) -> None:
    """With the wait or reference left out, each scenario that is there for it turns wrong."""
    unnoticed = {scenario.__name__ for scenario in FAULTS[fault][3]}
    for _ in range(ATTEMPTS):
        for wrong in devices.check(device_scenarios.run, 2, "ringfence", (sorted(unnoticed), fault, False)):
            unnoticed -= {*wrong}
        if not unnoticed:
            break
    assert not unnoticed


@pytest.mark.parametrize("confidential", [False, True], ids=["normal", "confidential"])
def test_random_scenarios_with_random_delays(devices: Pool, full: bool, confidential: bool) -> None:
    runs = 200 if full else 40
    assert devices.check(device_scenarios.run_at_random, 2, "ringfence", (7, runs, confidential), 300) == [[], []]
