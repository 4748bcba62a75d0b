"""The results as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringfence.lab.bench.intervals import Interval
from ringfence.lab.bench.results import Line, Result
from ringfence.lab.bench.units import size_text, time_text

_HEADER = f"{'variant':20} {'median':>11}   {'ratio to Gloo':20} {'resolution':>10} {'CPU':>12} {'on the wire':>12}"


def table(results: Sequence[Result], facts: Mapping[str, Any], floors: Mapping[int, float] | None = None) -> str:
    """Everything: machine, caveats, a block for each case. `floors` are CPU seconds by the index of the result."""
    lines = [*machine_lines(facts), ""]
    for index, result in enumerate(results):
        lines += [*_block(result, (floors or {}).get(index)), ""]
    lines.append(
        "ratio: to the mean of gloo-a and gloo-b of the same round; median and 95 % bootstrap interval over rounds."
    )
    lines.append(
        "resolution: how far from 1 gloo-b over gloo-a may read in these rounds. CPU: all workers, all threads."
    )
    return "\n".join(lines)


def machine_lines(facts: Mapping[str, Any]) -> list[str]:
    """The machine and what is installed on it."""
    caches = ", ".join(f"{name} {size}" for name, size in facts["caches"].items())
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    slow = f"; data plane in {facts['data_plane'].title()}" if "data_plane" in facts else ""
    return [
        f"{facts['cpu']}, {facts['cores']} cores ({caches}), {facts['memory_gib']} GiB, {facts['kernel']}",
        f"Python {facts['python']}, {versions}, {facts['openssl']}; source {facts['source']}{slow}",
    ]


def _block(result: Result, floor: float | None) -> list[str]:
    lines = [heading(result), _HEADER]
    lines += [_row(line, result) for line in result.lines]
    if result.sealed_over:
        prices = (f"{name} {_ratio_text(ratio)}" for name, ratio in result.sealed_over.items())
        lines.append(f"  ringfence over: {', '.join(prices)}")
    for line in result.lines:
        if line.stages is not None:
            shares = ", ".join(f"{stage} {share:.0%}" for stage, share in line.stages.items())
            lines.append(f"  {line.variant}: {shares}")
            if floor is not None:
                lines.append(f"  CPU {line.cpu_seconds * 1e3:.2f} ms, floor from stage costs {floor * 1e3:.2f} ms")
    return lines


def heading(result: Result) -> str:
    """What was measured."""
    case = result.case
    where = f"{case['hosts']} hosts" if case["hosts"] else "loopback"
    if case["rate"]:
        where += f" at {case['rate']} (burst {size_text(case['burst'])})"
    if case["kind"] == "training":
        buckets = f", {bucket_text(case['bucket_mb'])}" if case["strategy"] == "ddp" else ""
        what = f"{case['model']}, {case['strategy']}{buckets}"
    else:
        what = f"{case['operation']}, {size_text(case['size'])}, float32{', caller busy' if case['busy'] else ''}"
    return f"{what}, {case['workers']} workers, {where}, TCP, {result.rounds} rounds"


def bucket_text(bucket_mb: float | None) -> str:
    """DDP's buckets in words."""
    return "default buckets" if bucket_mb is None else f"buckets of {bucket_mb:g} MiB"


def _row(line: Line, result: Result) -> str:
    cpu = f"{line.cpu_ns_per_byte:.2f} ns/B" if line.cpu_ns_per_byte is not None else f"{line.cpu_seconds:.2f} s"
    return (
        f"{line.variant:20} {time_text(line.seconds):>11}   {_ratio_text(line.ratio):20} {f'±{result.resolution:.2f}':>10} "
        f"{cpu:>12} {size_text(line.wire_bytes):>12}"
    )


def _ratio_text(ratio: Interval) -> str:
    return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
