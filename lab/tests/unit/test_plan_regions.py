"""The cost of a step between sites by way: what crosses in how much time, and the table of the guide."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringfence_lab.plan.regions import RATES, Run, seconds, table

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "across-regions.md"
RUN = Run(elements=10**9, compute=1.0, sites=2, every=100)
SMALL = Run(elements=1000, compute=1.0, sites=2, every=100)


def test_bytes_decide_on_a_slow_link() -> None:
    """Two sites send each other as many bytes as the model has; computing hides nothing to speak of."""
    found = seconds(RUN, rate=1e8, delay=0.0)
    whole = 4 * RUN.elements * 8 / 1e8
    assert found["float32"] == pytest.approx(whole, rel=0.01)
    assert found["int8"] == pytest.approx(whole * 260 / 1024, rel=0.02)
    assert found["DiLoCo"] == pytest.approx(1.0 + whole / 100, rel=0.01)
    assert found["DiLoCo, int8"] == pytest.approx(1.0 + whole * 260 / 1024 / 100, rel=0.02)


def test_the_delay_decides_for_a_small_model() -> None:
    """A step of DDP waits for its last all-reduce; a round of DiLoCo waits for that and twice for what workers compare."""
    found = seconds(SMALL, rate=1e9, delay=0.1)
    rounds = round((found["float32"] - 1.0) / 0.1)
    assert rounds in (1, 2)
    assert found["DiLoCo"] == pytest.approx(1.0 + (rounds + 2) * 0.1 / 100, abs=1e-4)


def test_checksums_of_a_round_count_as_computing() -> None:
    """Four bytes a parameter and as many of momentum, three billion of which a core checks in a second."""
    found = seconds(RUN, rate=1e15, delay=0.0)
    assert found["DiLoCo"] == pytest.approx(1.0 + 2 * 4 * RUN.elements / 3e9 / 100, abs=1e-4)


def test_more_of_a_round_and_a_faster_link_cost_less() -> None:
    for slower, faster in zip(table(RUN), table(RUN)[2:], strict=False):
        assert all(faster[way] <= slower[way] for way in ("float32", "int8", "DiLoCo", "DiLoCo, int8"))
    longer = Run(RUN.elements, RUN.compute, RUN.sites, every=500)
    assert seconds(longer, 1e9, 0.1)["DiLoCo"] < seconds(RUN, 1e9, 0.1)["DiLoCo"]


def test_the_guide_has_these_figures() -> None:
    shown = re.findall(r"^\| ([0-9.]+) Gbit/s \| (.*) \|$", GUIDE.read_text(), re.M)
    found = [seconds(RUN, rate, 0.1) for rate in RATES]
    expected = [" | ".join(f"{each:.3g}" for each in row.values()) for row in found]
    assert shown == [(f"{rate / 1e9:g}", row) for rate, row in zip(RATES, expected, strict=True)]
