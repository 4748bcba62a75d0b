"""The tables and sentences of the documents, in Markdown, by name. What was not measured is left out, and said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from ringfence_lab.bench.intervals import Interval
from ringfence_lab.bench.names import PROFILED, necessary_bytes
from ringfence_lab.bench.units import size_text, time_text
from scripts.page import machines
from scripts.page.edition import LARGE, MODELS, OTHERS, PROFILES, RATES, Edition
from scripts.page.headline import cpu, headline, median_calls
from scripts.page.targets import SEALED, Target, line_of, rate_text, targets

NOTHING: Final = "*Not measured yet.*"
RIVALS: Final = {"ringfence-unsealed": "unsealed", "hop-by-hop": "hop by hop", "tls": "TLS 1.3"}
MEMORY_LIMIT: Final = 16 << 20

Rows = Iterable[Sequence[str]]


def ratio_text(ratio: Interval | None) -> str:
    return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else "–"


def markdown(header: Sequence[str], rows: Rows) -> str:
    """A table, or a sentence where there is nothing to show."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(header)} |", "|---" * len(header) + "|", *lines]) if lines else NOTHING


def circumstances(edition: Edition) -> str:
    """Machine, versions, date; and a warning where the rounds are few."""
    facts = edition.facts
    if not facts:
        return NOTHING
    caches = ", ".join(f"{name} {size}" for name, size in facts["caches"].items())
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    gloo = facts.get("gloo", {})
    lines = [
        f"- **Machine**: {facts['cores']} cores of {facts['cpu']} ({caches}), {facts['memory_gib']} GiB, {facts['kernel']}.",
        f"- **Date**: {' to '.join(dict.fromkeys((edition.dates[0], edition.dates[-1])))}.",
        f"- **Versions**: Python {facts['python']}, {versions}, {facts['openssl']}; source digest `{facts['source']}`.",
    ]
    if gloo:
        lines.append(f"- **Gloo** runs with {gloo['threads']} threads and {gloo['devices']} device(s), over TCP.")
    if not edition.full:
        lines.insert(0, "> **A trial run with few rounds, to try the instrument: these figures are no result.**\n")
    return "\n".join(lines)


def commands(edition: Edition) -> str:
    """As they are called now: older samples carry an older name of one option."""
    found = list(edition.commands)
    return "\n".join(["```sh", *found, "```"]) if found else NOTHING


def measured(target: Target) -> tuple[str, str]:
    """A target's ratio and the resolution. Of median calls no interval was recorded."""
    if target.resolution is None:
        return f"{target.ratio.median:.2f}, median call", ""
    return ratio_text(target.ratio), f"±{target.resolution:.2f}"


def verdicts(edition: Edition) -> str:
    """Every target, met or not."""
    rows = [
        (each.what, f"{each.limit:.2f}", *measured(each), str(each.rounds), each.verdict) for each in targets(edition)
    ]
    for one in edition.memory:
        if one.variant == SEALED:
            what = f"memory per link, {size_text(one.case['size'])}, {one.case['workers']} workers"
            met = "yes" if one.per_link <= MEMORY_LIMIT else "**no**"
            rows.append((what, size_text(MEMORY_LIMIT), _mib(one.per_link), "", str(one.rounds), met))
    return markdown(("what", "at most", "measured", "Gloo / Gloo", "rounds", "met"), rows)


def two_workers(edition: Edition) -> str:
    """Median calls between two workers, the slowest in twenty, and the ratio of the medians."""
    rows = []
    for each in edition.calls.get("sizes", ()):
        slowest = [time_text(each[name]["p95_after_barrier"]) for name in ("gloo", SEALED)]
        call = median_calls(edition)[each["size"]]
        medians = (time_text(call.gloo), time_text(call.sealed), f"{call.ratio:.2f}")
        rows.append((size_text(call.size), *medians, *slowest))
    header = (
        "size",
        "Gloo, median",
        "ringfence, median",
        "ratio",
        "Gloo, 95th percentile",
        "ringfence, 95th percentile",
    )
    if not rows:
        return NOTHING
    facts = edition.calls["machine"]
    where = f"{facts['cores']} cores of {facts['cpu']}, {cpu(facts)}; source digest `{facts['source']}`"
    return f"{markdown(header, rows)}\n\n{_command(edition.calls)}, {edition.calls['date'][:10]}, {where}."


