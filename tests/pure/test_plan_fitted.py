"""What only a calibrated machine has: threads that wait, caches that are too small, and the memory that Gloo works in."""

from __future__ import annotations

import pytest

from ringfence.collectives import ScheduleId
from ringfence.plan.hardware import Hardware
from ringfence.plan.predict import predict
from ringfence.plan.price import GIVEN_BACK, price
from ringfence.plan.work import WAYS
from tests.pure.plan_rows import TRUTH, machine

MIB = 1 << 20
RING = ScheduleId.ALL_REDUCE_RING


def with_figures(**changes: float) -> Hardware:
    """The machine of the synthetic study, with other figures for every way."""
    known = machine()
    return Hardware(
        known.name, known.title, known.figures, {way: {**figures, **changes} for way, figures in TRUTH.items()}
    )


def work(profile: Hardware, identifier: ScheduleId, workers: int, at_once: int = 1) -> float:
    return price(profile, WAYS["ringfence"], identifier, workers, 100 * MIB, per_node=workers, at_once=at_once).work


def test_a_core_rests_only_while_all_its_workers_wait() -> None:
    waiting, eager = with_figures(idle=0.4), with_figures(idle=0.0)
    slower = {workers: work(waiting, RING, workers) / work(eager, RING, workers) for workers in (2, 4, 8)}
    assert slower == pytest.approx({2: 1 / 0.6, 4: 1 / (1 - 0.4**2), 8: 1 / (1 - 0.4**4)})


def test_with_several_collectives_under_way_a_thread_has_others_to_turn_to() -> None:
    waiting, eager = with_figures(idle=0.4), with_figures(idle=0.0)
    assert work(waiting, RING, 2, at_once=2) / work(eager, RING, 2) == pytest.approx(1 / (1 - 0.4**2))


@pytest.mark.parametrize("identifier", [ScheduleId.BROADCAST_CHAIN, ScheduleId.ALL_REDUCE_TREE])
def test_where_bytes_flow_one_way_nobody_waits(identifier: ScheduleId) -> None:
    assert work(with_figures(idle=0.4), identifier, 4) == work(with_figures(idle=0.0), identifier, 4)


def test_a_profile_that_nobody_fitted_pays_for_none_of_it() -> None:
    known = machine()
    bare = Hardware(known.name, known.title, known.figures)
    fitted = with_figures(factor=1.0, message=0.0, switch=0.0, idle=0.0, cold=0.0)
    for way in WAYS.values():
        assert price(bare, way, RING, 4, 64 * MIB).work == pytest.approx(price(fitted, way, RING, 4, 64 * MIB).work)


def test_what_no_cache_holds_costs_more_and_only_who_handles_it_whole_pays() -> None:
    cold, warm = with_figures(cold=0.5), with_figures(cold=0.0)

    def slower(way: str, size: int) -> float:
        one, other = (price(profile, WAYS[way], RING, 2, size).cpu for profile in (cold, warm))
        return one / other

    assert slower("hop-by-hop", 4 * MIB) == 1
    grown = [slower("hop-by-hop", size * MIB) for size in (6, 12, 100, 1000)]
    assert grown == sorted(grown) and grown[0] > 1.05 and 1.45 < grown[-1] < 1.5
    assert slower("ringfence", 1000 * MIB) == slower("gloo", 1000 * MIB) == 1


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
