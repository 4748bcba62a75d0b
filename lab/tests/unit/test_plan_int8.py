"""The plan of int8 on the wire: it pays below a bandwidth and loses above it, and costs what its parts cost."""

from __future__ import annotations

import math

import pytest

from ringfence.hooks.blocks import BLOCK, packet_bytes
from ringfence_lab.plan import hardware
from ringfence_lab.plan.quantised import SHARE, Codec, float32_seconds, int8_seconds, pays_below

SIZE = 25 << 20
HOST = hardware.load("tdx-100g").with_values(node_workers=1)


def test_the_share_of_bytes_is_that_of_packets() -> None:
    assert packet_bytes(1000 * BLOCK, 0) / (4000 * BLOCK) == SHARE


@pytest.mark.parametrize("workers", [2, 4])
def test_int8_pays_below_a_bandwidth_and_loses_above(workers: int) -> None:
    limit = pays_below(HOST, workers, SIZE)
    assert 1 < limit < 100
    for rate, faster in ((limit / 2, True), (limit * 0.98, True), (limit * 1.03, False), (limit * 4, False)):
        there = HOST.with_values(network_rate=rate)
        assert (int8_seconds(there, workers, SIZE) < float32_seconds(there, workers, SIZE)) is faster, rate


@pytest.mark.parametrize("workers", [2, 4])
def test_on_a_slow_link_it_is_faster_by_the_bytes_saved(workers: int) -> None:
    slow = HOST.with_values(network_rate=0.01)
    assert float32_seconds(slow, workers, SIZE) / int8_seconds(slow, workers, SIZE) == pytest.approx(
        1 / SHARE, rel=0.02
    )


def test_quicker_quantising_pays_further() -> None:
    slow, quick = (pays_below(HOST, 2, SIZE, Codec(each, each)) for each in (1e-9, 0.1e-9))
    assert slow < quick
    assert pays_below(HOST, 2, SIZE, Codec(1.0, 1.0)) == 0.0


def test_on_a_device_it_always_pays() -> None:
    assert pays_below(hardware.load("h100-cc"), 8, SIZE) == math.inf
