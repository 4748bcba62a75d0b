"""The tables of machines x workers: between machines, where everything is sealed, and inside one, where nothing is."""

from __future__ import annotations

from collections.abc import Iterator

from ringfence_lab.bench.names import PROFILED
from ringfence_lab.bench.results import Result
from ringfence_lab.bench.units import size_text, time_text
from scripts.page.edition import LARGE, Edition
from scripts.page.targets import SEALED, rate_text

_ORDER = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


def circumstances(edition: Edition) -> str:
    """The machine and the date of this study, which are not those of the rest of the page."""
    found = edition.machines
    if found is None:
        return "*Not measured yet.*"
    facts = found.facts
    return (
        f"Measured on {found.dates[-1]} with `{found.commands[-1]}`, on {facts['cores']} cores of {facts['cpu']}, with "
        f"source digest `{facts['source']}`. All machines are network namespaces that share these cores."
    )


def inside(edition: Edition) -> Iterator[tuple[str, ...]]:
    """One machine: only transports are compared. Of small calls the slowest of Gloo's would dominate the ratios."""
    yield (
        "collective",
        "size",
        "workers",
        "Gloo, TCP",
        "ringfence, shared memory",
        "ratio",
        "Gloo / Gloo",
        "inside the machine",
    )
    for each in _cells(edition):
        if each.case["hosts"] == 1 and each.case["size"] >= LARGE[0]:
            case, gloo, ours, counted = each.case, each.lines[0], each.lines[2], each.lines[2].counted
            yield (
                case["operation"].replace("_", "-"),
                size_text(case["size"]),
                str(case["workers"]),
                time_text(gloo.seconds),
                time_text(ours.seconds),
                f"{ours.ratio.median:.2f} [{ours.ratio.low:.2f}, {ours.ratio.high:.2f}]",
                f"±{each.resolution:.2f}",
                size_text(counted.local) if counted else "–",
            )


def between(edition: Edition) -> Iterator[tuple[str, ...]]:
    """Several machines: everything between them is sealed."""
    yield (
        *("machines x workers", "rate", "collective", "size", "Gloo", "ringfence", "ratio", "Gloo / Gloo"),
        *("Gloo, sent", "ringfence, sealed", "inside machines"),
    )
    for each in _cells(edition):
        if each.case["hosts"] > 1 and each.case["size"] >= LARGE[0]:
            case, gloo, ours, counted = each.case, each.lines[0], each.lines[2], each.lines[2].counted
            yield (
                f"{case['hosts']} x {case['workers'] // case['hosts']}",
                rate_text(case["rate"]) if case["rate"] else "not limited",
                case["operation"].replace("_", "-"),
                size_text(case["size"]),
                time_text(gloo.seconds),
                time_text(ours.seconds),
                f"{ours.ratio.median:.2f} [{ours.ratio.low:.2f}, {ours.ratio.high:.2f}]",
                f"±{each.resolution:.2f}",
                size_text(gloo.wire_bytes),
                size_text(counted.sealed) if counted else "–",
                size_text(counted.local) if counted else "–",
            )


def counted(edition: Edition) -> str:
    """Whether what was counted is what the schedules say, over all collectives of the study."""
    found = [each for each in _cells(edition) if each.predicted is not None]
    equal = sum(each.lines[2].counted == each.predicted for each in found)
    if not found:
        return "*Not measured yet.*"
    return (
        f"In {equal} of {len(found)} cells, the bytes that were sealed, their frames, and the bytes that stayed inside "
        "machines are, as counted, exactly those that the schedules say."
    )


def _cells(edition: Edition) -> list[Result]:
    found = [] if edition.machines is None else edition.machines.results
    chosen = [
        each
        for each in found
        if each.case["kind"] == "collective"
        and PROFILED not in each.case["variants"]
        and each.lines[2].variant == SEALED
    ]

    def place(each: Result) -> tuple[object, ...]:
        case = each.case
        return case["hosts"], case["workers"], _ORDER.index(case["operation"]), case["rate"] or "", case["size"]

    return sorted(chosen, key=place)
