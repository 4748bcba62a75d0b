"""Checks predictions from traces: records steps with Gloo, predicts the sealed step from the files, and measures it.

Gloo's and ringfence's steps take turns in the same processes, before and after each recording, so that all of them meet the
same machine. A prediction sees the files of the profiler and the hardware profile, and nothing that was measured;
a second one sees the seconds of Gloo's step without the profiler as well.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from ringfence_lab.bench.worker_pool import Placement, WorkerPool
from ringfence_lab.plan.hardware import Hardware
from ringfence_lab.plan.job_cost import JobPlan, plan_job
from ringfence_lab.plan.jobs import Job, job_of
from ringfence_lab.plan.trace_files import read

_VARIANTS: Final = ("gloo-a", "ringfence")
_WARM_UP: Final = 2


@dataclass(frozen=True)
class TraceCase:
    """One training job: a model, DDP's bucket size and the workers on this machine."""

    model: str
    bucket_mb: float | None
    workers: int

    @property
    def name(self) -> str:
        size = "default buckets" if self.bucket_mb is None else f"buckets of {self.bucket_mb:g} MiB"
        return f"{self.model}, {size}, {self.workers} workers"


CASES: Final = (
    TraceCase("gpt2-tiny", None, 2),
    TraceCase("gpt2-tiny", 0.1, 2),
    TraceCase("resnet18", None, 2),
    TraceCase("resnet18", 2.0, 2),
    TraceCase("bert-mini", None, 2),
    TraceCase("bert-mini", 4.0, 2),
    TraceCase("gpt2-tiny", None, 4),
    TraceCase("resnet18", None, 4),
    TraceCase("bert-mini", 4.0, 4),
)
QUICK: Final = (TraceCase("gpt2-tiny", None, 2), TraceCase("gpt2-tiny", 0.1, 2))


class Effort(NamedTuple):
    """How much is recorded and measured for each case."""

    repeats: int = 4  # recordings
    steps: int = 4  #   of each
    rounds: int = 3  #  of one step for each variant, before and after each recording


USUAL: Final = Effort()


class Repeat(NamedTuple):
    """One recording and what is predicted from it."""

    recorded: float  # seconds of Gloo's step in the trace
    predicted: float  # of the sealed step, from the files alone
    low: float
    high: float
    by_step: float  # the same if the step without the profiler is known


@dataclass(frozen=True)
class Checked:
    """Predictions of one case beside what was measured. A plan predicts the median step, so all figures are medians."""

    case: TraceCase
    repeats: tuple[Repeat, ...]
    sealed: tuple[float, ...]  # seconds of each measured step
    gloo: tuple[float, ...]  # the same without the profiler
    dominant: str

    def middle(self, field: str) -> float:
        """Return the median of one figure of the recordings, or of the steps of `sealed` or `gloo`."""
        return median(self._samples(field))

    def _samples(self, field: str) -> Sequence[float]:
        measured = {"sealed": self.sealed, "gloo": self.gloo}
        return measured.get(field) or [getattr(each, field) for each in self.repeats]

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds of the sealed step."""
        return self.middle("predicted") / self.middle("sealed")

    @property
    def ratio_by_step(self) -> float:
        """The same if the seconds of Gloo's step without the profiler are known, as a job's own log has them."""
        return self.middle("by_step") / self.middle("sealed")

    @property
    def ratio_of_quartiles(self) -> float:
        """The same by lower quartiles: further from the ratio, the more the load of the machine changed."""
        return quartile(self._samples("predicted")) / quartile(self.sealed)

    @property
    def unchanged(self) -> float:
        """The ratio of the simplest prediction: the sealed step takes as long as the recorded one."""
        return self.middle("recorded") / self.middle("sealed")

    @property
    def error(self) -> float:
        """The relative error of the predicted seconds."""
        return abs(self.ratio - 1)

    @property
    def within(self) -> bool:
        """Whether the measured step is within the predicted interval."""
        return self.middle("low") <= self.middle("sealed") <= self.middle("high")

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.case.model,
            "bucket_mib": self.case.bucket_mb,
            "workers": self.case.workers,
            **{field: self.middle(field) for field in (*Repeat._fields, "sealed", "gloo")},
            "error": self.error,
            "ratio": self.ratio,
            "ratio_by_step": self.ratio_by_step,
            "ratio_of_quartiles": self.ratio_of_quartiles,
            "unchanged": self.unchanged,
            "within": self.within,
            "dominant": self.dominant,
            "samples": {
                "recordings": [each._asdict() for each in self.repeats],
                "sealed": list(self.sealed),
                "gloo": list(self.gloo),
            },
        }


def quartile(values: Sequence[float]) -> float:
    """Return the lower quartile."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]