def all_reduce(edition: Edition, workers: Sequence[int] = (4, 8)) -> str:
    """More workers than cores, in batches of calls; small sizes would measure the scheduler."""
    header = ["size", *(cell for count in workers for cell in (f"{count} workers", "Gloo / Gloo"))]
    rows = []
    for size in LARGE:
        found = [edition.collective("all_reduce", size, count) for count in workers]
        if any(found):
            cells = [size_text(size)]
            for each in found:
                line = line_of(each)
                cells += [ratio_text(line.ratio), f"±{each.resolution:.2f}"] if each and line else ["–", "–"]
            rows.append(cells)
    return markdown(header, rows)


def times(edition: Edition) -> str:
    """CPU time and bytes of large calls."""
    rows = []
    for workers in (2, 4, 8):
        for size in LARGE:
            result = edition.collective("all_reduce", size, workers)
            ours, gloo = line_of(result), line_of(result, "gloo-a")
            if ours and gloo:
                cpu_times = [f"{line.cpu_ns_per_byte or 0:.2f}" for line in (gloo, ours)]
                sent = [size_text(line.wire_bytes) for line in (gloo, ours)]
                rows.append((str(workers), size_text(size), *cpu_times, *sent))
    header = ("workers", "size", "Gloo, CPU ns/B", "ringfence, CPU ns/B", "Gloo, sent", "ringfence, sent")
    return markdown(header, rows)


def costs(edition: Edition) -> str:
    """Return the ratio of ringfence to each other variant."""
    rows = []
    for workers in (2, 4):
        for size in LARGE:
            result = edition.collective("all_reduce", size, workers)
            for name, title in RIVALS.items():
                line = line_of(result, name)
                if result and line:
                    rows.append((str(workers), size_text(size), title, ratio_text(result.sealed_over.get(name))))
    return markdown(("workers", "size", "other variant", "ringfence over it"), rows)


def collectives(edition: Edition) -> str:
    rows = []
    for operation in OTHERS:
        found = [edition.collective(operation, 25 << 20, workers) for workers in (2, 4)]
        lines = [line_of(each) for each in found]
        if any(lines):
            cells = [operation.replace("_", "-")]
            for each, line in zip(found, lines, strict=True):
                cells += [ratio_text(line.ratio), f"±{each.resolution:.2f}"] if each and line else ["–", "–"]
            rows.append(cells)
    return markdown(("25 MiB", "2 workers", "Gloo / Gloo", "4 workers", "Gloo / Gloo"), rows)


def busy(edition: Edition) -> str:
    rows = []
    for workers in (2, 4):
        for size in LARGE:
            result = edition.collective("all_reduce", size, workers, busy=True)
            ours, gloo = line_of(result), line_of(result, "gloo-a")
            if result and ours and gloo:
                cells = [str(workers), size_text(size), time_text(gloo.seconds), time_text(ours.seconds)]
                others = [line_of(result, name) for name in RIVALS]
                cells += [ratio_text(ours.ratio), *(ratio_text(line.ratio if line else None) for line in others)]
                rows.append([*cells, f"±{result.resolution:.2f}"])
    return markdown(("workers", "size", "Gloo", "ringfence", "ringfence / Gloo", *RIVALS.values(), "Gloo / Gloo"), rows)


def training(edition: Edition) -> str:
    rows = []
    for strategy in ("ddp", "fsdp2"):
        for model in MODELS:
            for workers in (2, 4):
                result = edition.training(model, strategy, workers)
                ours, gloo = line_of(result), line_of(result, "gloo-a")
                if result and ours and gloo:
                    cells = [model, strategy.upper(), str(workers), time_text(gloo.seconds), time_text(ours.seconds)]
                    cpu = [f"{line.cpu_seconds:.2f} s" for line in (gloo, ours)]
                    rows.append([*cells, ratio_text(ours.ratio), f"±{result.resolution:.2f}", *cpu])
    header = ("model", "", "workers", "Gloo", "ringfence", "ratio", "Gloo / Gloo", "Gloo, CPU", "ringfence, CPU")
    return markdown(header, rows)


def buckets(edition: Edition) -> str:
    rows = []
    for bucket in edition.buckets:
        result = edition.training("gpt2", "ddp", 2, bucket)
        ours, gloo = line_of(result), line_of(result, "gloo-a")
        if result and ours and gloo:
            name = "default (25, the first 1)" if bucket is None else f"{bucket:g}"
            walls = [time_text(line.seconds) for line in (gloo, ours)]
            rows.append((name, *walls, ratio_text(ours.ratio), f"±{result.resolution:.2f}"))
    return markdown(("`bucket_cap_mb`", "Gloo", "ringfence", "ratio", "Gloo / Gloo"), rows)


