"""The tables and sentences of the documents, in Markdown, by name. What was not measured is left out, and said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from ringfence.lab.bench.intervals import Interval
from ringfence.lab.bench.names import PROFILED, necessary_bytes
from ringfence.lab.bench.results import Result
from ringfence.lab.bench.units import size_text, time_text
from scripts.page import machines
from scripts.page.edition import LARGE, MODELS, OTHERS, PROFILES, RATES, SIZES, Edition
from scripts.page.targets import SEALED, line_of, rate_text, targets

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


def verdicts(edition: Edition) -> str:
    """Every target, met or not."""
    rows = [
        (
            each.what,
            f"{each.limit:.2f}",
            ratio_text(each.ratio),
            f"±{each.resolution:.2f}",
            str(each.rounds),
            each.verdict,
        )
        for each in targets(edition)
    ]
    for one in edition.memory:
        if one.variant == SEALED:
            what = f"memory per link, {size_text(one.case['size'])}, {one.case['workers']} workers"
            met = "yes" if one.per_link <= MEMORY_LIMIT else "**no**"
            rows.append((what, size_text(MEMORY_LIMIT), _mib(one.per_link), "", str(one.rounds), met))
    return markdown(("what", "at most", "measured", "Gloo / Gloo", "rounds", "met"), rows)


def all_reduce(edition: Edition, workers: Sequence[int] = (2, 4, 8)) -> str:
    cores = edition.facts.get("cores", max(workers))
    titles = [f"{count} workers" + (f" on {cores} cores" if count > cores else "") for count in workers]
    header = ["size", *(cell for title in titles for cell in (title, "Gloo / Gloo"))]
    rows = []
    for size in SIZES:
        found = [edition.collective("all_reduce", size, count) for count in workers]
        if any(found):
            cells = [size_text(size)]
            for each in found:
                line = line_of(each)
                cells += [ratio_text(line.ratio), f"±{each.resolution:.2f}"] if each and line else ["–", "–"]
            rows.append(cells)
    return markdown(header, rows)


def times(edition: Edition) -> str:
    """What the ratios are made of: wall and CPU time."""
    rows = []
    for workers in (2, 4, 8):
        for size in SIZES:
            result = edition.collective("all_reduce", size, workers)
            ours, gloo = line_of(result), line_of(result, "gloo-a")
            if ours and gloo:
                cpu = [f"{line.cpu_ns_per_byte or 0:.2f}" for line in (gloo, ours)]
                walls = [time_text(line.seconds) for line in (gloo, ours)]
                rows.append(
                    (
                        str(workers),
                        size_text(size),
                        *walls,
                        *cpu,
                        size_text(gloo.wire_bytes),
                        size_text(ours.wire_bytes),
                    )
                )
    header = (
        "workers",
        "size",
        "Gloo",
        "ringfence",
        "Gloo, CPU ns/B",
        "ringfence, CPU ns/B",
        "Gloo, sent",
        "ringfence, sent",
    )
    return markdown(header, rows)


def costs(edition: Edition) -> str:
    """Return the ratio of ringfence to each other variant, and of each other variant to Gloo."""
    rows = []
    for workers in (2, 4):
        for size in LARGE:
            result = edition.collective("all_reduce", size, workers)
            for name, title in RIVALS.items():
                line = line_of(result, name)
                if result and line:
                    over = result.sealed_over.get(name)
                    rows.append((str(workers), size_text(size), title, ratio_text(over), ratio_text(line.ratio)))
    return markdown(("workers", "size", "other variant", "ringfence over it", "it over Gloo"), rows)


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
        for size in SIZES:
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


def headline(edition: Edition) -> str:
    """The README's one figure, with its circumstances: the median call, or the ratio of the benchmark until that was timed."""
    large = line_of(edition.collective("all_reduce", 25 << 20, 2))
    if not large:
        return NOTHING
    where = f"2 workers on {edition.facts['cores']} cores, loopback"
    timed = {each["size"]: each for each in edition.calls.get("sizes", ())}
    if {4 << 10, 25 << 20} <= timed.keys():
        return _median_calls(timed[25 << 20], timed[4 << 10], where)
    ratio = large.ratio
    times = "as long" if ratio.low <= 1 <= ratio.high else f"{ratio.median:.2f} times as long"
    return (
        f"**A sealed 25 MiB all-reduce takes {times} as plaintext Gloo** ({where}; median ratio {ratio.median:.2f},\n"
        f"95 % interval {ratio.low:.2f} to {ratio.high:.2f})."
    )


