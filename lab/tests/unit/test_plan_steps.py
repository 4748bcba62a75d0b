"""Training steps, recommendations and published figures."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence_lab.plan import hardware, models, published
from ringfence_lab.plan.recommend import CAPS, WORKERS, plan, sweep
from ringfence_lab.plan.steps import Question, collective, step
from ringfence_lab.plan.work import VARIANTS

GPT2 = models.load("gpt2")
names = st.sampled_from(hardware.names())


@settings(max_examples=60, deadline=None)
@given(name=names, workers=st.sampled_from([2, 5, 8, 64, 256]), cap=st.sampled_from([None, 1.0, 100.0]))
def test_a_step_is_no_shorter_than_its_parts(name: str, workers: int, cap: float | None) -> None:
    profile = hardware.load(name)
    for variant in VARIANTS.values():
        found = step(profile, variant, Question(GPT2, workers, cap))
        assert found.seconds >= found.compute * 0.999999
        assert found.seconds <= (found.compute + found.communication.seconds) * 1.000001
        assert math.isclose(sum(found.terms.values()), found.seconds, rel_tol=1e-9)


@settings(max_examples=40, deadline=None)
@given(name=names, workers=st.sampled_from([2, 8, 64, 1024]), compute=st.floats(1e-3, 100))
def test_sealing_costs_something_and_hop_by_hop_more(name: str, workers: int, compute: float) -> None:
    profile = hardware.load(name)
    question = Question(GPT2, workers, compute_seconds=compute)
    plain, sealed, hops = (
        step(profile, VARIANTS[variant], question).seconds for variant in ("plaintext", "ringfence", "hop-by-hop")
    )
    assert plain <= sealed * 1.000001
    assert plain <= hops * 1.000001


def test_computing_hides_nothing_in_confidential_mode() -> None:
    """Only collectives overlap each other, by no more than the busiest of copies, threads and network permits."""
    for strategy in ("ddp", "fsdp"):
        asked = [Question(GPT2, 4, compute_seconds=seconds, strategy=strategy) for seconds in (0.001, 100.0)]
        short, long = (step(hardware.load("h100-cc"), VARIANTS["ringfence"], each) for each in asked)
        assert short.exposed == pytest.approx(long.exposed)
        assert short.communication.work <= short.exposed <= short.communication.seconds * 1.000001
        assert (short.exposed < 0.9 * short.communication.seconds) is (strategy == "ddp")


def test_computing_hides_communication_where_cores_are_free() -> None:
    found = step(hardware.load("tdx-100g"), VARIANTS["ringfence"], Question(GPT2, 4, compute_seconds=100.0))
    assert found.seconds < 100.2
    assert found.communication.seconds > 0.2


def test_computing_on_the_same_cores_hides_nothing() -> None:
    busy = hardware.load("tdx-100g").with_values(node_workers=8, node_cores=2, compute_busy=1)
    found = step(busy, VARIANTS["ringfence"], Question(GPT2, 2, compute_seconds=10.0))
    assert found.exposed == pytest.approx(found.communication.cpu, rel=0.01)


@settings(max_examples=12, deadline=None)
@given(name=names, workers=st.sampled_from([2, 8, 64, 512]), model=st.sampled_from(["resnet50", "gpt2-xl"]))
def test_advice_never_makes_it_worse(name: str, workers: int, model: str) -> None:
    profile = hardware.load(name)
    found = plan(profile, Question(models.load(model), workers))
    assert found.tuned["ringfence"].seconds <= found.variants["ringfence"].seconds * 1.000001
    assert all(each.gain >= 0.01 for each in found.advice)
    assert {each.lever for each in found.advice} <= {"bucket", "channels", "bucket and channels"}
    assert all(" channels" in each.value for each in found.advice if "channels" in each.lever)


def test_fewer_synchronisations_cost_less() -> None:
    profile = hardware.load("tdx-10g")
    often = step(profile, VARIANTS["ringfence"], Question(GPT2, 64, every=10))
    seldom = step(profile, VARIANTS["ringfence"], Question(GPT2, 64, every=100))
    assert often.exposed == pytest.approx(10 * seldom.exposed)


def test_workers_of_one_machine_cost_less_than_as_many_machines() -> None:
    profile = hardware.load("tdx-25g")
    two = profile.with_values(node_workers=4)
    sealed_inside = two.with_values(inside_sealed=1)
    found, flat, alone = (
        step(each, VARIANTS["ringfence"], Question(GPT2, 8)) for each in (two, sealed_inside, profile)
    )
    assert found.communication.seconds < flat.communication.seconds
    assert found.communication.terms["crypto"] < alone.communication.terms["crypto"]


def test_channels_gain_nothing_inside_a_machine() -> None:
    inside, between = (hardware.load("tdx-25g").with_values(node_workers=count) for count in (8, 1))
    costs = [
        [collective(each, VARIANTS["ringfence"], "all_reduce", 8, 1e8, n).seconds for n in (1.0, 1.46)]
        for each in (inside, between)
    ]
    assert costs[0][0] == costs[0][1]
    assert costs[1][1] < 0.8 * costs[1][0]


@pytest.mark.parametrize(("strategy", "gain"), [("ddp", 1.46), ("fsdp", 1.27)])
def test_channels_are_promised_to_gain_what_was_measured(strategy: str, gain: float) -> None:
    """Where a worker's thread is the limit, two have at most the measured rate; no advice has more than two."""
    profile = hardware.load("tdx-400g")
    one, two = (
        step(profile, VARIANTS["ringfence"], Question(GPT2, 8, strategy=strategy, channels=count)).communication
        for count in (1, 2)
    )
    assert one.bound == "thread"
    assert gain * 0.9 < one.seconds / two.seconds < gain * 1.000001
    advised = plan(profile, Question(GPT2, 8, strategy=strategy, compute_seconds=1e-3, channels=1))
    assert advised.best.channels == 2
    assert any(f"two have {gain} times the rate of one, more were not measured" in each.why for each in advised.advice)


