"""The figures before they are drawn: which cells they show, what they say of them, and what they leave out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.tests.unit.report_samples import FACTS, RUN, Row, cell, everything
from ringfence_lab.bench.intervals import Interval
from ringfence_lab.report import overhead, steps, summary_text
from ringfence_lab.report.figure import Missing, Picture, verdict
from ringfence_lab.report.labels import brief, brief_interval, fully
from ringfence_lab.report.page import provenance
from ringfence_lab.report.study import Study, study
from ringfence_lab.report.write import BUILDERS

PROFILE = ("seal", "open", "lock", "reduce", "send", "receive", "wait")


def study_of(rows: list[Row]) -> Study:
    return study(rows, {row["machine"]: {**FACTS, **RUN} for row in rows})


def figures_of(found: Study) -> list[Picture | Missing]:
    return [figure for build in BUILDERS for figure in build(found)]


def drawn(figures: Any) -> Picture:
    (figure,) = figures
    assert isinstance(figure, Picture), figure
    return figure


def step(name: str = "gpt2", factor: float = 1.1, **settings: Any) -> list[Row]:
    times = {"ringfence": factor, "hop-by-hop": 2.0, "alone": 0.5, "ringfence-profiled": 1.2}
    return cell(f"{name}-{factor}-{settings}", 1.0, times, kind="training", model=name, strategy="ddp", **settings)


def test_a_full_study_has_every_figure() -> None:
    figures = figures_of(study_of(everything()))
    assert [each for each in figures if isinstance(each, Missing)] == []
    names = [each.name for each in figures]
    variants = ["variants-2", "variants-4", "variants-8"]
    assert names == ["models", *variants, "stages", "buckets", "wires", "rates", "sizes"]


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_what_a_study_does_not_hold_is_said_and_not_drawn(build: Any) -> None:
    nothing = study_of(cell("one", 1.0, {}, operation="all_reduce", size=4096))
    (missing,) = build(nothing)
    assert isinstance(missing, Missing)
    assert missing.why


def test_overhead_by_model_shows_plain_steps_only() -> None:
    rows = step() + step(bucket_mb=50.0) + step(wire="bfloat16") + step(hosts=2, rate_bits=10**9) + step(workers=4)
    figure = drawn(overhead.models(study_of(rows)))
    assert {name: [point["label"] for point in points] for name, points in figure.numbers.items()} == {
        "2 workers": ["gpt2"],
        "4 workers": ["gpt2"],
    }


def test_a_noisy_cell_is_marked_and_not_counted() -> None:
    figure = drawn(overhead.models(study_of(step() + step("bert-base", 3.0, resolution=0.3))))
    points = {point["label"]: point for point in figure.numbers["2 workers"]}
    assert points["bert-base"]["scored"] is False
    assert "scored" not in points["gpt2"]
    assert "1 cell is too noisy to count" in figure.says
    assert "1.10 times" in summary_text.headline(study_of(step() + step("bert-base", 3.0, resolution=0.3)))


def test_the_headline_claims_no_difference_within_the_resolution() -> None:
    same = summary_text.headline(study_of(step(factor=1.03) + step("resnet50", 0.98)))
    assert (
        "as long as with plaintext Gloo, within the resolution of the measurement (1.00 times in the median of 2 cells)"
        in same
    )
    assert "20 % longer than with plaintext Gloo" in summary_text.headline(study_of(step(factor=1.2)))
    assert "nothing can be said" in summary_text.headline(study_of(step(resolution=0.3)))


def test_a_cell_with_few_rounds_is_marked_and_not_counted() -> None:
    found = study_of(step() + step("bert-base", 3.0, rounds=1))
    figure = drawn(overhead.models(found))
    points = {point["label"]: point for point in figure.numbers["2 workers"]}
    assert points["bert-base"]["scored"] is False
    assert "1.10 times" in figure.says
    assert "1 cell has too few rounds to count" in figure.says
    assert "1 more cell has too few rounds to count" in summary_text.headline(found)
    nothing = study_of(step(rounds=4) + step("bert-base", resolution=0.3))
    assert "over 5 rounds or more" in summary_text.headline(nothing)
    said = drawn(overhead.models(nothing)).says
    assert "all of these cells are too noisy or have too few rounds to count" in said


def trace(workers: int, scaled: float, factor: float = 1.2) -> list[Row]:
    about = {"kind": "trace", "model": "llama-7b", "strategy": "ddp", "device": "gpu"}
    return cell(f"llama-{workers}-{scaled}", 1.0, {"ringfence": factor}, workers=workers, scaled=scaled, **about)


def test_what_a_replayed_step_stands_for_is_said() -> None:
    found = study_of(trace(2, 56.5))
    assert "a training step, real or replayed, in which everything" in summary_text.headline(found)
    assert "a training step in which everything" in summary_text.headline(study_of(step()))
    (cut,) = (sentence for sentence in summary_text.limits(found) if "cut" in sentence)
    assert "stand for the whole step only where communication outweighs computing" in cut


def test_where_all_is_noisy_the_sentences_say_so() -> None:
    figure = drawn(overhead.models(study_of(step(resolution=0.3))))
    assert "all of these cells are too noisy to count" in figure.says
    assert "No difference is claimed" in figure.says


@pytest.mark.parametrize(("factor", "said"), [(0.8, "faster"), (1.0, "the same"), (1.1, "the same"), (1.2, "slower")])
def test_a_difference_is_claimed_only_outside_of_what_gloo_differs_from_itself(factor: float, said: str) -> None:
    (one,) = study_of(step(factor=factor)).cells
    assert verdict(one) == said


def test_naive_and_pipelined_stand_beside_each_other() -> None:
    figure = drawn(overhead.variants(study_of(step(factor=1.25))))
    assert "1.60 times as long as ringfence" in figure.says
    assert set(figure.numbers) == {"ringfence", "sealed hop by hop"}


def test_a_limited_network_is_shown_with_its_rate() -> None:
    figure = drawn(overhead.rates(study_of(everything())))
    labels = [point["label"] for points in figure.numbers.values() for point in points]
    assert labels == ["1 Gbit/s, all-reduce, 25 MiB", "2.5 Gbit/s, all-reduce, 25 MiB"]
    assert all(one.rate_bits for one in figure.cells)


def test_buckets_are_in_order_and_the_shortest_is_named() -> None:
    figure = drawn(steps.buckets(study_of(everything())))
    (lines,) = figure.numbers.values()
    assert [point["label"] for point in lines["ringfence"]] == ["1", "default", "50", "200"]
    assert "shortest with default buckets" in figure.says


def test_wire_types_are_compared_for_the_same_case_only() -> None:
    rows = step() + step(wire="bfloat16", factor=0.55) + step("resnet50", wire="bfloat16")
    figure = drawn(steps.wires(study_of(rows)))
    assert list(figure.numbers) == ["gpt2, 2 workers"]
    assert "ringfence 0.50 times" in figure.says


@given(
    st.lists(st.floats(0, 3), min_size=7, max_size=7),
    st.floats(0.01, 5),
    st.one_of(st.none(), st.floats(0, 5)),
)
def test_pieces_of_a_step_fill_it_or_overlap(shares: list[float], took: float, compute: float | None) -> None:
    times = {"ringfence-profiled": took} | ({} if compute is None else {"alone": compute + 1e-6})
    rows = cell("one", 1.0, times, kind="training", model="gpt2", strategy="ddp")
    for row in rows:
        if row["variant"] == "ringfence-profiled":
            row.update({f"stage_{stage}": share * 1e9 for stage, share in zip(PROFILE, shares, strict=True)})
    (one,) = study_of(rows).cells
    pieces = steps.pieces(one)
    assert all(seconds >= 0 for seconds in pieces.values())
    assert sum(pieces.values()) >= took * (1 - 1e-9)
    work = sum(pieces.values()) - pieces["wait"] - pieces["rest"]
    assert sum(pieces.values()) == pytest.approx(max(took, work))
    assert pieces["wait"] <= shares[-1] + 1e-9


def test_each_figure_says_where_it_comes_from() -> None:
    found = study_of(everything())
    for figure in figures_of(found):
        assert isinstance(figure, Picture)
        origin = provenance(found, figure, "Gloo")
        assert origin["Command"] == "ringfence study"
        assert origin["Date"] == "2026-01-02"
        assert origin["Machine"] == "2 cores of A CPU <of some kind>, Linux 6.18"
        assert "7 rounds each" in origin["Samples"]


def test_without_a_description_of_the_machine_the_report_says_so() -> None:
    found = study(everything(), {})
    figure = drawn(overhead.models(found))
    origin = provenance(found, figure, "Gloo")
    assert origin["Date"] == origin["Command"] == "not known"


def test_what_was_cut_or_left_out_is_said() -> None:
    found = study_of(everything())
    assert any("cut" in sentence for sentence in summary_text.limits(found))
    assert any("4 and 8 workers on 2 cores" in sentence for sentence in summary_text.limits(found))
    names = [fully(one) for one in found.cells]
    assert "gpt2-xl trace, GPU, 8 workers, 1/12 of the step" in names
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.23456, "1.23 s"), (0.9999, "1 s"), (0.0456, "45.6 ms"), (3e-6, "3 µs"), (0.0, "0"), (120.0, "120 s")],
)
def test_times_have_three_figures(seconds: float, text: str) -> None:
    assert brief(seconds) == text


def test_an_interval_is_in_the_unit_of_its_median() -> None:
    assert brief_interval(Interval(1.2345, 0.9, 12.3456)) == "1.23 s [0.9, 12.3]"
    assert brief_interval(Interval(0.04567, 0.0441, 0.0472)) == "45.7 ms [44.1, 47.2]"
