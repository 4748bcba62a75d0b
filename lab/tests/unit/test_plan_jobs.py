"""A job from its traces, and its sealed step: known figures of made-up traces are found, recorded traces give sound answers."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from lab.tests.unit.plan_rows import machine
from lab.tests.unit.test_plan_trace_files import recorded
from ringfence.errors import ConfigurationError
from ringfence_lab.plan import hardware
from ringfence_lab.plan.job_cost import OPERATOR_SECONDS, plan_job, rebucketed, step_of
from ringfence_lab.plan.jobs import Job, StepCollective, job_of, median_interval
from ringfence_lab.plan.models import of_tensors
from ringfence_lab.plan.recorded import Call, Gradient, Recording, Window
from ringfence_lab.plan.steps import Question, step
from ringfence_lab.plan.work import VARIANTS

MIB = 1 << 20


def made(
    rank: int = 0, slower: float = 0.0, steps: int = 3, told: bool = True, on_device: bool = True, workers: int = 4
) -> Recording:
    """Steps of 100 ms: 80 ms of computing, two all-reduces, and a wait of 10 ms for the second one before the last 10 ms."""
    found = Recording(f"rank{rank}", True, "nccl" if on_device else "gloo", rank, workers, on_device)
    for number in range(steps):
        start = number * (0.1 + slower)
        if told:
            found.windows.append(Window(number, start, start + 0.1 + slower))
        found.compute(start, start + 0.08 + slower)
        found.compute(start + 0.09 + slower, start + 0.1 + slower)
        for size, issued, ended in ((8 * MIB, 0.04, 0.06), (4 * MIB, 0.08, 0.09)):
            at = start + slower + issued
            found.calls.append(Call("all_reduce", size, 4, workers, at, at, start + slower + ended))
        for at, elements in ((0.03, MIB), (0.04, MIB), (0.08, MIB)):
            found.gradients.append(Gradient(start + slower + at, elements))
    return found


def test_computing_is_the_step_without_its_waits() -> None:
    job = job_of([made()])
    assert (job.workers, job.busy, len(job.timings), job.left_out) == (4, False, 3, 0)
    for timing in job.timings:
        assert timing.whole == pytest.approx(0.1)
        assert timing.computing == pytest.approx(0.09)
    first, second = job.collectives
    assert (first.bytes, second.bytes) == (8 * MIB, 4 * MIB)
    assert first.ready == pytest.approx(0.04 / 0.09)
    assert second.ready == second.needed == pytest.approx(0.08 / 0.09, rel=1e-6)
    assert first.needed == pytest.approx(0.08 / 0.09)  # the first wait after its end


def test_the_slowest_rank_counts() -> None:
    timing = job_of([made(0), made(1, slower=0.02)]).timings[0]
    assert timing.whole == pytest.approx(0.12)
    assert timing.computing == pytest.approx(0.11)


def test_steps_are_found_by_repetition() -> None:
    job = job_of([made(told=False, steps=4)])
    assert job.by_repetition
    assert [timing.whole for timing in job.timings] == [pytest.approx(0.1)] * 3
    assert sorted(each.bytes for each in job.collectives) == [4 * MIB, 8 * MIB]


def test_a_step_with_other_collectives_is_left_out() -> None:
    odd = made(steps=4)
    del odd.calls[0]
    job = job_of([odd])
    assert (job.left_out, len(job.timings)) == (1, 3)


@pytest.mark.parametrize(
    ("recordings", "says"),
    [
        ([made(0), made(0)], "two files are of rank 0"),
        ([made(0), made(1, workers=8)], "runs with 4 and 8 ranks"),
        ([made(0, told=False, steps=1)], "profiler.step"),
        ([replace(made(0), workers=None)], "--workers"),
        ([made(0), replace(made(1), calls=made(1).calls[::2])], "other collectives"),
        ([replace(made(0), calls=[call._replace(issued=9.0) for call in made(0).calls])], "no step has a collective"),
    ],
)
def test_files_that_do_not_fit_together(recordings: list[Recording], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        job_of(recordings)


def test_a_job_of_a_known_model_costs_what_a_plan_of_it_costs() -> None:
    """The two ways to the same step agree: from the model's tensors, and from a trace of its buckets."""
    profile = hardware.load("tdx-25g")
    question = Question(of_tensors([MIB] * 12, "twelve"), 8, 4.0, compute_seconds=0.2)
    asked = step(profile, VARIANTS["ringfence"], question)
    whole = 12 * 4 * MIB
    job = Job(
        workers=8, backend="gloo", busy=bool(profile["compute", "busy"]), collectives=(), timings=(),
        gradients=(MIB,) * 12, files=1, left_out=0, by_repetition=False,
    )  # fmt: skip
    found = []
    for number in range(12):
        ready = 1 / 3 + 2 / 3 * (number + 1) * 4 * MIB / whole
        found.append(("all_reduce", 4 * MIB, 4, 8, ready, 1.0))
    job = replace(job, collectives=tuple(StepCollective(*each) for each in found))
    assert step_of(profile, VARIANTS["ringfence"], job, 0.2).seconds == pytest.approx(asked.seconds)
    larger = step(profile, VARIANTS["ringfence"], replace(question, cap_mib=24.0))
    tried = rebucketed(job, 24.0)
    assert [each.bytes for each in tried.collectives] == [24 * MIB] * 2
    assert step_of(profile, VARIANTS["ringfence"], tried, 0.2).seconds == pytest.approx(larger.seconds)


