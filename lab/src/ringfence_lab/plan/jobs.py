"""A training job as its traces show it: the collectives of one step, how long the step takes, and how much of it computes.

Every rank's file has the same collectives in each step; a step in which they differ, such as the first, is left out. The clock
of a step is its computing: time in which a rank only waits for collectives is taken out of it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringfence.errors import ConfigurationError
from ringfence_lab.plan.recorded import Call, Gradient, Recording, Window
from ringfence_lab.plan.traces import FORWARD

_LEAST_GAP: Final = 50e-6  # between two operators: below it, a rank did not wait
_NEAR: Final = 200e-6  # after a collective's end, until the rank that waits for it goes on

Spans = NDArray[np.float64]  # rows of start and end, in order, that do not overlap


class StepCollective(NamedTuple):
    """A collective of a step: when it can start and when its result is needed, as shares of the step's computing."""

    operation: str
    bytes: int
    width: int
    group: int
    ready: float
    needed: float


class Timing(NamedTuple):
    """One step of the slowest rank, in seconds."""

    whole: float
    computing: float  # without the time in which it only waited for collectives
    operators: int  #   that the profiler recorded


@dataclass(frozen=True)
class Job:
    """What the traces say."""

    workers: int
    backend: str
    busy: bool  # whether computing takes the host's cores
    collectives: tuple[StepCollective, ...]  # in the order in which they are handed over
    timings: tuple[Timing, ...]  # empty if no file has times
    gradients: tuple[int, ...]  # elements of each parameter's gradient in the order in which they come; may be unknown
    files: int
    left_out: int  # steps with other collectives
    by_repetition: bool  # steps were found by what repeats: the profiler was not told where they end

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.collectives)


