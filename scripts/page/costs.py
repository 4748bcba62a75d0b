"""The page "What it costs", and the two ratios that every page of the documentation has in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from ringfence_lab.bench.intervals import Interval
from ringfence_lab.bench.results import Result, VariantResult
from ringfence_lab.bench.units import size_text, time_text
from ringfence_lab.report.figure import Picture
from ringfence_lab.report.labels import interval_text
from scripts.generated import table
from scripts.page import ROOT
from scripts.page.cases import (
    RATES,
    SIZE,
    Cases,
    all_reduces,
    between,
    buckets,
    collectives,
    machines,
    medians,
    name_of,
    profiles,
    rates,
    training,
)
from scripts.page.edition import SEALED, Edition, line_of, read

__all__ = ["KIND", "PAGES", "TABLES", "pictures", "read"]

KIND: Final = "figures"
PAGES: Final = tuple(
    ROOT / name
    for name in ("docs/benchmarks/what-it-costs.md", "docs/guides/across-regions.md", "README.md", "docs/index.md")
)
LONG: Final[tuple[tuple[str | None, float], ...]] = (  # links between sites: rate, seconds each way
    ("100mbit", 0.0),
    ("1gbit", 0.0),
    ("1gbit", 0.05),
    ("2.5gbit", 0.0),
    (None, 0.0),
)
RIVALS: Final = {"ringfence-unsealed": "unsealed", "hop-by-hop": "hop by hop", "tls": "TLS 1.3"}
WAYS: Final = {
    "gloo-a": "plaintext Gloo",
    "ringfence": "ringfence",
    "hop-by-hop": "hop by hop",
    "tls": "TLS 1.3",
    "gloo-wireguard": "Gloo through wireguard-go",
    "gloo-openvpn": "Gloo through OpenVPN, AES-256-GCM",
}
STATES: Final = (("one core", "alone"), ("all cores", "busy"))  # of the stages
DIGITS: Final = 4

COLUMNS: Final[dict[str, Callable[[Result, VariantResult, VariantResult], str]]] = {  # of Gloo's line and ringfence's
    "Gloo": lambda _, gloo, ours: time_text(gloo.seconds),
    "ringfence": lambda _, gloo, ours: time_text(ours.seconds),
    "ratio": lambda _, gloo, ours: interval_text(ours.ratio),
    "Gloo / Gloo": lambda result, gloo, ours: f"±{result.resolution:.2f}",
    "Gloo, CPU": lambda _, gloo, ours: f"{gloo.cpu_seconds:.2f} s",
    "ringfence, CPU": lambda _, gloo, ours: f"{ours.cpu_seconds:.2f} s",
    "Gloo, CPU ns/B": lambda _, gloo, ours: f"{gloo.cpu_ns_per_byte or 0:.2f}",
    "ringfence, CPU ns/B": lambda _, gloo, ours: f"{ours.cpu_ns_per_byte or 0:.2f}",
    "Gloo, sent": lambda _, gloo, ours: size_text(gloo.wire_bytes),
    "ringfence, sent": lambda _, gloo, ours: size_text(ours.wire_bytes),
    "ringfence, sealed": lambda _, gloo, ours: size_text(ours.counted.sealed) if ours.counted else "–",
    "cores in use, Gloo / ringfence": lambda _, gloo, ours: (
        f"{gloo.cpu_seconds / gloo.seconds:.1f} / {ours.cpu_seconds / ours.seconds:.1f}"
    ),
    "unsealed": lambda result, gloo, ours: interval_text(_ratio(result, "ringfence-unsealed")),
    "hop by hop": lambda result, gloo, ours: interval_text(_ratio(result, "hop-by-hop")),
    "TLS 1.3": lambda result, gloo, ours: interval_text(_ratio(result, "tls")),
}


def _ratio(result: Result, variant: str) -> Interval | None:
    line = line_of(result, variant)
    return line.ratio if line else None


def compared(labels: Iterable[str], columns: Iterable[str], cases: Cases) -> str:
    """A table of ringfence beside Gloo: a row for each case that was measured."""
    rows = []
    for cells, result in cases:
        gloo, ours = line_of(result, "gloo-a"), line_of(result)
        if result and gloo and ours:
            rows.append([*cells, *(COLUMNS[column](result, gloo, ours) for column in columns)])
    return table([*labels, *columns], rows)


def cpu(facts: Mapping[str, Any]) -> str:
    """What matters of a CPU here: whether it has the instructions that seal fast."""
    return "with VAES" if "vaes" in facts["features"].split() else "without VAES"


def _source(command: str, date: str, facts: Mapping[str, Any]) -> str:
    """The line below a table: the command that measured it, the date if it is known, the machine and the code."""
    where = f"{facts['cores']} cores of {facts['cpu']}, {cpu(facts)}; source digest `{facts['source']}`"
    return ", ".join(each for each in (f"`{command}`", date, where) if each) + "."


# -- tables and sentences ---------------------------------------------------------------------------------------------


def headline(edition: Edition) -> str:
    """The sentences of the README and the home page."""
    assert edition.machines
    gloo, sealed = medians(edition)[SIZE]
    few, many = (between(edition, place)[1].ratio.median for place in ("2 x 1", "2 x 4"))
    return (
        f"**A sealed 25 MiB all-reduce takes {sealed / gloo:.2f} times as long as plaintext Gloo** on a CPU "
        f"{cpu(edition.calls['machine'])} (two\n"
        f"workers with a core each, loopback, median call: {time_text(sealed)} and {time_text(gloo)}). Between network\n"
        f"namespaces, in batches of calls, it takes {few:.2f} times as long; between two machines of four workers each\n"
        f"**{many:.2f} times**, because ringfence does not seal inside a machine, and Gloo uses TCP there."
    )


def circumstances(edition: Edition) -> str:
    """Machine, versions, date."""
    facts, gloo = edition.facts, edition.facts["gloo"]
    caches = ", ".join(f"{name} {size}" for name, size in facts["caches"].items())
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    dates = " to ".join(dict.fromkeys((edition.dates[0], edition.dates[-1])))
    return (
        f"- **Machine**: {facts['cores']} cores of {facts['cpu']} ({caches}), {facts['memory_gib']} GiB, {facts['kernel']}.\n"
        f"- **Date**: {dates}.\n"
        f"- **Versions**: Python {facts['python']}, {versions}, {facts['openssl']}; source digest `{facts['source']}`.\n"
        f"- **Gloo** runs with {gloo['threads']} threads and {gloo['devices']} device(s), over TCP."
    )


def two_workers(edition: Edition) -> str:
    """Median calls between two workers, the slowest in twenty, and the ratio of the medians."""
    rows = []
    for each in edition.calls["sizes"]:
        gloo, sealed = medians(edition)[each["size"]]
        slowest = [time_text(each[name]["p95_after_barrier"]) for name in ("gloo", SEALED)]
        rows.append((size_text(each["size"]), time_text(gloo), time_text(sealed), f"{sealed / gloo:.2f}", *slowest))
    header = [
        "size",
        "Gloo, median",
        "ringfence, median",
        "ratio",
        "Gloo, 95th percentile",
        "ringfence, 95th percentile",
    ]
    calls = edition.calls
    return f"{table(header, rows)}\n\n{_source(calls['command'], calls['date'][:10], calls['machine'])}"


def rivals(edition: Edition) -> str:
    """The ratio of ringfence to each other variant."""
    rows = [
        (cells[0], title, interval_text(result.sealed_over[name]))
        for cells, result in all_reduces(edition, (2, 4), (SIZE,))
        for name, title in RIVALS.items()
        if result and name in result.sealed_over
    ]
    return table(("workers", "other variant", "ringfence over it"), rows)


def stages(edition: Edition) -> str:
    rows, names = [], []
    for (operation, size, workers), line in profiles(edition):
        if size != SIZE:
            continue
        names = list(line.stages or {})
        shares = [f"{share:.0%}" for share in (line.stages or {}).values()]
        rows.append([name_of(operation), workers, *shares, f"{line.cpu_ns_per_byte or 0:.2f}"])
    return table(("25 MiB", "workers", *names, "CPU ns/B"), rows)


def memory(edition: Edition) -> str:
    rows = []
    for each in (each for each in edition.memory if each.case["workers"] == 4):
        sizes = (each.beyond, each.per_link, each.made, each.socket_buffers_per_link)
        name = "Gloo" if each.variant.startswith("gloo") else each.variant
        cells = (name, each.case["workers"], size_text(each.case["size"]), each.links)
        rows.append((*cells, *(f"{size / (1 << 20):.1f} MiB" for size in sizes)))
    header = ("", "workers", "tensor", "links", "beyond it", "per link", "made before", "kernel's limit per link")
    return table(header, rows)


def tunnels(edition: Edition) -> str:
    """What people use instead, in the same rounds: plaintext Gloo through tunnels in user space, and other ways to seal."""
    found = [each for each in edition.results if "gloo-wireguard" in each.case["variants"]]
    if not found:
        return "Not measured on this tree yet: `scripts/campaign tunnels`."
    found.sort(key=lambda each: int(each.case["size"]))
    lines = [{line.variant: line for line in each.lines} for each in found]
    rows = [
        (name, *(f"{time_text(each[variant].seconds)}, {interval_text(each[variant].ratio)}" for each in lines))
        for variant, name in WAYS.items()
    ]
    return table(("all-reduce", *(size_text(each.case["size"]) for each in found)), rows)


def quantised(edition: Edition) -> str:
    """All-reduces in float32 and in int8 between machines, by the rate and the delay of their links."""
    if not edition.int8:
        return "Not measured on this tree yet: `scripts/campaign int8`."
    found = {
        (each.case["hosts"], each.case["rate"], each.case.get("link", {}).get("delay", 0.0)): each
        for each in edition.int8.results
    }
    names = {"gloo-a": "Gloo, float32", "ringfence": "ringfence, float32", "int8": "ringfence, int8"}
    rows = []
    for hosts in (2, 4):
        for variant, name in names.items():
            lines = [line_of(found.get((hosts, *link)), variant) for link in LONG]
            rows.append((hosts, name, *(time_text(line.seconds) if line else "–" for line in lines)))
    columns = (RATES[rate] + (f", {delay * 1e3:g} ms each way" if delay else "") for rate, delay in LONG)
    source = _source("scripts/campaign int8", edition.int8.dates[-1], edition.int8.facts)
    return f"{table(('machines', '', *columns), rows)}\n\n{source}"


def stage_costs(edition: Edition) -> str:
    """Nanoseconds a byte of each stage, on one core and on all at once, and where that was measured."""
    if not edition.bounds:
        return "Not measured on this tree yet: `scripts/campaign bounds`."
    first = edition.bounds[""]
    facts = first["machine"]
    instructions = edition.bounds if cpu(facts) == "with VAES" else {"": first}  # no others to hide
    columns = [
        (f"{state}{name}", found["stages"][key]) for name, found in instructions.items() for state, key in STATES
    ]
    rows = [(stage, *(f"{costs[stage]:.3f}" for _, costs in columns)) for stage in first["stages"]["alone"]]
    header = ("CPU ns a byte", *(name for name, _ in columns))
    return f"{table(header, rows)}\n\n{_source('ringfence bench bounds', '', facts)}"


def machines_circumstances(edition: Edition) -> str:
    """The machine and the date of this study, which are not those of the rest of the page."""
    assert edition.machines
    facts = edition.machines.facts
    return (
        f"Measured on {edition.machines.dates[-1]} with `{edition.machines.commands[-1]}`, on {facts['cores']} cores of "
        f"{facts['cpu']}, with source digest `{facts['source']}`. All machines are network namespaces that share these cores."
    )


TIMES: Final = ("Gloo", "ringfence", "ratio", "Gloo / Gloo")
TABLES: Final[dict[str, Callable[[Edition], str]]] = {
    "headline": headline,
    "circumstances": circumstances,
    "two-workers": two_workers,
    "all-reduce": lambda edition: compared(("workers", "size"), TIMES, all_reduces(edition, (4, 8))),
    "times": lambda edition: compared(
        ("workers", "size"),
        ("Gloo, CPU ns/B", "ringfence, CPU ns/B", "Gloo, sent", "ringfence, sent"),
        all_reduces(edition, (2, 8), (SIZE,)),
    ),
    "costs": rivals,
    "tunnels": tunnels,
    "collectives": lambda edition: compared(("25 MiB", "workers"), TIMES, collectives(edition)),
    "busy": lambda edition: compared(
        ("workers", "size"), (*TIMES, *RIVALS.values()), all_reduces(edition, (2, 4), (SIZE,), busy=True)
    ),
    "training": lambda edition: compared(
        ("model", "", "workers"), (*TIMES, "Gloo, CPU", "ringfence, CPU"), training(edition)
    ),
    "buckets": lambda edition: compared(("`bucket_cap_mb`",), TIMES, buckets(edition)),
    "rates": lambda edition: compared(
        ("rate", "burst", "hosts", "size"),
        ("Gloo", "ratio", "Gloo / Gloo", "cores in use, Gloo / ringfence"),
        ((cells, result) for cells, result in rates(edition) if cells[3] == size_text(SIZE)),
    ),
    "stages": stages,
    "stage-costs": stage_costs,
    "quantised": quantised,
    "memory": memory,
    "machines-circumstances": machines_circumstances,
    "machines-between": lambda edition: compared(
        ("machines x workers", "rate", "collective", "at least"),
        (*TIMES, "Gloo, sent", "ringfence, sealed"),
        machines(edition, inside=False),
    ),
    "machines-inside": lambda edition: compared(("collective", "workers"), TIMES, machines(edition, inside=True)),
}


# -- pictures ---------------------------------------------------------------------------------------------------------


def point(label: str, ratio: Interval | float, resolution: float = 0.0) -> dict[str, Any]:
    ends = (ratio, ratio, ratio) if isinstance(ratio, float) else (ratio.low, ratio.median, ratio.high)
    return {"label": label, "ratio": [round(end, DIGITS) for end in ends], "resolution": round(resolution, DIGITS)}


def points(group: str, label: str, cases: Cases) -> dict[str, list[dict[str, Any]]]:
    """Points by group; both names are made of the first cells of a row."""
    found: dict[str, list[dict[str, Any]]] = {}
    for cells, result in cases:
        line = line_of(result)
        if result and line:
            at = found.setdefault(group.format(*cells), [])
            at.append(point(label.format(*cells), line.ratio, result.resolution))
    return found


def pictures(edition: Edition) -> Iterator[Picture]:
    """The pictures of the page; what was not measured is not in them."""

    def figure(name: str, chart: str, title: str, numbers: dict[str, Any], **options: Any) -> Picture:
        return Picture(name, chart, title, "", "", numbers, (), options={"width": 7.4, **options})

    calls = {size: sealed / gloo for size, (gloo, sealed) in medians(edition).items()}
    if edition.machines and calls:
        found: dict[str, list[dict[str, Any]]] = {}
        for place in ("2 x 1", "2 x 4"):
            cell, line = between(edition, place)
            label = f"all-reduce, {place.replace(' x', ' machines x')}"
            found.setdefault(f"CPU {cpu(edition.machines.facts)}", []).append(point(label, line.ratio, cell.resolution))
        found.setdefault(f"CPU {cpu(edition.calls['machine'])}", []).append(
            point("all-reduce, 2 machines x 1", calls[SIZE])
        )
        ddp = [(cells, result) for cells, result in training(edition) if cells[1:] == ("DDP", "2")]
        for name, some in points(f"CPU {cpu(edition.facts)}", "{0} step, 2 machines x 1", ddp).items():
            found.setdefault(name, []).extend(some)
        yield figure("headline", "across", "Sealed: 25 MiB all-reduce, and DDP steps; machines x workers", found)
    lines = {"2 workers, median call": [point(size_text(size), ratio) for size, ratio in calls.items()]}
    lines |= points("{0} workers", "{1}", all_reduces(edition, (4, 8)))
    title = "Sealed all-reduce, loopback; with 95 % intervals for 4 and 8 workers on 2 cores"
    numbers = {name: {"ringfence": some} for name, some in lines.items() if some}
    yield figure("all-reduce", "panels", title, numbers, columns=3)
    found = points("{1} workers", "{0}", collectives(edition))
    yield figure("collectives", "across", "Collectives of 25 MiB, loopback, sealed", found)
    found = points("{2} workers", "{0}, {1}", training(edition))
    yield figure("training", "across", "Training steps, loopback, sealed", found)
    found = points("{2} hosts", "{0}, {3}", rates(edition))
    yield figure("rates", "across", "All-reduce between hosts with limited links, sealed", found)
    shares = {
        f"{name_of(operation)}, {size_text(size)}, {workers} workers": {
            stage: round(share, DIGITS) for stage, share in (line.stages or {}).items()
        }
        for (operation, size, workers), line in profiles(edition)
    }
    yield figure("stages", "stacked", "Where the time of a sealed collective goes", shares)
