"""The numbers behind each picture, by name: plain data, so that a digest of it tells whether a picture is stale."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from ringfence_lab.bench.intervals import Interval
from ringfence_lab.bench.names import PROFILED
from ringfence_lab.bench.results import Result
from ringfence_lab.bench.units import size_text
from ringfence_lab.report.digest import digest
from scripts.page.edition import LARGE, MODELS, OTHERS, PROFILES, RATES, Edition
from scripts.page.headline import median_calls, points
from scripts.page.targets import SEALED, line_of, rate_text

__all__ = ["SERIES", "digest"]

Point = dict[str, Any]  # label, ratio: [low, median, high], resolution
_DIGITS: Final = 4


def _point(label: str, result: Result | None, variant: str = SEALED) -> list[Point]:
    line = line_of(result, variant)
    if result is None or line is None:
        return []
    ratio = [round(value, _DIGITS) for value in (line.ratio.low, line.ratio.median, line.ratio.high)]
    return [{"label": label, "ratio": ratio, "resolution": round(result.resolution, _DIGITS)}]


def _joined(points: Iterable[list[Point]]) -> list[Point]:
    return [point for some in points for point in some]


def _named(groups: dict[str, list[Point]]) -> dict[str, list[Point]]:
    return {name: points for name, points in groups.items() if points}


def all_reduce(edition: Edition) -> dict[str, list[Point]]:
    """Between two workers by median calls; with more, in batches of large calls."""
    calls = [
        {"label": size_text(size), "ratio": [round(call.ratio, _DIGITS)] * 3, "resolution": 0.0}
        for size, call in median_calls(edition).items()
    ]
    batches = {
        f"{workers} workers": _joined(
            _point(size_text(size), edition.collective("all_reduce", size, workers)) for size in LARGE
        )
        for workers in (4, 8)
    }
    return _named({"2 workers, median call": calls, **batches})


def variants(edition: Edition) -> dict[str, list[Point]]:
    """Other ways to seal, and not to, over sealed ringfence in the same rounds."""
    names = {
        "ringfence-unsealed": "ringfence, unsealed",
        "hop-by-hop": "sealed hop by hop",
        "tls": "TLS 1.3 ring",
    }
    found: dict[str, list[Point]] = {}
    for workers in (2, 4):
        result = edition.collective("all_reduce", 25 << 20, workers)
        over = result.sealed_over if result else {}
        found[f"{workers} workers"] = [
            {"label": title, "ratio": _inverse(over[name]), "resolution": 0.0}
            for name, title in names.items()
            if name in over
        ]
    return _named(found)


def _inverse(ratio: Interval) -> list[float]:
    return [round(1 / value, _DIGITS) for value in (ratio.high, ratio.median, ratio.low)]


def collectives(edition: Edition) -> dict[str, list[Point]]:
    return _named(
        {
            f"{workers} workers": _joined(
                _point(operation.replace("_", "-"), edition.collective(operation, 25 << 20, workers))
                for operation in OTHERS
            )
            for workers in (2, 4)
        }
    )


def training(edition: Edition) -> dict[str, list[Point]]:
    steps = [(model, "ddp") for model in MODELS] + [(model, "fsdp2") for model in MODELS]
    return _named(
        {
            f"{workers} workers": _joined(
                _point(f"{model}, {strategy.upper()}", edition.training(model, strategy, workers))
                for model, strategy in steps
            )
            for workers in (2, 4)
        }
    )


def rates(edition: Edition) -> dict[str, list[Point]]:
    return _named(
        {
            f"{workers} hosts": _joined(
                _point(
                    f"{rate_text(rate)}, {size_text(size)}",
                    edition.collective("all_reduce", size, workers, rate=rate),
                )
                for rate in RATES
                for size in LARGE
            )
            for workers in (2, 4)
        }
    )


def stages(edition: Edition) -> dict[str, dict[str, float]]:
    found = {}
    for operation, size, workers in PROFILES:
        line = line_of(edition.profile(operation, size, workers), PROFILED)
        if line and line.stages:
            shares = {stage: round(share, _DIGITS) for stage, share in line.stages.items()}
            found[f"{operation.replace('_', '-')}, {size_text(size)}, {workers} workers"] = shares
    return found


def buckets(edition: Edition) -> dict[str, list[Point]]:
    """Seconds of a step, of both, by the size of DDP's buckets."""
    steps = [(bucket, edition.training("gpt2", "ddp", 2, bucket)) for bucket in edition.buckets]
    found: dict[str, list[Point]] = {}
    for variant, title in (("gloo-a", "plaintext Gloo"), (SEALED, "ringfence")):
        for bucket, result in steps:
            if line := line_of(result, variant):
                label = "default" if bucket is None else f"{bucket:g}"
                found.setdefault(title, []).append({"label": label, "seconds": round(line.seconds, _DIGITS)})
    return found


SERIES: Final[dict[str, Callable[[Edition], dict[str, Any]]]] = {
    "headline": points,
    "all-reduce": all_reduce,
    "variants": variants,
    "collectives": collectives,
    "training": training,
    "rates": rates,
    "stages": stages,
    "buckets": buckets,
}
