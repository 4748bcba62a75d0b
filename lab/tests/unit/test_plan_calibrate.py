"""Calibration: what a known machine would have measured leads back to that machine, and predicts what it has not seen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.tests.unit.plan_rows import INSIDE, TRUTH, cases, machine, machine_cases, machines, synthetic
from ringfence.errors import ConfigurationError
from ringfence_lab.plan import models
from ringfence_lab.plan.calibrate import _stage_costs, calibrate, grouped
from ringfence_lab.plan.fit import nearest
from ringfence_lab.plan.hardware import dump, parse
from ringfence_lab.plan.predict import predict
from ringfence_lab.plan.steps import Question, step
from ringfence_lab.plan.validate import _halves, validate
from ringfence_lab.plan.work import VARIANTS, stage_costs

pytestmark = pytest.mark.slow  # each fits all costs of a machine to a study, or several times


def test_a_known_machine_is_found_again() -> None:
    found = calibrate(synthetic(noise=0.0), cores=2)
    for variant in TRUTH:
        for case in cases():
            alone = None if case["kind"] == "collective" else 0.4 * case["workers"] / 2
            said, true = (predict(profile, case, variant, alone) for profile in (found, machine()))
            assert said == pytest.approx(true, rel=0.1), (variant, case)


@pytest.mark.nightly
def test_each_half_predicts_the_other() -> None:
    found = validate(synthetic(), seed=1)
    assert found.cells == len(list(cases()))
    assert 0 < found.scored_cells < found.cells
    (median, worst), (seconds, _) = found.errors(ratios=True), found.errors(ratios=False)
    assert median < 0.05 and seconds < 0.05
    assert worst < 0.3


@pytest.mark.nightly
def test_tail_and_beside_are_fitted_separately() -> None:
    """A step that a GPU computes and one that computes on the same cores have a figure each."""
    found = calibrate(synthetic(noise=0.0), cores=2).variants
    for variant, true in TRUTH.items():
        assert {name: found[variant][name] for name in ("tail", "beside")} == pytest.approx(
            {name: true[name] for name in ("tail", "beside")}, rel=0.1
        ), variant


@pytest.mark.nightly
def test_a_variant_that_was_not_measured_pays_what_the_engine_pays() -> None:
    """Plaintext runs in no study: without ringfence's overheads it would look cheaper than it is, and sealing dearer."""
    found = calibrate(synthetic(), cores=2)
    plain, sealed = (stage_costs(found, VARIANTS[name]) for name in ("plaintext", "ringfence"))
    assert (plain.message, plain.switch, plain.send) == (sealed.message, sealed.switch, sealed.send)
    assert plain.message > 0 and plain.seal == 0
    question = Question(models.load("gpt2"), 8, compute_seconds=1.0)
    beside = [step(found, VARIANTS[name], question) for name in ("plaintext", "ringfence")]
    assert beside[0].seconds < beside[1].seconds
    work = [each.communication.cpu for each in beside]
    assert beside[0].exposed / beside[1].exposed == pytest.approx(work[0] / work[1])


@pytest.mark.nightly
def test_what_is_no_figure_of_the_core_is_not_called_measured() -> None:
    profile = calibrate(synthetic(), cores=2)
    again = parse(dump(profile, "a study", "2026-11-15"), "here").assumed()
    assert "in variants" in again["core.message"] and "in variants" in again["core.switch"]
    assert "not profiled" in again["core.seal"]  # no row of these is of ringfence-profiled
    assert "node.cores" not in again


def test_stages_are_those_of_the_mean_worker() -> None:
    """The clocks are the mean of all workers, so they are divided by what the mean worker does, and not by the root's bytes."""
    size, common = (
        8 << 20,
        {"variant": "ringfence-profiled", "cell": "x", "kind": "collective", "operation": "broadcast"},
    )
    moved = 7 / 8 * size  # the root opens nothing, seven others open everything
    row = {**common, "size": size, "workers": 8, "stage_open": 0.5 * moved}
    assert _stage_costs({"x": {"ringfence-profiled": row}}, cores=8) == pytest.approx({"open": 0.5})


