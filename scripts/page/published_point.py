"""The preset `published` of simulated GPU TEEs: the fixed cost and the rate of a copy that two published figures imply.

Lee et al. (arXiv 2501.11771 v3): GPT-2 XL on four GPU TEEs is 41.6 times slower with DDP's default buckets and 3.03 times
with larger ones. Two figures give two unknowns; every other input is that of the preset `h100`. Batches and the size of the
larger buckets are not known: SAMPLES and WHOLE are the assumptions of the preset, and CHOICES are others.
Steps are computed whole, from the study's own cost of a ring. The mean over models is held out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean
from typing import Final, NamedTuple

from scipy.optimize import brentq

from ringfence_lab.accelerator import tee
from ringfence_lab.accelerator.tee import Tee
from ringfence_lab.bench.tee_variants import figures_of, tee_of
from ringfence_lab.plan import models
from ringfence_lab.plan.buckets import buckets
from ringfence_lab.plan.published import GPUS, PUBLISHED
from ringfence_lab.plan.traces import trace
from ringfence_lab.report.figure import ratio_of
from ringfence_lab.report.labels import ratio_text
from ringfence_lab.report.study import Study
from ringfence_lab.report.tee import CONFIDENTIAL, SEALED
from ringfence_lab.study.blocks import GRADIENT_BYTES
from ringfence_lab.study.tee_cost import ring_seconds
from scripts.generated import table

PRESET: Final = "published"
MODEL: Final = "gpt2-xl"
FLOPS: Final = 3.956e14  # a second, as in the grid gpu-tee
SAMPLES: Final = 8  # of a step of GPT-2 XL: the smallest multiple of the grid's 4 by a power of two that has a solution
WHOLE: Final = 6000.0  # MiB: one bucket for the whole of GPT-2 XL
HELD_OUT: Final = {"bert-large": SAMPLES, "gpt2": SAMPLES, MODEL: SAMPLES, "resnet50": 8 * SAMPLES}
CHOICES: Final = ((4, WHOLE), (8, 200.0), (SAMPLES, WHOLE), (16, WHOLE), (64, 800.0), (64, WHOLE))
_LONGEST: Final = 10.0  # seconds: the most that a fixed cost may be
_UNLIMITED: Final = 1e18  # bytes/s: encryption takes no time, and the link alone is left


class Point(NamedTuple):
    """The preset that meets the figure for default buckets, and comes closest to the one for larger buckets."""

    devices: Tee
    enlarged: float  # slowdown with larger buckets: the published one, or the least that any rate gives
    met: bool  # whether both figures are met


def seconds_of(model: str, samples: int) -> float:
    """Return how long a step of a model computes."""
    return models.load(model).step_flops(samples) / FLOPS


def slowdown(devices: Tee, model: str, cap_mib: float | None, computing: float) -> float:
    """Return how many times as long as in the clear a whole step takes in confidential mode, hop by hop."""
    made = trace(models.load(model), cap_mib, GRADIENT_BYTES, computing, False, most_bytes=1 << 62).steps
    confidential, plain = (tee_of(name, figures_of(devices)) for name in ("confidential", "plain"))
    return ring_seconds(confidential, GPUS, made) / ring_seconds(plain, GPUS, made)


def solve(samples: int, cap_mib: float) -> Point:
    """Return the fixed cost and the rate that give both published figures, or the nearest.

    A lower rate needs a smaller fixed cost to meet the first figure. Both buckets carry the same bytes, but the larger ones
    have fewer copies, so the second slowdown falls as the rate rises: where it is too large without any encryption, no pair
    of a fixed cost and a rate gives both.
    """
    base, computing = tee.load("h100"), seconds_of(MODEL, samples)

    def default(devices: Tee) -> float:
        return slowdown(devices, MODEL, None, computing) - PUBLISHED["default"]

    def with_rate(logarithm: float) -> Tee:
        """The first figure, met by the fixed cost."""
        devices = base.with_values(cpu_rate=math.exp(logarithm))
        return devices.with_values(
            copy_overhead=_root(lambda cost: default(devices.with_values(copy_overhead=cost)), 0, _LONGEST)
        )

    def enlarged(devices: Tee) -> float:
        return slowdown(devices, MODEL, cap_mib, computing)

    free = base.with_values(copy_overhead=0.0)
    high = math.log(_UNLIMITED)
    low = _root(lambda rate: default(free.with_values(cpu_rate=math.exp(rate))), math.log(1e6), high)
    nearest = with_rate(high)
    if (least := enlarged(nearest)) > PUBLISHED["enlarged"]:
        return Point(nearest, least, False)
    found = with_rate(_root(lambda rate: enlarged(with_rate(rate)) - PUBLISHED["enlarged"], low + 1e-9, high))
    return Point(found, enlarged(found), True)


def copy_rate(devices: Tee) -> float:
    """Return the bytes per second of a copy apart from its fixed cost: encryption and the link, one after the other."""
    return 1 / (1 / devices.cpu_rate + 1 / devices.link_rate)


def all_reduces(cap_mib: float | None, model: str = MODEL) -> int:
    return len(buckets(models.load(model).parameters, cap_mib, GRADIENT_BYTES))


def least_models() -> int:
    """Return how many models the published mean is of, at least: the worst of them, and others that are not slower at all."""
    return math.ceil((PUBLISHED["default"] - 1) / (PUBLISHED["average"] - 1))


def held_out(devices: Tee, factor: float = 1.0) -> float:
    """Return the mean slowdown of the models with default buckets, with this multiple of the preset's batches."""
    return fmean(slowdown(devices, name, None, factor * seconds_of(name, count)) for name, count in HELD_OUT.items())