def _median_calls(large: Mapping[str, Any], small: Mapping[str, Any], where: str) -> str:
    """Both medians and, for small calls, both means: a few slow calls may dominate Gloo's."""

    def times(each: Mapping[str, Any], figure: str) -> tuple[str, str]:
        return time_text(each[SEALED][figure]), time_text(each["gloo"][figure])

    (sealed, plain), (quick, gloo) = (times(each, "median_after_barrier") for each in (large, small))
    mean, gloo_mean = times(small, "mean_back_to_back")
    ratio = large[SEALED]["median_after_barrier"] / large["gloo"]["median_after_barrier"]
    return (
        f"**A sealed 25 MiB all-reduce takes {sealed}, with plaintext Gloo {plain}** ({ratio:.2f} times; median call,\n"
        f"{where}). At 4 KiB the median call takes {quick}, with Gloo {gloo}; back to back the means are\n"
        f"{mean} and {gloo_mean}."
    )


def calls(edition: Edition) -> str:
    """Single calls: medians after a barrier, and means back to back."""
    rows = [
        (
            size_text(each["size"]),
            *(time_text(each[name]["median_after_barrier"]) for name in ("gloo", SEALED)),
            *(time_text(each[name]["p95_after_barrier"]) for name in ("gloo", SEALED)),
            *(time_text(each[name]["mean_back_to_back"]) for name in ("gloo", SEALED)),
        )
        for each in edition.calls.get("sizes", ())
    ]
    header = ("size", "Gloo, median", "ringfence, median", "Gloo, 95th percentile", "ringfence, 95th percentile")
    table = markdown((*header, "Gloo, mean back to back", "ringfence, mean back to back"), rows)
    return f"{table}\n\n`{edition.calls['command']}`, {edition.calls['date'][:10]}, 2 workers." if rows else table


def readme(edition: Edition) -> str:
    """The README's table, with where it comes from."""
    facts = edition.facts
    tls = [line_of(edition.collective("all_reduce", size, workers), "tls") for workers in (2, 4) for size in LARGE]
    found = [line.ratio.median for line in tls if line]
    torch = facts["versions"]["torch"].partition("+")[0]
    cores, kernel = f"{facts['cores']} cores of {facts['cpu']}", facts["kernel"].partition("-")[0]
    where = f"`ringfence bench collectives`, {edition.dates[-1]}, {cores}, {kernel}, torch {torch}, Python {facts['python']}."
    if found:
        where += (
            f"\nA ring through TLS 1.3 takes {min(found):.1f} to {max(found):.1f} times Gloo's time at 25 and 100 MiB."
        )
    return "\n\n".join(part for part in (all_reduce(edition, (2, 4)), where, _slower(edition)) if part)


def _slower(edition: Edition) -> str:
    """Where ringfence is slower than Gloo, and where the network hides it, by the medians."""

    def medians(results: Iterable[Result | None]) -> list[float]:
        return [line.ratio.median for line in map(line_of, results) if line]

    crowded = medians(edition.collective("all_reduce", size, workers) for workers in (4, 8) for size in LARGE)
    others = medians(edition.collective(name, 25 << 20, workers) for name in OTHERS for workers in (2, 4))
    slow_network = medians(
        edition.collective("all_reduce", size, workers, rate=rate)
        for rate in RATES[:2]
        for workers in (2, 4)
        for size in LARGE
    )
    if not (crowded and others and slow_network):
        return ""
    return (
        "On loopback the same cores move and encrypt every byte. There, with more workers than cores, a large all-reduce "
        f"takes up to\n{max(crowded):.1f} times as long as with Gloo; a collective of another kind takes {min(others):.1f} to "
        f"{max(others):.1f} times as long. Between hosts with links of\n1 and 2.5 Gbit/s, "
        f"the network hides it: {min(slow_network):.2f} to "
        f"{max(slow_network):.2f} times."
    )


def _headed(rows: Rows) -> tuple[Sequence[str], Rows]:
    header, *others = rows
    return header, others


TABLES: Final[dict[str, Callable[[Edition], str]]] = {
    "circumstances": circumstances,
    "commands": commands,
    "verdicts": verdicts,
    "all-reduce": all_reduce,
    "times": times,
    "calls": calls,
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
    "readme": readme,
}