@pytest.mark.parametrize(
    ("name", "question", "says"),
    [
        (
            "h100-cc-node",
            Question(models.load("llama-7b"), 2),
            "1.05 times as long as sealed hop by hop: workers of a machine copy through memory that they share (copy, 37%); "
            "let NCCL or Gloo exchange inside a machine (policy key inside_machine)",
        ),
        (
            "h100-cc",
            Question(models.load("resnet50"), 2, strategy="fsdp", channels=1),
            "1.06 times as long as sealed hop by hop: a pass is copied to the host before it is sent and back after, beside "
            "nothing if there are few (host-device copy, 7%); use larger buckets or units, or bfloat16 on the wire",
        ),
        ("h100-cc-node", Question(models.load("llama-7b"), 16), ""),
        ("tdx-100g", Question(GPT2, 2), ""),
    ],
)
def test_a_plan_says_why_ringfence_loses_and_what_to_do(name: str, question: Question, says: str) -> None:
    assert plan(hardware.load(name), question).loses == says


def test_channels_are_those_that_the_runtime_chooses() -> None:
    """Two where a worker is alone on its machine, has four cores and a link faster than 10 Gbit/s. Gloo has none."""
    for profile, count in (
        (hardware.load("tdx-25g"), 2),
        (hardware.load("tdx-10g"), 1),
        (hardware.load("tdx-25g").with_values(node_cores=3), 1),
        (hardware.load("h100-ppcie"), 1),
    ):
        assert plan(profile, Question(GPT2, 8)).question.channels == count
    one, two = (step(hardware.load("tdx-25g"), VARIANTS["gloo"], Question(GPT2, 8, channels=count)) for count in (1, 2))
    assert one == two


def test_inside_a_machine_nothing_is_sealed() -> None:
    profile = hardware.load("tdx-25g").with_values(node_workers=8)
    sealed, plain = (collective(profile, VARIANTS[name], "all_reduce", 8, 1e8) for name in ("ringfence", "plaintext"))
    assert sealed.terms.get("crypto", 0.0) == 0.0 and sealed.terms.get("wire", 0.0) == 0.0
    assert sealed.seconds == pytest.approx(plain.seconds)


@settings(max_examples=12, deadline=None)
@given(name=names, workers=st.sampled_from([2, 8, 64, 512, 4096]))
def test_plaintext_is_compared_at_what_is_best_for_plaintext(name: str, workers: int) -> None:
    profile, question = hardware.load(name), Question(GPT2, workers)
    found = plan(profile, question)
    least = min(step(profile, VARIANTS["plaintext"], replace(question, cap_mib=cap)).seconds for cap in CAPS)
    assert found.tuned["plaintext"].seconds <= least * 1.016
    assert found.tuned_overhead >= 0.999999


