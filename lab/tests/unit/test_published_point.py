"""The preset `published`: its two figures are solved from two published slowdowns, and a third one is held out."""

from __future__ import annotations

import itertools

import pytest

from ringfence_lab.accelerator import tee
from ringfence_lab.bench.tee_variants import figures_of, tee_of
from ringfence_lab.plan import models
from ringfence_lab.plan.buckets import buckets
from ringfence_lab.plan.published import PUBLISHED
from ringfence_lab.report import study
from ringfence_lab.report.figure import ratio_of
from ringfence_lab.study import grid, tee_cost
from ringfence_lab.study.estimate import total
from scripts.page import RESULTS
from scripts.page import published_point as point

GRID_SAMPLES = 4  # of GPT-2 XL in the grid gpu-tee
SOLVED = ("copy_overhead", "cpu_rate")


def slowdowns(devices: tee.Tee, samples: int, larger: float) -> list[float]:
    seconds = point.seconds_of(point.MODEL, samples)
    return [point.slowdown(devices, point.MODEL, cap, seconds) for cap in (None, larger)]


def near_pairs(samples: int, larger: float) -> int:
    """Pairs of a fixed cost and a rate, over some orders of magnitude, that give both slowdowns to 10 %."""
    costs = [1e-4 * 1.1**step for step in range(60)]
    rates = [1e9 * 4**step for step in range(8)]
    h100, found = tee.load("h100"), 0
    for cost, rate in itertools.product(costs, rates):
        devices = h100.with_values(copy_overhead=cost, cpu_rate=rate)
        wanted = (PUBLISHED["default"], PUBLISHED["enlarged"])
        near = zip(slowdowns(devices, samples, larger), wanted, strict=True)
        found += all(abs(slowdown / published - 1) < 0.1 for slowdown, published in near)
    return found


def test_the_two_figures_of_the_preset_are_those_that_the_slowdowns_give() -> None:
    preset, solved = tee.load(point.PRESET), point.solve(point.SAMPLES, point.WHOLE)
    assert solved.met
    for name in SOLVED:
        assert getattr(preset, name) == pytest.approx(getattr(solved.devices, name), rel=1e-3), name
        assert "solved" in preset.assumed()[name]
    default, enlarged = slowdowns(preset, point.SAMPLES, point.WHOLE)
    assert default == pytest.approx(PUBLISHED["default"], abs=0.01)
    assert enlarged == pytest.approx(PUBLISHED["enlarged"], abs=0.001)


def test_every_other_figure_is_that_of_an_h100() -> None:
    preset, h100 = tee.load(point.PRESET), tee.load("h100")
    others = [name for name in tee.FIGURES if name not in SOLVED]
    assert {name: getattr(preset, name) for name in others} == {name: getattr(h100, name) for name in others}
    assert {name: preset.origins[name] for name in others} == {name: h100.origins[name] for name in others}


@pytest.mark.parametrize("samples", [4, 8, 64, 4096])
def test_buckets_of_200_mib_cannot_give_the_published_fall_at_any_batch(samples: int) -> None:
    found = point.solve(samples, 200.0)
    assert not found.met
    assert found.enlarged > 2 * PUBLISHED["enlarged"]


def test_the_batch_of_the_grid_cannot_give_both_with_buckets_of_any_size() -> None:
    for larger in (200.0, 1000.0, point.WHOLE):
        assert not point.solve(GRID_SAMPLES, larger).met
    assert point.solve(2 * GRID_SAMPLES, point.WHOLE).met
    assert point.SAMPLES == 2 * GRID_SAMPLES


def test_a_search_over_all_pairs_finds_one_only_where_there_is_a_solution() -> None:
    assert near_pairs(point.SAMPLES, point.WHOLE) > 0
    assert near_pairs(point.SAMPLES, 200.0) == 0
    assert near_pairs(GRID_SAMPLES, point.WHOLE) == 0


def test_the_held_out_mean_is_missed_whatever_is_assumed() -> None:
    for samples, larger in point.CHOICES:
        found = point.solve(samples, larger)
        if found.met:
            assert point.held_out(found.devices, samples / point.SAMPLES) > 7 * PUBLISHED["average"]
    assert point.least_models() == 6
    assert (PUBLISHED["default"] + 5 * 1.0) / 6 < PUBLISHED["average"] < (PUBLISHED["default"] + 4 * 1.0) / 5


def test_the_grid_has_these_batches_and_cuts_no_bucket() -> None:
    cells = grid.built_in("gpu-tee-published")
    assert total(cells, cores=2) < 5 * 60
    for cell in cells:
        settings = cell.settings
        assert settings["preset"] == point.PRESET
        assert settings["samples"] == point.HELD_OUT[settings["model"]]
        whole = buckets(models.load(settings["model"]).parameters, settings["bucket_mb"], 4)
        assert {size for size, _ in cell.trace} <= set(whole)
    assert {cell.settings["model"] for cell in cells if not cell.settings["bucket_mb"]} == set(point.HELD_OUT)


def test_the_simulated_steps_take_what_is_computed_for_them() -> None:
    figures = figures_of(tee.load(point.PRESET))
    measured = {(cell.model, cell.bucket_mb): cell for cell in study.read(RESULTS / "gpu-tee-published").cells}
    for cell in grid.built_in("gpu-tee-published"):
        confidential, plain = (
            tee_cost.ring_seconds(tee_of(name, figures), 4, cell.trace) for name in ("confidential", "plain")
        )
        found = measured.pop((cell.settings["model"], cell.settings["bucket_mb"]))
        assert ratio_of(found, "confidential").median == pytest.approx(confidential / plain, rel=0.02)
    assert not measured