class _Step(NamedTuple):
    """One step in one file."""

    window: Window
    calls: tuple[Call, ...]
    gradients: tuple[Gradient, ...]

    @property
    def signature(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(call.key for call in self.calls)


def job_of(recordings: Sequence[Recording]) -> Job:
    """Return the job that some ranks' files are of. Raises ConfigurationError if they do not fit together."""
    _check_together(recordings)
    steps = {index: _steps(recording) for index, recording in enumerate(recordings)}
    found = Counter(step.signature for each in steps.values() for step in each if step.calls)
    if not found:
        raise ConfigurationError(
            f"{recordings[0].name}: no step has a collective in it: record whole steps, and call profiler.step() after each"
        )
    signature = max(found, key=lambda each: (found[each], len(each)))
    kept = {index: [step for step in each if step.signature == signature] for index, each in steps.items()}
    for index, each in kept.items():
        if not each:
            raise ConfigurationError(
                f"{recordings[index].name} has other collectives than {recordings[0].name}: give files of one run, one for "
                "each rank. Ranks with different work, as in a pipeline, are not covered"
            )
    timed = [index for index, recording in enumerate(recordings) if recording.timed]
    shown = timed[0] if timed else 0
    workers = max((recording.workers or 0 for recording in recordings), default=0)
    if workers < 2:
        raise ConfigurationError(f"{recordings[shown].name} does not say how many ranks took part: give --workers")
    on_device = any(recording.on_device for recording in recordings)
    timings = _timings([recordings[index] for index in timed], [kept[index] for index in timed])
    example = sorted(kept[shown], key=lambda step: step.window.end - step.window.start)[(len(kept[shown]) - 1) // 2]
    backend = next((recording.backend for recording in recordings if recording.backend), "unknown")
    return Job(
        workers=workers,
        backend=backend,
        busy=not on_device and "nccl" not in backend,
        collectives=_placed(recordings[shown], example, workers),
        timings=timings,
        gradients=tuple(gradient.elements for gradient in example.gradients),
        files=len(recordings),
        left_out=sum(len(each) for each in steps.values()) - sum(len(each) for each in kept.values()),
        by_repetition=not recordings[shown].windows,
    )


def _check_together(recordings: Sequence[Recording]) -> None:
    ranks = [recording.rank for recording in recordings if recording.rank is not None and recording.timed]
    twice = [rank for rank, count in Counter(ranks).items() if count > 1]
    if twice:
        raise ConfigurationError(f"two files are of rank {twice[0]}: give one for each rank")
    sizes = {recording.workers for recording in recordings if recording.workers}
    if len(sizes) > 1:
        raise ConfigurationError(
            f"the files are of runs with {' and '.join(map(str, sorted(sizes)))} ranks: give files of one run"
        )


def _steps(recording: Recording) -> list[_Step]:
    windows = recording.windows or _repeated(recording)
    issued = [call.issued for call in recording.calls]
    accumulated = [gradient.at for gradient in recording.gradients]
    found = []
    for window in windows:
        calls = recording.calls[bisect_left(issued, window.start) : bisect_left(issued, window.end)]
        first, last = bisect_left(accumulated, window.start), bisect_left(accumulated, window.end)
        found.append(_Step(window, tuple(calls), tuple(recording.gradients[first:last])))
    return found


def _repeated(recording: Recording) -> list[Window]:
    """Return steps where the profiler was not told about any: from a gradient to its next repetition.

    Without gradients, what repeats may be a layer as well as a step, so nothing is guessed.
    """
    found: list[tuple[float, object]] = [(gradient.at, gradient.elements) for gradient in recording.gradients]
    if found:
        found += [(call.issued, call.key) for call in recording.calls]
    found.sort(key=lambda each: each[0])
    period = _period([key for _, key in found])
    if period is None:
        raise ConfigurationError(
            f"{recording.name}: no step boundaries: call profiler.step() after each step, or record at least two steps with "
            "their gradients (CPU activities, record_shapes=True)"
        )
    starts = [at for at, _ in found[::period]]
    return [Window(number, start, end) for number, (start, end) in enumerate(pairwise(starts)) if end > start]


def _period(keys: Sequence[object]) -> int | None:
    """Return the length of the shortest sequence that the whole one repeats, at least twice; None if there is none."""
    longest = [0] * len(keys)  # of a proper prefix that is also a suffix, up to each place
    matched = 0
    for at in range(1, len(keys)):
        while matched and keys[at] != keys[matched]:
            matched = longest[matched - 1]
        matched += keys[at] == keys[matched]
        longest[at] = matched
    period = len(keys) - (longest[-1] if longest else 0)
    return period if 0 < period <= len(keys) // 2 else None


def _timings(recordings: Sequence[Recording], kept: Sequence[Sequence[_Step]]) -> tuple[Timing, ...]:
    """Return the steps that all files have, each of the rank that took or computed longest."""
    if not recordings:
        return ()
    found: list[dict[int, Timing]] = []
    for recording, steps in zip(recordings, kept, strict=True):
        busy = _union(np.array(recording.starts), np.array(recording.ends))
        found.append({step.window.number: _timing(recording, step, busy) for step in steps})
    numbers = sorted(set.intersection(*(set(each) for each in found)))
    if not numbers:
        raise ConfigurationError("the files have no step in common: record the same steps on all ranks")
    return tuple(
        Timing(
            max(each[number].whole for each in found),
            max(each[number].computing for each in found),
            max(each[number].operators for each in found),
        )
        for number in numbers
    )


def _timing(recording: Recording, step: _Step, busy: Spans) -> Timing:
    whole = step.window.end - step.window.start
    waited = float(np.sum(np.diff(_waits(step, busy), axis=1)))
    events = recording.events
    operators = bisect_left(events, step.window.end) - bisect_left(events, step.window.start)
    return Timing(whole, max(whole - waited, 0.0), operators if not recording.on_device else 0)


def _waits(step: _Step, busy: Spans) -> Spans:
    """Return the spans of a step in which a collective ran and nothing was computed."""
    start, end = step.window.start, step.window.end
    inside = busy[bisect_left(busy[:, 1], start) : bisect_left(busy[:, 0], end)]
    edges = np.concatenate([[start], np.clip(inside, start, end).ravel(), [end]])
    gaps = edges.reshape(-1, 2)
    gaps = gaps[np.diff(gaps, axis=1)[:, 0] > _LEAST_GAP]
    running = _union(np.array([call.begun for call in step.calls]), np.array([call.ended for call in step.calls]))
    found = [
        (max(gap[0], span[0]), min(gap[1], span[1]))
        for gap in gaps
        for span in running[bisect_left(running[:, 1], gap[0]) : bisect_left(running[:, 0], gap[1])]
    ]
    return np.array([each for each in found if each[1] > each[0]]).reshape(-1, 2)


def _union(starts: Spans, ends: Spans) -> Spans:
    """Return the union of spans."""
    if not len(starts):
        return np.empty((0, 2))
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], starts[1:] > reached[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([starts[first], reached[last]], axis=1)


def _placed(recording: Recording, step: _Step, workers: int) -> tuple[StepCollective, ...]:
    """Return the collectives of a step with the shares of computing at which they can start and are needed."""
    if not recording.timed:
        return _without_times(step, workers)
    waits = _waits(step, _union(np.array(recording.starts), np.array(recording.ends)))
    whole = step.window.end - step.window.start - float(np.sum(np.diff(waits, axis=1)))

    def share(at: float) -> float:
        waited = float(np.sum(np.clip(at - waits[:, 0], 0.0, waits[:, 1] - waits[:, 0])))
        return min(1.0, max(0.0, (at - step.window.start - waited) / whole)) if whole > 0 else 0.0

    last = share(step.gradients[-1].at) if step.gradients and not recording.on_device else 1.0
    found = []
    for call in step.calls:
        ready = share(call.issued)
        later = waits[waits[:, 1] >= call.ended - _NEAR]
        needed = share(float(later[0, 0])) if len(later) else max(ready, last)
        found.append(
            StepCollective(call.operation, call.bytes, call.width, call.group or workers, ready, max(ready, needed))
        )
    return tuple(found)


def _without_times(step: _Step, workers: int) -> tuple[StepCollective, ...]:
    """All-reduces alone are DDP's, spread over the backward pass by their bytes; others are waited for one by one."""
    whole = sum(call.bytes for call in step.calls) or 1
    count = len(step.calls)
    replicated = all(call.operation == "all_reduce" for call in step.calls)
    found, filled = [], 0
    for index, call in enumerate(step.calls):
        filled += call.bytes
        ready = FORWARD + (1 - FORWARD) * filled / whole if replicated else (index + 1) / (count + 1)
        needed = 1.0 if replicated else ready
        found.append(StepCollective(call.operation, call.bytes, call.width, call.group or workers, ready, needed))
    return tuple(found)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return two of the values between which the median of their distribution lies in about 95 % of cases.

    With fewer than six values it is the smallest and the largest.
    """
    ordered = sorted(values)
    skipped = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered)) - 0.5)) if len(ordered) > 5 else 0
    return ordered[skipped], ordered[-1 - skipped]