def errors(found: Sequence[Checked], ratio: str = "ratio") -> tuple[float, float]:
    """Return the median and the worst error of one of the ratios."""
    each_error = [abs(getattr(each, ratio) - 1) for each in found]
    return median(each_error), max(each_error)


def check(
    hardware: Hardware,
    cases: Sequence[TraceCase] = CASES,
    effort: Effort = USUAL,
    keep: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Checked]:
    """Record, predict and measure the cases one after the other. `keep`: a folder for the files of the profiler."""
    for workers, together in groupby(sorted(cases, key=lambda case: case.workers), key=lambda case: case.workers):
        say(f"starting {workers} workers")
        with WorkerPool([Placement()] * workers, _VARIANTS) as pool:
            for case in together:
                say(case.name)
                with tempfile.TemporaryDirectory(prefix="ringfence-traces-") as folder:
                    place = Path(folder) if keep is None else keep / _slug(case)
                    place.mkdir(parents=True, exist_ok=True)
                    yield _checked(pool, hardware, case, effort, place)


def _slug(case: TraceCase) -> str:
    size = "default" if case.bucket_mb is None else f"{case.bucket_mb:g}MiB"
    return f"{case.model}-{size}-{case.workers}w"


def _checked(pool: WorkerPool, hardware: Hardware, case: TraceCase, effort: Effort, folder: Path) -> Checked:
    pool.tell("prepare_training", model=case.model, strategy="ddp", bucket_mb=case.bucket_mb, only=list(_VARIANTS))
    _rounds(pool, _WARM_UP)
    seconds = _rounds(pool, effort.rounds)
    jobs = []
    for number in range(effort.repeats):
        place = folder / str(number)
        place.mkdir()
        answers = pool.tell("record", name="gloo-a", steps=effort.steps, folder=str(place))
        for name, measured in _rounds(pool, effort.rounds).items():
            seconds[name] += measured
        jobs.append(traced([Path(answer["path"]) for answer in answers]))
    gloo = median(seconds["gloo-a"])
    said = [(plan_job(hardware, job), plan_job(hardware, job, step=gloo)) for job in jobs]
    repeats = tuple(_repeat(alone, by_step) for alone, by_step in said)
    dominant = said[-1][0].variants["ringfence"].dominant
    return Checked(case, repeats, tuple(seconds["ringfence"]), tuple(seconds["gloo-a"]), dominant)


def _repeat(alone: JobPlan, by_step: JobPlan) -> Repeat:
    assert alone.recorded is not None
    first, second = (plan.variants["ringfence"].seconds for plan in (alone, by_step))
    return Repeat(alone.recorded, first, *alone.interval, second)


def _rounds(pool: WorkerPool, count: int) -> dict[str, list[float]]:
    """Measure one step of each variant in turn, so many times, in alternating order."""
    seconds: dict[str, list[float]] = {name: [] for name in _VARIANTS}
    for number in range(count):
        turns = [(name, 1) for name in (_VARIANTS if number % 2 else reversed(_VARIANTS))]
        for name, sample in pool.measure("train", turns=turns).items():
            seconds[name].append(sample["seconds"])
    return seconds


def traced(paths: Sequence[Path]) -> Job:
    """Return the job whose ranks wrote these files."""
    recordings = []
    for path in paths:
        with path.open("rb") as file:
            recordings.append(read(file, path.name))
    return job_of(recordings)
