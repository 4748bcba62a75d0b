"""Every collective on tensors of the simulated device, with random delays of its kernels and copies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests import device
from tests.conformance.cases import Case, every_type, every_view, large_cases, on_devices
from tests.conformance.collectives import RIGHT, play
from tests.conformance.test_collectives import PAIRWISE, Numbered
from tests.pool import IN_SHARED_MEMORY, ON_TWO_MACHINES, Pool

pytestmark = pytest.mark.processes


def play_on_device(cases: Sequence[tuple[int, Case]], jitter: float, confidential: bool) -> list[str | None]:
    mine = device.load()
    with device.behaviour(jitter=jitter, confidential=confidential):
        return play(cases, mine)


def unexpected(
    pool: Pool, cases: Numbered, jitter: float = 0.0, confidential: bool = False, backend: str = "ringfence"
) -> list[str]:
    (world,) = {case.world for _, case in cases}
    ranks = pool.check(play_on_device, world, backend, (cases, jitter, confidential), 240)
    reports = [{rank[index] for rank in ranks} - {None} for index in range(len(cases))]
    return [f"{case}: {each}" for (_, case), each in zip(cases, reports, strict=True) if each != {RIGHT}]


def test_every_type_and_operation(devices: Pool) -> None:
    assert not unexpected(devices, list(enumerate(on_devices(every_type(2)))))


@pytest.mark.parametrize("confidential", [False, True], ids=["normal", "confidential"])
def test_every_view_and_way_to_wait(devices: Pool, confidential: bool) -> None:
    assert not unexpected(devices, list(enumerate(on_devices(every_view(3)))), 1e-4, confidential)


@pytest.mark.parametrize(
    ("world", "way"),
    [*((world, "ringfence") for world in (1, 2, 4, 5)), (4, IN_SHARED_MEMORY), (5, ON_TWO_MACHINES)],
)
def test_pairwise(devices: Pool, world: int, way: str) -> None:
    cases = [(number, case) for number, case in PAIRWISE if case.world == world]
    assert not unexpected(devices, cases, 1e-4, backend=way)


@pytest.mark.parametrize(
    ("world", "way"),
    [
        (2, "ringfence"),
        (4, "ringfence"),
        (4, IN_SHARED_MEMORY),
    ],
)
@pytest.mark.nightly
def test_large(devices: Pool, world: int, way: str) -> None:
    assert not unexpected(devices, list(enumerate(large_cases(world))), backend=way)