def test_buckets_are_chosen_again_for_more_channels() -> None:
    profile, question = hardware.load("tdx-100g"), Question(models.load("gpt2-xl"), 16_384)
    best = plan(profile, question).best
    assert best.channels == 2
    least = min(step(profile, VARIANTS["ringfence"], replace(best, cap_mib=cap)).seconds for cap in CAPS)
    assert step(profile, VARIANTS["ringfence"], best).seconds <= least * 1.016


def test_advice_is_what_its_gains_say() -> None:
    """Asked with the recommended settings, the answer is the recommended cost, and there is nothing left to advise."""
    profile = hardware.load("tdx-100g")
    found = plan(profile, Question(models.load("gpt2-xl"), 64))
    again = step(profile, VARIANTS["ringfence"], found.best)
    assert again.seconds == pytest.approx(found.tuned["ringfence"].seconds)
    product = math.prod(1 - each.gain for each in found.advice)
    assert found.variants["ringfence"].seconds * product == pytest.approx(again.seconds)


def test_a_sweep_goes_to_16384_and_is_quick() -> None:
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    profile, question = hardware.load("snp-100g"), Question(models.load("llama-7b"), 2)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = list(sweep(profile, question))
    finally:
        sys.setprofile(before)
    assert [each.question.workers for each in found] == list(WORKERS)
    assert WORKERS[-1] == 16_384
    assert calls < 10_000_000  # 3.2 million, or some two seconds


def test_scale_costs_no_more_than_it_must() -> None:
    """From 64 to 16,384 workers, a step with recommended settings grows by less than a factor of three on 400 Gbit/s."""
    profile = hardware.load("tdx-400g")
    small, large = (plan(profile, Question(models.load("llama-7b"), count)) for count in (64, 16_384))
    assert large.tuned["ringfence"].seconds < 3 * small.tuned["ringfence"].seconds


@pytest.mark.parametrize("name", ["h100-ppcie", "h100-cc"])
def test_a_large_model_on_gpus_costs_little_more_at_scale(name: str) -> None:
    """Llama 7B, staged, with at most two channels: at most 30 s and 1.25 times the step of eight workers."""
    profile = hardware.load(name)
    few, *many = (
        plan(profile, Question(models.load("llama-7b"), count)).tuned["ringfence"].seconds
        for count in (8, 1024, 16_384)
    )
    assert max(many) <= min(30.0, 1.25 * few)


def test_published_slowdowns_stand_beside_what_is_predicted() -> None:
    found = published.slowdowns()
    assert [each.published for each in found] == [41.6, 3.03, 3.03, 8.68]
    for each in found:
        assert all(half > each.predicted > twice for half, twice in [each.inputs["rate of a host-device copy"]])
    question = Question(models.load("gpt2-xl"), 4, samples=4)
    plain, hops = (
        step(hardware.load(published.NODE), VARIANTS[variant], question).seconds
        for variant in ("plaintext", "hop-by-hop")
    )
    assert found[0].predicted == pytest.approx(hops / plain)


def test_a_cut_trace_is_found_again_by_its_scale() -> None:
    from ringfence_lab.plan.traces import as_replayed, trace

    for name, most in (
        ("gpt2-xl", 512 << 20),
        ("llama-7b", 2 << 30),
        ("gpt2", 64 << 20),
        ("resnet50", 1 << 30),
        ("gpt2", 1 << 20),
    ):
        cut = trace(models.load(name), None, 4, 10.0, False, most_bytes=most)
        found = as_replayed(models.load(name), None, 4, cut.compute_seconds, False, cut.scale)
        assert found.scale == pytest.approx(cut.scale)
        assert [size for size, _ in found.steps] == [size for size, _ in cut.steps]
        assert found.compute_seconds == pytest.approx(cut.compute_seconds)


def test_questions_are_values() -> None:
    question = Question(GPT2, 4)
    assert replace(question, workers=8).workers == 8
    assert question.workers == 4


@pytest.mark.nightly
@pytest.mark.slow
def test_the_guide_shows_what_the_script_writes() -> None:
    from scripts.page import RESULTS, plan
    from scripts.page.__main__ import stale

    assert stale(plan, plan.read(RESULTS)) == []