def test_stages_are_not_taken_from_workers_that_share_a_core() -> None:
    """A stage's clock goes on while somebody else has the core."""
    row = {"kind": "collective", "operation": "all_reduce", "size": 8 << 20, "workers": 4, "stage_open": 1e7}
    cells: dict[str, dict[str, Mapping[str, Any]]] = {"x": {"ringfence-profiled": row}}
    assert _stage_costs(cells, cores=4) and not _stage_costs(cells, cores=2)


@pytest.mark.nightly
def test_gloos_memory_and_what_no_cache_holds_are_found_again() -> None:
    found = calibrate(synthetic(noise=0.0), cores=2).variants
    for variant, name in (("gloo", "staged"), ("gloo", "fresh"), ("ringfence", "cold"), ("hop-by-hop", "cold")):
        assert found[variant][name] == pytest.approx(TRUTH[variant][name], rel=0.25), (variant, name)
    assert found["ringfence"]["staged"] == found["ringfence"]["fresh"] == 0


def test_cells_of_equal_settings_are_dealt_into_the_same_half() -> None:
    rows = synthetic()
    twins = [{**row, "cell": f"{row['cell']}-twin"} for row in rows]
    cells = grouped([*rows, *twins])
    for seed in range(4):
        one, other = _halves(cells, seed)
        assert {f"{name}-twin" for name in one if not name.endswith("-twin")} <= set(one)
        assert {f"{name}-twin" for name in other if not name.endswith("-twin")} <= set(other)
        assert set(one) | set(other) == set(cells)
        assert len(one) + len(other) == len(cells)
        assert 0.8 < len(one) / len(other) < 1.25


def test_collectives_and_steps_are_verified_apart_and_beside_free_communication() -> None:
    found = validate(synthetic(), seed=1)
    assert found.scored_of(True) + found.scored_of(False) == found.scored_cells
    of_steps = [line for line in found.lines if line.step and line.scored]
    for ratios in (True, False):
        assert found.errors(ratios)[1] == max(found.errors(ratios, steps)[1] for steps in (True, False))
        assert found.errors(ratios, steps=True)[0] < found.free_errors(ratios)[0]
    assert found.free_errors(ratios=False)[1] == max(
        abs(line.alone / line.measured - 1) for line in of_steps if line.alone is not None
    )
    assert all(line.alone is None for line in found.lines if not line.step)
    shown = found.as_json()
    assert shown["steps"]["if_communication_were_free"]["seconds"]["median_error"] == found.free_errors(False)[0]
    assert "if_communication_were_free" not in shown["collectives"]


@pytest.mark.nightly
def test_another_seed_deals_other_halves_and_the_same_seed_the_same() -> None:
    first, again, other = (validate(synthetic(), seed=seed) for seed in (1, 1, 3))
    assert first == again
    assert first.lines != other.lines


@pytest.mark.nightly
def test_cells_that_are_not_scored_are_shown_and_not_counted() -> None:
    rows = synthetic()
    wild = next(row["cell"] for row in rows if not row["scored"] and row["kind"] == "collective")
    spoilt = [{**row, "seconds": row["seconds"] * (9 if row["cell"] == wild else 1)} for row in rows]
    found = validate(spoilt, seed=1)
    assert any(line.cell == wild and line.error > 0.5 for line in found.lines)
    assert found.errors(ratios=False)[0] < 0.05


def test_a_profile_survives_its_file() -> None:
    found = calibrate(synthetic(), cores=2)
    again = parse(dump(found, "a study", "2026-11-15"), "here")
    for case in list(cases())[:6]:
        alone = None if case["kind"] == "collective" else 0.5
        assert predict(again, case, "ringfence", alone) == pytest.approx(
            predict(found, case, "ringfence", alone), rel=1e-4
        )


