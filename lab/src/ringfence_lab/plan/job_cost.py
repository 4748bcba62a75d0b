"""Predicts the sealed step of a recorded job: its seconds with an interval, the best bucket size, and what dominates.

Where Gloo ran on the cores that compute, both slow each other down, so a step's computing cannot be read off the trace. On a
machine with a calibrated cost of Gloo, it is the computing with which the model predicts the recorded step of Gloo. Elsewhere
it is the step without the time in which nothing but a collective ran.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Final

from ringfence.errors import ConfigurationError
from ringfence_lab.plan.buckets import DEFAULT_MIB, MIB, buckets
from ringfence_lab.plan.hardware import Hardware
from ringfence_lab.plan.jobs import Job, StepCollective, Timing, median_interval
from ringfence_lab.plan.recommend import CAPS, shown
from ringfence_lab.plan.steps import Step, collective, overlapped, waited
from ringfence_lab.plan.work import FREE, VARIANTS, Cost, Variant

# What recording an operator with its shapes adds to a step: the least that was measured, on a busy Xeon of 2.5 GHz.
OPERATOR_SECONDS: Final = 5e-6
CALIBRATED_ERROR: Final = (
    0.25  # of what communication costs: about the worst of the planner's validation, a calibrated machine
)
ASSUMED_ERROR: Final = 0.5  # the same where figures of the profile are assumed: not validated
_LEAST_COMPUTING: Final = 0.02  # of a step
_ROUNDS: Final = 50
_WORTH: Final = 0.01

Interval = tuple[float, float]


@dataclass(frozen=True)
class BucketSize:
    """A setting of DDP's bucket_cap_mb and what is predicted for it."""

    cap_mib: float | None
    buckets: int
    seconds: float


@dataclass(frozen=True)
class JobPlan:
    """The answer about one job."""

    job: Job
    recorded_workers: int
    recorded: float | None  # seconds of the step in the trace; None if it has no times
    profiling: float  # seconds of it that recording took
    computing: float  # seconds of it without communication
    computing_from: str  # where that comes from
    variants: dict[str, Step]
    interval: Interval  # of the sealed step
    sizes: tuple[BucketSize, ...]  # of buckets, as they were recorded first; empty if they cannot be changed
    why_no_sizes: str  # or not all

    @property
    def best(self) -> BucketSize | None:
        """The bucket size with the shortest sealed step, if it saves 1 % over the recorded ones."""
        if not self.sizes:
            return None
        least = min(self.sizes, key=lambda size: size.seconds)
        return least if least.seconds < self.sizes[0].seconds * (1 - _WORTH) else None


def plan_job(
    hardware: Hardware,
    job: Job,
    compute: float | None = None,
    workers: int | None = None,
    step: float | None = None,
) -> JobPlan:
    """Predict the sealed step of a job.

    `compute`: seconds of a step without communication, if known. `step`: seconds of the recorded job's step without the
    profiler, if known. `workers`: another scale. Raises ConfigurationError if the trace has no times and `compute` is not
    given.
    """
    timings = job.timings
    if not timings and compute is None:
        raise ConfigurationError(
            "an execution trace has no times: give --compute SECONDS of a step without communication, or a trace of "
            "torch.profiler's export_chrome_trace() instead or as well"
        )
    recorded = median([timing.whole for timing in timings]) if timings else None
    sharing = _sharing(hardware, job)
    profiling = median([_profiling(timing, sharing) for timing in timings]) if timings and step is None else 0.0
    computing, source = _computing(hardware, job, compute, step, 1.0 if step is None else 0.0)
    asked = job if workers is None else scaled(job, workers)
    steps = {name: step_of(hardware, VARIANTS[name], asked, computing) for name in shown(hardware)}
    sizes, why = _sizes(hardware, asked, computing)
    interval = _interval(hardware, job, asked, computing, known=compute is not None or step is not None)
    return JobPlan(asked, job.workers, recorded, profiling, computing, source, steps, interval, sizes, why)


