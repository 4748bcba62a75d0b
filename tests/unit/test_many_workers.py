"""As many workers as one process holds, with real engines and sealed links in memory."""

from __future__ import annotations

import pytest

from ringfence.collectives import Collective, Thresholds
from tests.memory_cluster import World
from tests.unit.test_runtime import check


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kind",
    [Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER],
    ids=lambda kind: kind.name.lower(),
)
def test_256_workers_halve_and_double(kind: Collective) -> None:
    whole = 150_000  # elements of 8 bytes
    check(
        World(256, table=Thresholds(small=0), capacity=1 << 20),
        kind,
        whole if kind is Collective.ALL_REDUCE else whole // 256,
    )
