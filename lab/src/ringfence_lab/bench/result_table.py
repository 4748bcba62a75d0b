"""Results as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ringfence.cli.terminal import table, wrap
from ringfence_lab.bench import names
from ringfence_lab.bench.byte_counts import Traffic
from ringfence_lab.bench.measure import device_text
from ringfence_lab.bench.relay import LongLink
from ringfence_lab.bench.results import Result, VariantResult
from ringfence_lab.bench.units import bucket_text, size_text, time_text

_DEVICE_NOTES: Final = (
    "ratio: to the mean of host-a and host-b of the same round: the same collective on host tensors, while the copies that "
    "device tensors need run beside it; median and 95 % bootstrap interval over rounds.",
    "host / host: how far from 1 the ratio of host-b to host-a may read in these rounds: the resolution of the measurement.",
    "CPU: all workers, all threads; with a simulated device its copies are among them.",
)
_STAGING_NOTE: Final = (
    "staging: caller (until the caller's stream is there), fill (until the first pass is on the host), network, stall (no "
    "pass is on the host) and drain (until the last results are on the device) add up to the time of a call. Passes overlap; "
    "each waits for a slot, is copied down, waits in the queue, is executed, waits for the device thread (back), and is "
    "copied up."
)
_NOTES: Final = (
    "ratio: to the mean of gloo-a and gloo-b of the same round; median and 95 % bootstrap interval over rounds.",
    "Gloo / Gloo: how far from 1 the ratio of gloo-b to gloo-a may read in these rounds: the resolution of the measurement.",
    "CPU: all workers, all threads.",
)


def results_text(results: Sequence[Result]) -> str:
    """Return a table for each case, and notes."""
    parts = [text for result in results for text in (*_case(result), "")]
    on_device = [result.case.get("device") for result in results if result.case["kind"] == "collective"]
    notes = list(_DEVICE_NOTES if any(on_device) else _NOTES)
    if any(line.staging for result in results for line in result.lines):
        notes.append(_STAGING_NOTE)
    return "\n".join([*parts, *map(wrap, notes)])


def machine_text(facts: Mapping[str, Any]) -> str:
    """Return the machine and the versions that are installed on it."""
    caches = ", ".join(f"{name} {size}" for name, size in facts["caches"].items())
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    slow = f"; data plane in {facts['data_plane'].title()}" if "data_plane" in facts else ""
    return "\n".join(
        [
            wrap(f"{facts['cpu']} ({facts['features'] or 'no AES instructions'})"),
            wrap(f"{facts['cores']} cores ({caches}), {facts['memory_gib']} GiB, {facts['kernel']}"),
            wrap(f"Python {facts['python']}, {versions}, {facts['openssl']}; source {facts['source']}{slow}"),
        ]
    )


def _case(result: Result) -> list[str]:
    baseline = "host" if names.baseline(result.case) == names.HOST else "Gloo"
    lines = [
        wrap(f"{heading(result)}, {baseline} / {baseline} ±{result.resolution:.2f}"),
        table([("variant", "median", f"ratio to {baseline}", "CPU", "on the wire"), *map(_row, result.lines)]),
    ]
    if result.sealed_over:
        ratios = ", ".join(f"{name} {ratio}" for name, ratio in result.sealed_over.items())
        lines.append(wrap(f"  ringfence over: {ratios}", rest="    "))
    for line in result.lines:
        if line.counted is not None and line.variant == "int8":
            lines.append(wrap(f"  int8: {_counted_text(line.counted, None)}", rest="    "))
        if line.counted is not None and line.variant == "ringfence":
            lines.append(wrap(f"  {line.variant}: {_counted_text(line.counted, result.predicted)}", rest="    "))
        if line.stages is not None:
            shares = ", ".join(f"{stage} {share:.0%}" for stage, share in line.stages.items())
            lines.append(wrap(f"  {line.variant}: {shares}", rest="    "))
            if line.staging is not None:
                lines += [wrap(text, rest="    ") for text in _staging_texts(line.staging)]
    return lines


def heading(result: Result) -> str:
    """Return the case that was measured."""
    case = result.case
    where = f"{case['hosts']} hosts" if case["hosts"] else "loopback"
    if case["rate"]:
        where += f" at {case['rate']} (burst {size_text(case['burst'])})"
    if case.get("link"):
        where += f", {LongLink(**case['link']).text()}"
    if case["kind"] == "training":
        buckets = f", {bucket_text(case['bucket_mb'])}" if case["strategy"] == "ddp" else ""
        what = f"{case['model']}, {case['strategy']}{buckets}"
    else:
        what = f"{case['operation']}, {size_text(case['size'])}, float32{', caller busy' if case['busy'] else ''}"
        what += device_text(case)
    return f"{what}, {case['workers']} workers, {where}, TCP, {result.rounds} rounds"


def _staging_texts(staging: Mapping[str, Any]) -> list[str]:
    call, each = staging["call"], staging["pass"]
    whole = sum(call.values())
    shares = ", ".join(f"{stage} {seconds / whole:.0%}" for stage, seconds in call.items())
    times = ", ".join(f"{stage} {time_text(seconds)}" for stage, seconds in each.items())
    return [f"  staging: {shares} of {time_text(whole)}", f"  each of {staging['passes']:.0f} passes: {times}"]


def _row(line: VariantResult) -> tuple[str, ...]:
    cpu = f"{line.cpu_ns_per_byte:.2f} ns/B" if line.cpu_ns_per_byte is not None else f"{line.cpu_seconds:.2f} s"
    return line.variant, time_text(line.seconds), str(line.ratio), cpu, size_text(line.wire_bytes)


def _counted_text(counted: Traffic, predicted: Traffic | None) -> str:
    text = f"{size_text(counted.sealed)} sealed, {size_text(counted.local)} inside machines and not sealed"
    if predicted is None:
        return text
    wanted = f"{size_text(predicted.sealed)} and {size_text(predicted.local)}"
    return f"{text}; its schedules say {'the same' if counted == predicted else wanted}"