def _sharing(hardware: Hardware, job: Job) -> float:
    """Return how many workers of the calibrated machine share a core: each of them records its operators."""
    if not job.busy or "gloo" not in hardware.variants:
        return 1.0
    return max(1.0, min(job.workers, hardware["node", "workers"]) / max(1.0, hardware["node", "cores"]))


def _profiling(timing: Timing, times: float) -> float:
    """Return the seconds of a step that recording its operators took; never most of it."""
    return min(timing.operators * OPERATOR_SECONDS * times, timing.whole / 2)


def _computing(
    hardware: Hardware, job: Job, given: float | None, at: float | None = None, profiling: float = 1.0
) -> tuple[float, str]:
    """Return a step's seconds without communication and where they come from. `at`: of a step that took so long."""
    if given is not None:
        return given, "as given"
    by_length = sorted(job.timings)
    middle = by_length[(len(by_length) - 1) // 2]
    whole = median([timing.whole for timing in job.timings]) if at is None else at
    share = whole / middle.whole if middle.whole > 0 else 1.0
    cost = _profiling(middle, profiling * _sharing(hardware, job))
    name = "the recorded step" if at is None else "the given step"
    if job.busy and "gloo" in hardware.variants and "gloo" in job.backend:
        return _inverted(hardware, job, whole - cost), f"{name} less what Gloo costs on this hardware"
    waited = middle.whole - middle.computing
    least = _LEAST_COMPUTING * whole
    return max(least, whole - waited * share - cost), f"{name} less what it waited for collectives"


def _inverted(hardware: Hardware, job: Job, wanted: float) -> float:
    """Return the computing with which Gloo's step is predicted to take `wanted` seconds."""
    low, high = _LEAST_COMPUTING * wanted, wanted
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if step_of(hardware, VARIANTS["gloo"], job, middle).seconds > wanted:
            high = middle
        else:
            low = middle
    return (low + high) / 2


def step_of(hardware: Hardware, variant: Variant, job: Job, computing: float, error: float = 1.0) -> Step:
    """Return the cost of a step of the job that computes for so long. `error`: times what collectives are predicted to cost."""
    costs = {key: _cost(hardware, variant, *key).times(error) for key in map(_key, job.collectives)}
    total = FREE
    for each in job.collectives:
        total = total.plus(costs[_key(each)])
    found = [(each.ready * computing, each.needed * computing, costs[_key(each)]) for each in job.collectives]
    made = Step(computing + waited(variant, found), computing, total, len(found))
    return overlapped(hardware, variant, made, job.workers, job.busy)


_Key = tuple[str, int, int, int]


def _key(each: StepCollective) -> _Key:
    return each.operation, each.bytes, each.width, each.group


def _cost(hardware: Hardware, variant: Variant, operation: str, size: int, width: int, group: int) -> Cost:
    kind = "all_reduce" if operation == "barrier" else operation
    narrow = width == 2 and kind in ("all_reduce", "reduce_scatter")
    return collective(hardware, variant, kind, group, float(size), 1, narrow)


def scaled(job: Job, workers: int) -> Job:
    """Return the job with another number of workers. Groups of all workers grow with it.

    Raises ConfigurationError if the job has smaller groups, which may grow or become more.
    """
    if any(each.group != job.workers for each in job.collectives):
        raise ConfigurationError(
            "--workers does not apply to a trace with groups of a part of the ranks: how they would grow is not known"
        )
    return replace(job, workers=workers, collectives=tuple(each._replace(group=workers) for each in job.collectives))


def _interval(hardware: Hardware, job: Job, asked: Job, computing: float, known: bool) -> Interval:
    """Return the interval of the sealed step: of the recorded steps, of recording itself, and of communication's cost.

    Each is varied by itself, and their squares add up: they are independent of each other. The first two do not count if the
    step or its computing is known.
    """
    sealed = VARIANTS["ringfence"]
    middle = step_of(hardware, sealed, asked, computing).seconds
    off = CALIBRATED_ERROR if "ringfence" in hardware.variants else ASSUMED_ERROR
    varied = [[step_of(hardware, sealed, asked, computing, error).seconds for error in (1 - off, 1 + off)]]
    if job.timings and not known:
        ends = median_interval([timing.whole for timing in job.timings])
        others = [_computing(hardware, job, None, end)[0] for end in ends]
        others += [_computing(hardware, job, None, None, times)[0] for times in (2.0, 0.0)]
        seconds = [step_of(hardware, sealed, asked, each).seconds for each in others]
        varied += [seconds[:2], seconds[2:]]
    below = math.sqrt(sum(max(0.0, middle - min(pair)) ** 2 for pair in varied))
    above = math.sqrt(sum(max(0.0, max(pair) - middle) ** 2 for pair in varied))
    return middle - below, middle + above


def _sizes(hardware: Hardware, job: Job, computing: float) -> tuple[tuple[BucketSize, ...], str]:
    """Return the sealed step for each bucket size that can be tried, the recorded one first; or why there is none."""
    reduced = [each for each in job.collectives if each.operation == "all_reduce"]
    if not reduced:
        return (), "the job has no all-reduces: bucket sizes are DDP's"
    sealed = VARIANTS["ringfence"]
    found = [BucketSize(None, len(reduced), step_of(hardware, sealed, job, computing).seconds)]
    known = _gradients_known(job)
    largest = max(each.bytes for each in reduced) / MIB
    for cap in CAPS[1:]:
        if cap is None or (not known and cap <= largest):
            continue
        tried = rebucketed(job, cap)
        number = sum(each.operation == "all_reduce" for each in tried.collectives)
        found.append(BucketSize(cap, number, step_of(hardware, sealed, tried, computing).seconds))
    if known:
        return tuple(found), ""
    why = "only larger buckets: the trace does not show their gradients. Record CPU activities with record_shapes=True"
    return tuple(found), why


def _gradients_known(job: Job) -> bool:
    """Return whether the gradients in the trace are those that its all-reduces sum."""
    reduced = (each.bytes // each.width for each in job.collectives if each.operation == "all_reduce")
    return sum(job.gradients) == sum(reduced)


def rebucketed(job: Job, cap_mib: float | None) -> Job:
    """Return the job with DDP's buckets cut at another size. Gradients come when they came in the trace.

    Where the trace does not show gradients, buckets are put together and not cut.
    """
    reduced = [each for each in job.collectives if each.operation == "all_reduce"]
    others = [each for each in job.collectives if each.operation != "all_reduce"]
    width, group = reduced[0].width, reduced[0].group
    needed = max(each.needed for each in reduced)
    made = []
    filled = 0
    parts = job.gradients if _gradients_known(job) else tuple(each.bytes // width for each in reduced)
    for size in buckets(tuple(reversed(parts)), DEFAULT_MIB if cap_mib is None else cap_mib, width):
        filled += size
        ready = _ready(reduced, filled)
        made.append(StepCollective("all_reduce", size, width, group, ready, max(ready, needed)))
    return replace(job, collectives=tuple(sorted([*made, *others], key=lambda each: each.ready)))


def _ready(reduced: Sequence[StepCollective], filled: int) -> float:
    """Return the share of computing after which so many bytes of gradients are there, between what was recorded."""
    points = list(_points(reduced))
    for (low, before), (high, after) in pairwise(points):
        if filled <= high:
            return before + (after - before) * (filled - low) / (high - low)
    return points[-1][1]


def _points(reduced: Iterable[StepCollective]) -> Iterator[tuple[int, float]]:
    """Yield bytes and shares. The first bucket's gradients came as fast as those of the whole, at the earliest at the start."""
    found = list(reduced)
    total, filled = sum(each.bytes for each in found), 0
    first, last = found[0], found[-1]
    rest = total - first.bytes
    speed = (last.ready - first.ready) / rest if rest else first.ready * 2 / 3 / total
    yield 0, max(0.0, first.ready - speed * first.bytes)
    for each in found:
        filled += each.bytes
        yield filled, each.ready
