"""What the project set out to show, as data: each target with its limit, and whether the samples meet it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ringfence_lab.bench.intervals import Interval
from ringfence_lab.bench.results import Line, Result
from ringfence_lab.bench.units import size_text
from scripts.page.edition import LARGE, MODELS, OTHERS, SIZES, Edition
from scripts.page.headline import SEALED, median_calls

SMALL = SIZES[:3]


class Target(NamedTuple):
    """A ratio to plaintext Gloo that is to be at most `limit`, within the resolution of the same rounds."""

    what: str
    limit: float
    ratio: Interval
    resolution: float | None  # None: the ratio of median calls, without an interval
    rounds: int

    @property
    def met(self) -> bool:
        return self.ratio.high <= self.limit + (self.resolution or 0.0)

    @property
    def verdict(self) -> str:
        """A target that is met only by what the instrument cannot tell apart is not called met without more."""
        if self.ratio.high <= self.limit:
            return "yes"
        return "within Gloo / Gloo" if self.met else "**no**"


def line_of(result: Result | None, variant: str = SEALED) -> Line | None:
    """A variant's line of a result, where it took part."""
    return next((line for line in result.lines if line.variant == variant), None) if result else None


def targets(edition: Edition) -> list[Target]:
    """Those that have been measured, in the order of the list."""
    found = [
        Target(
            f"all-reduce, {size_text(size)}, 2 workers",
            0.8 if size in SMALL else 1.0,
            Interval(call.ratio, call.ratio, call.ratio),
            None,
            call.rounds,
        )
        for size, call in median_calls(edition).items()
    ]
    for what, limit, result in _wanted(edition):
        line = line_of(result)
        if result is not None and line is not None:
            found.append(Target(what, limit, line.ratio, result.resolution, result.rounds))
    return found


def _wanted(edition: Edition) -> Iterator[tuple[str, float, Result | None]]:
    yield "all-reduce, 100 MiB, 2 workers", 1.0, edition.collective("all_reduce", LARGE[1], 2)
    for workers, limit in ((4, 1.0), (8, 1.1)):
        for size in LARGE:
            what = f"all-reduce, {size_text(size)}, {workers} workers"
            yield what, limit, edition.collective("all_reduce", size, workers)
    for workers in (2, 4):
        for operation in OTHERS:
            what = f"{operation.replace('_', '-')}, 25 MiB, {workers} workers"
            yield what, 1.0, edition.collective(operation, 25 << 20, workers)
    for workers in (2, 4):
        for size in LARGE:
            what = f"all-reduce, {size_text(size)}, {workers} workers, caller busy"
            yield what, 2.0, edition.collective("all_reduce", size, workers, busy=True)
    for workers in (2, 4):
        for model in MODELS:
            yield f"{model}, DDP step, {workers} workers", 1.0, edition.training(model, "ddp", workers)
    for workers in (2, 4):
        yield f"gpt2, FSDP2 step, {workers} workers", 1.0, edition.training("gpt2", "fsdp2", workers)
    for rate in ("1gbit", "2.5gbit"):
        for workers in (2, 4):
            for size in LARGE:
                what = f"all-reduce, {size_text(size)}, {workers} workers at {rate_text(rate)}"
                yield what, 1.03, edition.collective("all_reduce", size, workers, rate=rate)


def rate_text(rate: str) -> str:
    """ "2.5gbit" as people write it."""
    return rate.replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")