def choices() -> str:
    """A table of what other assumptions about the batch and the larger buckets would give."""
    rows = []
    for samples, cap in CHOICES:
        point = solve(samples, cap)
        found = [f"at least {point.enlarged:.2f}", "none", "–", "–"]
        if point.met:
            copies = (f"{1e3 * point.devices.copy_overhead:.1f} ms", f"{copy_rate(point.devices) / 1e9:.1f} GB/s")
            found = [f"{point.enlarged:.2f}", *copies, f"{held_out(point.devices, samples / SAMPLES):.1f}"]
        rows.append([samples, _bucket(cap), all_reduces(cap), *found])
    header = (
        "samples",
        "larger buckets",
        "all-reduces",
        "slowdown",
        "fixed cost of a copy",
        "its rate",
        "mean of models",
    )
    return table(header, rows)


def steps(found: Study) -> str:
    """A table of the steps with the preset: as computed, and as simulated, where steps are cut."""
    devices, simulated = tee.load(PRESET), {(cell.model, cell.bucket_mb): cell for cell in found.cells}
    asked: dict[tuple[str, float | None], float | str] = {(name, None): "" for name in HELD_OUT}
    asked |= {(MODEL, None): PUBLISHED["default"], (MODEL, 200.0): "", (MODEL, WHOLE): PUBLISHED["enlarged"]}
    rows, usual = [], []
    for (name, cap), published in asked.items():
        here = simulated.get((name, cap))
        values = [
            slowdown(devices, name, cap, seconds_of(name, HELD_OUT[name])),
            ratio_of(here, CONFIDENTIAL).median if here else math.nan,
            ratio_of(here, SEALED).median if here else math.nan,
            slowdown(devices, name, cap, seconds_of(MODEL, SAMPLES)),
        ]
        usual += [values] if cap is None else []
        rows.append([name, _bucket(cap), all_reduces(cap, name), published, *map(_text, values)])
    means = map(_text, map(fmean, zip(*usual, strict=True)))
    rows.append(["mean, default buckets", "", "", PUBLISHED["average"], *means])
    header = ("model", "buckets", "all-reduces", "published", "computed", "simulated", "ringfence", "computing alike")
    about = (
        f"A mean of {PUBLISHED['average']} that contains {PUBLISHED['default']} is of at least {least_models()} models. "
        f"`{found.command}`, {found.days}."
    )
    return f"{table(header, rows)}\n\n{about}"


def _bucket(cap_mib: float | None) -> str:
    return "default" if cap_mib is None else "one" if cap_mib == WHOLE else f"{cap_mib:g} MiB"


def _text(value: float) -> str:
    return "–" if math.isnan(value) else ratio_text(value)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    return float(brentq(function, low, high, xtol=1e-12, rtol=1e-10))
