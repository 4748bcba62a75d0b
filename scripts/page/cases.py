"""The cases of a folder of samples, in the order in which the page "What it costs" and its pictures show them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from ringfence_lab.bench.names import PROFILED
from ringfence_lab.bench.results import Result, VariantResult
from ringfence_lab.bench.units import size_text, time_text
from scripts.page.edition import SEALED, Edition, line_of

SIZE: Final = 25 << 20  # of DDP's buckets
LARGE: Final = (SIZE, 100 << 20)
OPERATIONS: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
MODELS: Final = ("resnet50", "bert-base", "gpt2")
RATES: Final = {
    "100mbit": "0.1 Gbit/s",
    "1gbit": "1 Gbit/s",
    "2.5gbit": "2.5 Gbit/s",
    "10gbit": "10 Gbit/s",
    None: "not limited",
}
PROFILES: Final = (
    *(("all_reduce", size, workers) for workers in (2, 4) for size in LARGE),
    *((operation, SIZE, 2) for operation in OPERATIONS[1:]),
)
Cases = Iterable[tuple[tuple[str, ...], Result | None]]  # the first cells of a row, and what was measured


def name_of(operation: str) -> str:
    return operation.replace("_", "-")


def all_reduces(edition: Edition, counts: Iterable[int], sizes: Iterable[int] = LARGE, **settings: Any) -> Cases:
    return [
        ((str(workers), size_text(size)), edition.collective("all_reduce", size, workers, **settings))
        for workers in counts
        for size in sizes
    ]


def collectives(edition: Edition) -> Cases:
    return [
        ((name_of(operation), str(workers)), edition.collective(operation, SIZE, workers))
        for operation in OPERATIONS[1:]
        for workers in (2, 4)
    ]


def training(edition: Edition) -> Cases:
    return [
        ((model, strategy.upper(), str(workers)), edition.training(model, strategy, workers))
        for strategy in ("ddp", "fsdp2")
        for model in MODELS
        for workers in (2, 4)
    ]


def buckets(edition: Edition) -> Cases:
    """Steps of GPT-2 by the size of DDP's buckets, its own first."""
    cases = [each.case for each in edition.results if each.case["kind"] == "training"]
    sizes = {case["bucket_mb"] for case in cases if case["strategy"] == "ddp" and case["model"] == "gpt2"}
    return [
        (("default (25, the first 1)" if size is None else f"{size:g}",), edition.training("gpt2", "ddp", 2, size))
        for size in sorted(sizes, key=lambda size: size or 0)
    ]


def rates(edition: Edition) -> Iterator[tuple[tuple[str, ...], Result | None]]:
    for rate in RATES:
        for workers in (2, 4):
            for size in LARGE:
                result = edition.collective("all_reduce", size, workers, rate=rate)
                if rate and result:
                    yield (RATES[rate], size_text(result.case["burst"]), str(workers), size_text(size)), result


def machines(edition: Edition, inside: bool) -> Cases:
    """Cells of DDP's buckets in the study of machines x workers; between machines, with their lower bounds."""
    found = []
    bounds = edition.bounds[""]["bounds"] if edition.bounds else ()
    least = {(each["layout"], each["operation"]): time_text(each["seconds"]) for each in bounds}
    for each in edition.machines.results if edition.machines else ():
        case = each.case
        if case["kind"] != "collective" or PROFILED in case["variants"] or case["size"] != SIZE:
            continue
        if (case["hosts"] == 1) is inside:
            name, workers = name_of(case["operation"]), case["workers"]
            place = f"{case['hosts']} x {workers // case['hosts']}"
            cells = (
                (name, str(workers))
                if inside
                else (place, RATES[case["rate"]], name, least.get((place, case["operation"]), "–"))
            )
            key = (case["hosts"], workers, OPERATIONS.index(case["operation"]), case["rate"] or "")
            found.append((key, cells, each))
    return [(cells, each) for _, cells, each in sorted(found, key=lambda each: each[0])]


def between(edition: Edition, place: str) -> tuple[Result, VariantResult]:
    """The all-reduce of 25 MiB over links that are not limited, between machines as in "2 x 4", and ringfence's line."""
    wanted = (place, RATES[None], "all-reduce")
    result = next((result for cells, result in machines(edition, inside=False) if cells[:-1] == wanted), None)
    line = line_of(result)
    assert result and line, f"the study of machines has no cell {wanted}"
    return result, line


def medians(edition: Edition) -> dict[int, tuple[float, float]]:
    """Seconds of Gloo's and ringfence's median call between two workers, by size: what `ringfence bench latency` records."""
    both = ("gloo", SEALED)
    return {
        each["size"]: tuple(each[name]["median_after_barrier"] for name in both)
        for each in edition.calls.get("sizes", ())
    }


def profiles(edition: Edition) -> Iterator[tuple[tuple[str, int, int], VariantResult]]:
    for place in PROFILES:
        line = line_of(edition.collective(*place, profiled=True), PROFILED)
        if line and line.stages:
            yield place, line