def test_a_calibrated_gloo_is_taken_out_of_the_recorded_step() -> None:
    """The recorded step of Gloo is predicted as recorded, but for what recording it took."""
    profile = machine()
    job = job_of([recorded("ddp-rank0.json.gz"), recorded("ddp-rank1.json.gz")])
    plan = plan_job(profile, job)
    assert plan.recorded is not None
    assert plan.profiling == pytest.approx(job.timings[0].operators * OPERATOR_SECONDS)
    assert plan.variants["gloo"].seconds == pytest.approx(plan.recorded - plan.profiling, rel=1e-3)
    assert 0 < plan.computing < plan.recorded
    assert plan.interval[0] < plan.variants["ringfence"].seconds < plan.interval[1]


def test_a_known_step_takes_the_place_of_the_recorded_one() -> None:
    """Gloo's step is predicted as it was given; nothing is taken off for recording, which the given step had none of."""
    profile = machine()
    job = job_of([recorded("ddp-rank0.json.gz"), recorded("ddp-rank1.json.gz")])
    whole = median([timing.whole for timing in job.timings])
    plan, alone = plan_job(profile, job, step=0.7 * whole), plan_job(profile, job)
    assert plan.profiling == 0
    assert plan.variants["gloo"].seconds == pytest.approx(0.7 * whole, rel=1e-3)
    assert plan.interval[1] - plan.interval[0] < alone.interval[1] - alone.interval[0]
    nccl = job_of([recorded("nccl-hand-made.json")])
    whole = median([timing.whole for timing in nccl.timings])
    halved, asked = plan_job(hardware.load("h100-cc"), nccl, step=whole / 2), plan_job(hardware.load("h100-cc"), nccl)
    assert halved.computing == pytest.approx(asked.computing / 2)


def test_bucket_sizes_from_gradients_or_by_putting_buckets_together() -> None:
    profile = hardware.load("h100-cc")
    known = plan_job(profile, job_of([recorded("ddp-rank0.json.gz")]))
    assert known.sizes[0].buckets == 2
    assert {size.buckets for size in known.sizes[1:]} == {1}
    assert known.best is not None
    unknown = plan_job(profile, job_of([recorded("nccl-hand-made.json")]))
    assert "only larger buckets" in unknown.why_no_sizes
    assert [size.cap_mib for size in unknown.sizes] == [None, 50.0, 100.0, 200.0, 400.0, 1000.0]
    assert unknown.sizes[1].buckets == 2
    sharded = plan_job(profile, job_of([recorded("fsdp2-rank0.json.gz")]))
    assert (sharded.sizes, sharded.best) == ((), None)
    assert "no all-reduces" in sharded.why_no_sizes


def test_more_communication_and_more_workers_cost_more() -> None:
    profile = hardware.load("h100-cc")
    job = job_of([recorded("nccl-hand-made.json")])
    plan = plan_job(profile, job)
    assert plan.variants["plaintext"].seconds < plan.variants["ringfence"].seconds < plan.variants["hop-by-hop"].seconds
    assert plan_job(profile, job, workers=64).variants["ringfence"].seconds > plan.variants["ringfence"].seconds
    doubled = replace(job, collectives=tuple(each._replace(bytes=2 * each.bytes) for each in job.collectives))
    assert plan_job(profile, doubled).variants["ringfence"].seconds > plan.variants["ringfence"].seconds
    assert plan_job(profile, job, compute=0.5).computing == 0.5


def test_groups_of_a_part_of_the_ranks_are_not_scaled() -> None:
    job = job_of([recorded("nccl-hand-made.json")])
    parts = replace(job, collectives=tuple(each._replace(group=2) for each in job.collectives))
    assert plan_job(hardware.load("h100-cc"), parts).variants["ringfence"].seconds > 0
    with pytest.raises(ConfigurationError, match="a part of the ranks"):
        plan_job(hardware.load("h100-cc"), parts, workers=64)


def test_an_execution_trace_needs_the_time_of_computing() -> None:
    job = job_of([recorded("ddp-execution-trace-rank0.json.gz")])
    with pytest.raises(ConfigurationError, match="--compute"):
        plan_job(hardware.load("tdx-100g"), job)
    plan = plan_job(hardware.load("tdx-100g"), job, compute=0.02)
    assert plan.variants["ringfence"].seconds >= 0.02
    both = job_of([recorded("ddp-execution-trace-rank0.json.gz"), recorded("ddp-rank0.json.gz")])
    assert len(both.timings) == 3


def test_the_interval_of_a_median() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    low, high = median_interval([float(number) for number in range(100)])
    assert (low, high) == (39.0, 60.0)
