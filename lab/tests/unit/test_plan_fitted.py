"""What only a calibrated machine has: threads that wait, caches that are too small, and the memory that Gloo works in."""

from __future__ import annotations

import math

import pytest

from lab.tests.unit.plan_rows import TRUTH, machine
from ringfence.collectives import ScheduleId
from ringfence_lab.plan.cost import GIVEN_BACK, collective_cost
from ringfence_lab.plan.hardware import Hardware
from ringfence_lab.plan.predict import predict
from ringfence_lab.plan.work import VARIANTS

MIB = 1 << 20
RING = ScheduleId.ALL_REDUCE_RING


def with_figures(**changes: float) -> Hardware:
    """The machine of the synthetic study, with other figures for every variant."""
    known = machine()
    return Hardware(
        known.name, known.title, known.figures, {variant: {**figures, **changes} for variant, figures in TRUTH.items()}
    )


def work(profile: Hardware, identifier: ScheduleId, workers: int, at_once: int = 1) -> float:
    return collective_cost(
        profile, VARIANTS["ringfence"], identifier, workers, 100 * MIB, per_node=workers, at_once=at_once
    ).work


def test_a_core_rests_only_while_all_its_workers_wait() -> None:
    waiting, eager = with_figures(idle=0.4), with_figures(idle=0.0)
    slower = {workers: work(waiting, RING, workers) / work(eager, RING, workers) for workers in (2, 4, 8)}
    assert slower == pytest.approx({2: 1 / 0.6, 4: 1 / (1 - 0.4**2), 8: 1 / (1 - 0.4**4)})


def test_with_several_collectives_under_way_a_thread_has_others_to_turn_to() -> None:
    waiting, eager = with_figures(idle=0.4), with_figures(idle=0.0)
    assert work(waiting, RING, 2, at_once=2) / work(eager, RING, 2) == pytest.approx(1 / (1 - 0.4**2))


@pytest.mark.parametrize("identifier", [ScheduleId.BROADCAST_CHAIN, ScheduleId.BROADCAST_TREE])
def test_where_bytes_flow_one_way_nobody_waits(identifier: ScheduleId) -> None:
    assert work(with_figures(idle=0.4), identifier, 4) == work(with_figures(idle=0.0), identifier, 4)


def test_a_profile_that_nobody_fitted_pays_for_none_of_it() -> None:
    known = machine()
    bare = Hardware(known.name, known.title, known.figures)
    fitted = with_figures(factor=1.0, message=0.0, switch=0.0, idle=0.0, cold=0.0)
    for variant in VARIANTS.values():
        assert collective_cost(bare, variant, RING, 4, 64 * MIB).work == pytest.approx(
            collective_cost(fitted, variant, RING, 4, 64 * MIB).work
        )


def slower(variant: str, size: float, memory: float | None = None) -> float:
    """How much more core time it takes where memory beyond the cache costs half as much again."""
    cold, warm = (with_figures(cold=share, message=0.0) for share in (0.5, 0.0))
    one, other = (
        collective_cost(profile, VARIANTS[variant], RING, 2, size, memory=memory).cpu for profile in (cold, warm)
    )
    return one / other


@pytest.mark.parametrize("variant", ["ringfence", "gloo"])
def test_memory_that_no_cache_holds_costs_more(variant: str) -> None:
    assert slower(variant, 1 * MIB) == 1
    grown = [slower(variant, size * MIB) for size in (4, 25, 1000)]
    assert grown == sorted(grown) and grown[0] == pytest.approx(1.25) and 1.49 < grown[-1] < 1.5
    assert slower(variant, 1 * MIB, memory=math.inf) == pytest.approx(1.5)


def test_who_handles_chunks_whole_loses_large_ones_from_stage_to_stage_as_well() -> None:
    grown = [slower("hop-by-hop", size * MIB, memory=math.inf) for size in (2, 10, 50, 200)]
    assert grown[0] == pytest.approx(1.25) and grown == sorted(grown) and 1.48 < grown[-1] < 1.5


def test_bfloat16_costs_what_was_fitted_for_it_to_add() -> None:
    profile = with_figures(message=0.0, cold=0.0, half=4.0)
    narrow, wide = (
        collective_cost(profile, VARIANTS["gloo"], RING, 2, 64 * MIB, narrow=each).terms for each in (True, False)
    )
    assert narrow["reduce"] == pytest.approx(4 * wide["reduce"])
    assert narrow["stack"] == pytest.approx(wide["stack"])


def seconds(operation: str, size: int, workers: int = 2, profile: Hardware | None = None) -> float:
    case = {"kind": "collective", "operation": operation, "size": size, "workers": workers}
    return predict(profile or machine(), case, "gloo")


def test_gloo_scatters_by_reducing_a_copy_of_everything() -> None:
    """torch 2.13: the input is cloned, all-reduced, and a part of it is kept."""
    for workers in (2, 4):
        assert seconds("reduce_scatter", 25 * MIB, workers) > seconds("all_reduce", 25 * MIB, workers)


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
def test_large_staging_memory_is_got_anew_for_every_call(operation: str) -> None:
    """The C library keeps what is freed up to 32 MiB and gives back what is larger, so that every page is faulted in again."""
    below, above = seconds(operation, GIVEN_BACK), seconds(operation, GIVEN_BACK + MIB)
    fresh = TRUTH["gloo"]["fresh"] * 1e-9 * GIVEN_BACK
    assert above - below > fresh
    kept = with_figures(fresh=0.0)
    assert seconds(operation, GIVEN_BACK + MIB, profile=kept) - seconds(operation, GIVEN_BACK, profile=kept) < fresh / 4
    assert seconds("all_reduce", GIVEN_BACK + MIB) - seconds("all_reduce", GIVEN_BACK) < fresh / 4


def test_staging_takes_the_cores_that_workers_share() -> None:
    unstaged = with_figures(staged=0.0, fresh=0.0)
    copy, fresh = (TRUTH["gloo"][name] * 1e-9 for name in ("staged", "fresh"))
    extra = {
        workers: seconds("all_gather", 100 * MIB, workers) - seconds("all_gather", 100 * MIB, workers, profile=unstaged)
        for workers in (2, 8)
    }
    each = {workers: 100 * MIB * ((1 + 1 / workers) * copy + fresh) for workers in extra}
    assert extra == pytest.approx({2: each[2], 8: each[8] * 4})
    assert seconds("broadcast", 100 * MIB) == seconds("broadcast", 100 * MIB, profile=unstaged)