def test_costs_inside_a_machine_are_found_in_a_study_of_machines() -> None:
    """What a copy and a message there cost, and the network stack between machines; other studies say nothing about them."""
    rows = [
        row
        for row in synthetic(0.01, machines(), machine_cases())
        if row["variant"] in ("gloo-a", "gloo-b", "ringfence")
    ]
    found = calibrate(rows, cores=2)
    assert not found["inside", "sealed"]
    assert found.figures["inside", "copy"].value == pytest.approx(INSIDE["inside_copy"], rel=0.25)
    assert found.figures["inside", "message"].value == pytest.approx(INSIDE["inside_message"], rel=0.25)
    assert not found.figures["inside", "copy"].assumed
    off = [abs(predict(found, row, "ringfence") / row["seconds"] - 1) for row in rows if row["variant"] == "ringfence"]
    assert sorted(off)[len(off) // 2] < 0.03 and max(off) < 0.15
    again = parse(dump(found, "a study", "2026-11-17"), "here")
    assert predict(again, rows[0], "ringfence") == pytest.approx(predict(found, rows[0], "ringfence"), rel=1e-4)
    alone = calibrate(synthetic(), cores=2)
    assert alone["inside", "sealed"] and alone.variants["ringfence"]["between"] == 1.0


def test_machines_of_a_cell_decide_what_is_sealed() -> None:
    """Four workers: on one machine they share memory; on the loopback each stands for a machine."""
    base = {**next(machine_cases()), "operation": "all_reduce", "size": 25 << 20, "workers": 4}
    one, two, four, loopback = (predict(machines(), {**base, "hosts": hosts}, "ringfence") for hosts in (1, 2, 4, 0))
    assert one < two < four
    assert loopback < four  # the stack costs more between namespaces
    gloo = [predict(machines(), {**base, "hosts": hosts}, "gloo") for hosts in (1, 4)]
    assert gloo[0] < gloo[1]


def test_too_few_cells_are_refused() -> None:
    some = synthetic()
    first = [row for row in some if row["cell"] in {"cell-00", "cell-01"}]
    with pytest.raises(ConfigurationError, match="four cells"):
        calibrate(first)


def test_a_step_needs_to_know_what_it_takes_alone() -> None:
    case = next(case for case in cases() if case["kind"] == "training")
    with pytest.raises(ConfigurationError, match="alone"):
        predict(machine(), case, "ringfence")


def test_gloo_is_the_mean_of_its_two_runs() -> None:
    for variants in grouped(synthetic()).values():
        both = (variants["gloo-a"]["seconds"] + variants["gloo-b"]["seconds"]) / 2
        assert variants["gloo"]["seconds"] == pytest.approx(both)


def test_slow_links_between_hosts_are_the_limit() -> None:
    case = next(case for case in cases() if case["size"] == 25 << 20 and case["workers"] == 4)
    slow = {**case, "hosts": 4, "rate_bits": 10**9}
    wire = 2 * 3 / 4 * (25 << 20) * 8 / 1e9
    assert predict(machine(), slow, "ringfence") == pytest.approx(wire * 1514 / 1448, rel=0.05)


def test_a_step_that_computes_long_enough_does_not_notice_slow_links() -> None:
    case = next(case for case in cases() if case["kind"] == "trace" and case["workers"] == 2)
    slow = {**case, "hosts": 2, "rate_bits": 10**9}
    wire = case_bytes(case) * 8 / 1e9 * 1514 / 1448
    assert predict(machine(), slow, "ringfence", alone=100.0) == pytest.approx(100.0, rel=0.05)
    assert predict(machine(), slow, "ringfence", alone=0.1) == pytest.approx(wire, rel=0.1)


def case_bytes(case: dict[str, Any]) -> int:
    """What a worker of two sends in a step: every gradient once."""
    return models.load(str(case["model"])).elements * 4


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=4))
def test_the_fit_finds_a_minimum_within_its_bounds(middle: list[float]) -> None:
    bounds = [(-5.0, 5.0)] * len(middle)
    ones = [1.0] * len(middle)
    found = nearest(lambda x: tuple(a - b for a, b in zip(x, middle, strict=True)), ones, [0.0] * len(middle), bounds)
    assert math.dist(found, middle) < 0.01
    inside = nearest(lambda x: tuple(a - 9 for a in x), ones, [0.0] * len(middle), bounds)
    assert inside == pytest.approx([5.0] * len(middle), abs=1e-3)
