"""Single calls of all-reduce between two workers: medians after a barrier, and means back to back.

`ringfence bench collectives` times batches of calls that follow each other at once, as a training step issues them, and shows
means. At small sizes Gloo's mean is far above its median: some of its calls take very long. So here every call is timed by
itself, and the same calls back to back. A call's time is that of the slower worker. Gloo and ringfence take turns.
"""

from __future__ import annotations

import statistics
from typing import Any, Final

from ringfence.cli.terminal import table
from ringfence_lab.bench.units import size_text, time_text
from ringfence_lab.bench.worker_pool import Placement, WorkerPool
from ringfence_lab.progress import Progress

CALLS: Final = {4 << 10: 60, 64 << 10: 60, 1 << 20: 30, 25 << 20: 6}  # of each round, by size
_WARM_UP: Final = 3
_VARIANTS: Final = {"gloo": "gloo-a", "ringfence": "ringfence"}  # by their names in the results


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return the results by size and variant, in seconds."""
    variants = list(_VARIANTS.values())
    with Progress(rounds * len(CALLS)) as progress, WorkerPool([Placement()] * 2, variants) as pool:
        return [_measure(pool, size, calls, rounds, progress) for size, calls in CALLS.items()]


def _measure(pool: WorkerPool, size: int, calls: int, rounds: int, progress: Progress) -> dict[str, Any]:
    pool.tell("prepare", operation="all_reduce", size=size)
    single: dict[str, list[float]] = {name: [] for name in _VARIANTS}
    batch: dict[str, list[float]] = {name: [] for name in _VARIANTS}
    for number in range(rounds):
        progress.say(size_text(size))
        for name in list(_VARIANTS)[:: 1 if number % 2 else -1]:
            variant = _VARIANTS[name]
            pool.tell("calls", name=variant, count=_WARM_UP)
            single[name] += map(max, *pool.tell("calls", name=variant, count=calls))
            batch[name].append(pool.measure("round", turns=[(variant, calls)], busy=False)[variant]["seconds"])
        progress.step()
    return {"size": size, **{name: _summary(single[name], batch[name]) for name in _VARIANTS}}


def _summary(single: list[float], batch: list[float]) -> dict[str, float]:
    return {
        "median_after_barrier": statistics.median(single),
        "p95_after_barrier": statistics.quantiles(single, n=20)[-1],
        "mean_back_to_back": statistics.fmean(batch),
        "calls": len(single),
    }


def results_text(results: list[dict[str, Any]]) -> str:
    """Return the results as text for a terminal."""
    rows: list[tuple[str, ...]] = [
        ("size", "variant", "median", "95th percentile", "mean, back to back", "ratio of medians")
    ]
    for each in results:
        for name in _VARIANTS:
            found = each[name]
            times = [found[key] for key in ("median_after_barrier", "p95_after_barrier", "mean_back_to_back")]
            ratio = times[0] / each["gloo"]["median_after_barrier"]
            rows.append((size_text(each["size"]), name, *map(time_text, times), f"{ratio:.2f}"))
    return table(rows)
