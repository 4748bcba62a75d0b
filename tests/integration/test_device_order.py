"""The order of a staged collective: right results under delays, and each wait that is left out is noticed.

Over sealed links, in shared memory and over two channels, since each moves the bytes of a pass in its own way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import ringfence
from tests.attack.test_shared_memory import shared_files
from tests.integration import device_scenarios
from tests.integration.device_scenarios import FAULTS, SCENARIOS
from tests.integration.test_channels import channels, sent_by_channel
from tests.pool import IN_SHARED_MEMORY, Pool

pytestmark = pytest.mark.processes

SLOWER = (1, 1, 4, 16, 64)  # times in attempts: on a loaded machine, a copy that is too early may still be late enough


class Way(NamedTuple):
    """How the bytes of a pass travel."""

    backend: str
    environment: dict[str, str]
    is_used: Callable[[], Any]  # on each worker: true if something has gone this way


def sent_on_the_second_channel() -> int:
    return sent_by_channel()[1]


def sent_sealed() -> int:
    return sum(peer.sealed_sent for peer in ringfence.counters().peers)


WAYS = {
    "sealed": Way("ringfence", {}, sent_sealed),
    "shared memory": Way(IN_SHARED_MEMORY, {}, shared_files),
    "two channels": Way("ringfence", channels(2), sent_on_the_second_channel),
}


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.mark.parametrize("confidential", [False, True], ids=["normal", "confidential"])
def test_every_scenario_is_right(devices: Pool, way: Way, confidential: bool) -> None:
    arguments = (SCENARIOS, None, confidential)
    assert devices.check(device_scenarios.run, 2, way.backend, arguments, env=way.environment) == [[], []]
    assert all(devices.check(way.is_used, 2, way.backend, env=way.environment))


@pytest.mark.parametrize("fault", FAULTS)
def test_every_wait_is_needed(devices: Pool, way: Way, fault: str) -> None:
    """With the wait or reference left out, each scenario that is there for it turns wrong."""
    unnoticed = {*FAULTS[fault][3]}
    for slower in SLOWER:
        arguments = (sorted(unnoticed), fault, False, slower)
        for wrong in devices.check(device_scenarios.run, 2, way.backend, arguments, 240, env=way.environment):
            unnoticed -= {*wrong}
        if not unnoticed:
            break
    assert not unnoticed


@pytest.mark.parametrize(
    "confidential", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["normal", "confidential"]
)
def test_random_scenarios_with_random_delays(devices: Pool, way: Way, full: bool, confidential: bool) -> None:
    arguments = (7, 200 if full else 20, confidential)
    wrong = devices.check(device_scenarios.run_at_random, 2, way.backend, arguments, 300, env=way.environment)
    assert wrong == [[], []]