def rates(edition: Edition) -> str:
    rows = []
    for rate in RATES:
        for workers in (2, 4):
            for size in LARGE:
                result = edition.collective("all_reduce", size, workers, rate=rate)
                ours, gloo = line_of(result), line_of(result, "gloo-a")
                if result and ours and gloo:
                    burst = size_text(result.case["burst"])
                    cells = [rate_text(rate), burst, str(workers), size_text(size), time_text(gloo.seconds)]
                    cores = f"{gloo.cpu_seconds / gloo.seconds:.1f} / {ours.cpu_seconds / ours.seconds:.1f}"
                    rows.append([*cells, ratio_text(ours.ratio), f"±{result.resolution:.2f}", cores])
    header = ("rate", "burst", "hosts", "size", "Gloo", "ratio", "Gloo / Gloo", "cores in use, Gloo / ringfence")
    return markdown(header, rows)


def stages(edition: Edition) -> str:
    rows = []
    names: list[str] = []
    for operation, size, workers in PROFILES:
        line = line_of(edition.profile(operation, size, workers), PROFILED)
        if line and line.stages:
            names = list(line.stages)
            cells = [operation.replace("_", "-"), str(workers), size_text(size)]
            cells += [f"{share:.0%}" for share in line.stages.values()]
            must = necessary_bytes(operation, size, workers) / 1e9
            seconds = edition.lower_bounds.get((operation, size, workers))
            low = f"{seconds / must:.2f}" if seconds else "–"
            rows.append([*cells, f"{line.cpu_ns_per_byte or 0:.2f}", low])
    return markdown(("", "workers", "size", *names, "CPU ns/B", "lower bound, ns/B"), rows)


def link(edition: Edition) -> str:
    rows = [
        (
            size_text(each.case["segment"]),
            str(each.case["threads"]),
            *(ratio_text(rate) for rate in each.rate.values()),
            *(f"{cost:.3f}" for cost in each.cpu_ns_per_byte.values()),
        )
        for each in sorted(edition.links, key=lambda each: (each.case["segment"], each.case["threads"]))
    ]
    return markdown(("segment", "threads", "seal, GB/s", "open, GB/s", "seal, CPU ns/B", "open, CPU ns/B"), rows)


def memory(edition: Edition) -> str:
    rows = [
        (
            "Gloo" if each.variant.startswith("gloo") else each.variant,
            str(each.case["workers"]),
            size_text(each.case["size"]),
            str(each.links),
            _mib(each.beyond),
            _mib(each.per_link),
            _mib(each.made),
            _mib(each.socket_buffers_per_link),
        )
        for each in edition.memory
    ]
    header = ("", "workers", "tensor", "links", "beyond it", "per link", "made before", "kernel's limit per link")
    return markdown(header, rows)


def _mib(size: float) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _command(found: Mapping[str, Any]) -> str:
    """The command that printed a result, and the last commit that has it if it was a script."""
    gone = " of commit 569d0fa" if "scripts." in found["command"] else ""
    return f"`{found['command']}`{gone}"


def tunnels(edition: Edition) -> str:
    """Plaintext Gloo through tunnels in user space."""
    taken = edition.tunnels.get("median_seconds", {})
    if not taken:
        return NOTHING
    sizes = list(next(iter(taken.values())))
    rows = [(way, *(time_text(each[size]) for size in sizes)) for way, each in taken.items()]
    facts = edition.tunnels["machine"]
    where = f"{facts['cores']} cores" + (f" of {facts['cpu']}" if "cpu" in facts else "")
    command = (
        f"{_command(edition.tunnels)}, {edition.tunnels['date'][:10]}, {where}; {edition.tunnels['rounds']} rounds"
    )
    note = f" {edition.tunnels['note']}" if "note" in edition.tunnels else ""
    return f"{markdown(('tunnel', *(size_text(int(size)) for size in sizes)), rows)}\n\n{command}.{note}"


def _headed(rows: Rows) -> tuple[Sequence[str], Rows]:
    header, *others = rows
    return header, others


TABLES: Final[dict[str, Callable[[Edition], str]]] = {
    "circumstances": circumstances,
    "commands": commands,
    "verdicts": verdicts,
    "all-reduce": all_reduce,
    "times": times,
    "two-workers": two_workers,
    "tunnels": tunnels,
    "costs": costs,
    "collectives": collectives,
    "busy": busy,
    "training": training,
    "buckets": buckets,
    "rates": rates,
    "stages": stages,
    "link": link,
    "memory": memory,
    "machines-circumstances": machines.circumstances,
    "machines-inside": lambda edition: markdown(*_headed(machines.inside(edition))),
    "machines-between": lambda edition: markdown(*_headed(machines.between(edition))),
    "machines-counted": machines.counted,
    "headline": headline,
}
