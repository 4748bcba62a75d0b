"""NCCL in the clear: its tuning model over a profile's links, and where a plan shows it."""

from __future__ import annotations

import pytest

from ringfence_lab.plan import hardware, models
from ringfence_lab.plan.nccl import collective_cost
from ringfence_lab.plan.recommend import plan, shown
from ringfence_lab.plan.steps import Question, step
from ringfence_lab.plan.work import VARIANTS

MIB = 1 << 20


def test_large_all_reduces_go_at_the_rate_of_the_slowest_link() -> None:
    """On one machine NVLink's, between machines the network's: a ring moves 2 (n - 1) / n of the bytes."""
    profile = hardware.load("h100-ppcie")
    inside, between = (collective_cost(profile, "all_reduce", count, 1e11).seconds for count in (8, 64))
    assert inside == pytest.approx(2 * 7 / 8 * 1e11 / 476e9, rel=0.01)
    assert between == pytest.approx(2 * 63 / 64 * 1e11 / 400e9, rel=0.01)
    assert collective_cost(profile, "all_gather", 64, 1e11).seconds == pytest.approx(between / 2, rel=0.01)


def test_latency_is_that_of_the_tuning_model() -> None:
    """Figures of NCCL 2.30.7: of a ring's Simple step 3.4 µs over NVLink, of LL128's 1.9; a tree is deep, not long."""
    alone, node = hardware.load("h100-cc"), hardware.load("h100-ppcie")
    few = collective_cost(node, "all_gather", 8, 1.0)
    assert few.seconds == pytest.approx((14.0 + 7 * 1.9) * 1e-6, rel=0.01)  # LL128; Simple takes 32.2 µs
    two = collective_cost(alone, "reduce_scatter", 2, 1.0)
    assert two.seconds == pytest.approx((14.0 + 8.5) * 1e-6, rel=0.01)  # a step between machines of one GPU, LL128
    many = collective_cost(node, "all_reduce", 16_384, 1.0)
    assert many.seconds == pytest.approx((14.0 + 2 * (7 * 1.25 + 11 * 8.5)) * 1e-6, rel=0.01)  # a tree


def test_trees_carry_what_rings_are_too_long_for() -> None:
    profile = hardware.load("h100-cc")
    costs = [collective_cost(profile, "all_reduce", count, 25 * MIB).seconds for count in (64, 1024, 16_384)]
    assert costs == sorted(costs)
    assert costs[-1] < 2 * costs[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_plan_shows_nccl_where_there_are_gpus(strategy: str) -> None:
    question = Question(models.load("gpt2"), 16, strategy=strategy)
    found = plan(hardware.load("h100-ppcie"), question).variants
    assert next(iter(found)) == "nccl"
    assert found["nccl"].seconds < min(found[name].seconds for name in ("plaintext", "ringfence", "hop-by-hop"))
    assert "nccl" not in shown(hardware.load("tdx-100g"))


def test_computing_hides_nccl_also_where_confidential_copies_block() -> None:
    found = step(hardware.load("h100-cc"), VARIANTS["nccl"], Question(models.load("gpt2"), 8, compute_seconds=10.0))
    assert found.exposed < 0.5 * found.communication.seconds  # of the last bucket, which has the embeddings
