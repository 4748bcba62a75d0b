"""Memory beyond the tensors: the peak of each worker's resident memory in an all-reduce, less what is said here.

    start    resident once torch and the default Gloo group are up, before the variant is made
    warm     after it was made and has summed a tensor of 4 KiB
    peak     the most while it sums the large tensor, three times

beyond = peak - warm - the tensor. The variant's own connections, threads and first buffers are warm - start: that is
shown beside it and not hidden in it. The kernel's socket buffers belong to no process; their limits are shown too.
Links are the TCP connections that carried a share of the tensor. Each variant has processes of its own, beside
nothing but the Gloo group that torch.distributed needs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ringfence.cli.terminal import table, wrap
from ringfence_lab.bench import machine
from ringfence_lab.bench.measure import Measured, Setup
from ringfence_lab.bench.names import BASELINE
from ringfence_lab.bench.samples import Case, Round, Samples
from ringfence_lab.bench.units import size_text
from ringfence_lab.bench.worker_pool import Placement, WorkerPool
from ringfence_lab.progress import Progress

_MIB: Final = 1 << 20


def measure(setup: Setup, sizes: Sequence[int], workers: Sequence[int], facts: Mapping[str, Any]) -> list[Measured]:
    """Measure memory. A round starts a new worker pool and measures all sizes, small ones first."""
    samples = Samples(setup.results)
    groups = {
        (count, name): [_case(setup, facts, count, name, size) for size in sorted(sizes)]
        for count in workers
        for name in setup.variants
    }
    missing = [
        group
        for group, cases in groups.items()
        for _ in range(setup.rounds - min(len(samples.rounds(case)) for case in cases))
    ]
    with Progress(len(missing)) as progress:
        for count, name in missing:
            progress.say(f"{name}, {count} workers")
            _measure_once(setup, facts, groups[count, name], samples)
            progress.step()
    return [Measured(case, samples.rounds(case)[: setup.rounds]) for cases in groups.values() for case in cases]


def _case(setup: Setup, facts: Mapping[str, Any], workers: int, variant: str, size: int) -> dict[str, Any]:
    around = replace(setup, variants=(variant,)).circumstances(facts)
    return {"kind": "memory", "operation": "all_reduce", "size": size, "workers": workers, **around}


def _measure_once(setup: Setup, facts: Mapping[str, Any], cases: Sequence[Case], samples: Samples) -> None:
    workers, (variant,) = cases[0]["workers"], cases[0]["variants"]
    with WorkerPool([Placement()] * workers, list(dict.fromkeys((BASELINE[0], variant)))) as worker_pool:
        samples.begin({**facts, **worker_pool.facts}, setup.command, machine.now())
        before = worker_pool.tell("warm", name=variant)
        for case in cases:
            during = worker_pool.tell("swell", name=variant, size=case["size"])
            found = {f"rank {rank}": {**before[rank], **during[rank]} for rank in range(workers)}
            if len(samples.rounds(case)) < setup.rounds:
                samples.add(case, found)


@dataclass(frozen=True)
class MemoryResult:
    """One variant, size and number of workers: the worst worker of each round, the median over rounds; in bytes."""

    case: Case
    rounds: int
    variant: str
    links: int  # of one worker, that carried data
    beyond: float  # peak - warm - tensor
    per_link: float
    made: float  # warm - start
    socket_buffers_per_link: float  # limits, in the kernel


def result(measured: Measured) -> MemoryResult:
    """Summarize the rounds of a case."""
    rounds, case = measured.rounds, measured.case
    return MemoryResult(
        case=case,
        rounds=len(rounds),
        variant=case["variants"][0],
        links=max(each["links"] for samples in rounds for each in samples.values()),
        beyond=_median_of_worst(rounds, _beyond),
        per_link=_median_of_worst(rounds, lambda each: _beyond(each) / each["links"]),
        made=_median_of_worst(rounds, lambda each: each["warm"] - each["start"]),
        socket_buffers_per_link=_median_of_worst(rounds, lambda each: each["socket_buffers"] / each["links"]),
    )


def _beyond(each: Mapping[str, Any]) -> float:
    beyond: float = each["peak"] - each["warm"] - each["tensor"]
    return beyond


def _median_of_worst(rounds: Sequence[Round], value: Callable[[Mapping[str, Any]], float]) -> float:
    return statistics.median(max(value(each) for each in samples.values()) for samples in rounds)


def results_text(results: Sequence[MemoryResult]) -> str:
    """Return the results as text for a terminal."""
    header = ("variant", "workers", "tensor", "links", "beyond", "per link", "setup", "kernel/link")
    rows = []
    for each in results:
        what = (each.variant, str(each.case["workers"]), size_text(each.case["size"]), str(each.links))
        values = (each.beyond, each.per_link, each.made, each.socket_buffers_per_link)
        rows.append((*what, *(f"{value / _MIB:.1f} MiB" for value in values)))
    notes = (
        "beyond: the worst worker's peak of resident memory in an all-reduce, less what was resident after a warm-up with "
        "4 KiB and less the tensor itself.",
        "setup: what connections, threads and the warm-up took before that.",
        "kernel/link: the most that the socket buffers of one link hold, outside of every process.",
    )
    return "\n".join([table([header, *rows]), *map(wrap, notes)])
