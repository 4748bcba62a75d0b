"""Studies to report on: one with every kind of cell and round numbers, and the project's own samples as a summary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ringfence_lab.bench.measure import Measured
from ringfence_lab.bench.netns import bits_per_second
from ringfence_lab.bench.results import VariantResult, result

SETTINGS: dict[str, Any] = {
    "kind": "collective", "operation": None, "size": None, "model": None, "strategy": None, "device": None, "bucket_mb": None,
    "wire": "float32", "workers": 2, "hosts": 0, "rate_bits": None, "busy": False,
}  # fmt: skip
STAGES = ("seal", "open", "lock", "reduce", "send", "receive", "wait")
FACTS = {
    "cpu": "A CPU <of some kind>", "cores": 2, "caches": {"L2": "2M"}, "memory_gib": 8, "kernel": "Linux 6.18-x",
    "python": "3.11", "versions": {"torch": "2.13.0+cpu"}, "openssl": "OpenSSL 4", "source": "abc",
    "gloo": {"threads": 2, "devices": 1},
}  # fmt: skip
RUN = {"command": "ringfence study", "date": "2026-01-02T03:04:05+00:00"}
Row = dict[str, Any]


def row(cell: str, variant: str, seconds: float, gloo: float, **others: Any) -> Row:
    """One variant of one cell; whatever is not said is plain."""
    resolution = others.pop("resolution", 0.05)
    stages = {f"stage_{stage}": others.pop("stages", {}).get(stage) for stage in STAGES} if "stages" in others else {}
    ratio = seconds / gloo
    numbers = {
        "rounds": 7, "seconds": seconds, "seconds_low": 0.95 * seconds, "seconds_high": 1.1 * seconds,
        "cpu_seconds": 2 * seconds, "sent_bytes": float(2 << 20),
        "ratio": ratio, "ratio_low": 0.95 * ratio, "ratio_high": 1.1 * ratio,
    }  # fmt: skip
    about = {"machine": "m", "source": "abc", "scaled": 1.0, "resolution": resolution, "scored": resolution <= 0.10}
    return {
        "cell": cell,
        "variant": variant,
        **SETTINGS,
        **numbers,
        **dict.fromkeys(f"stage_{s}" for s in STAGES),
        **about,
        **stages,
        **others,
    }


def cell(name: str, gloo: float, times: Mapping[str, float], **settings: Any) -> list[Row]:
    """Gloo twice, and everyone else as many times Gloo's time."""
    everyone = {"gloo-a": 1.0, "gloo-b": 1.0, **times}
    rows = [row(name, variant, gloo * factor, gloo, **settings) for variant, factor in everyone.items()]
    for each in rows:
        if each["variant"] == "ringfence-profiled":
            shares = dict(zip(STAGES, (0.1, 0.08, 0.01, 0.04, 0.12, 0.1, 0.3), strict=True))
            each.update({f"stage_{stage}": share * each["seconds"] * 1e9 for stage, share in shares.items()})
    return rows


def everything() -> list[Row]:
    """Cells for each figure."""
    ways = {"ringfence": 1.1, "ringfence-unsealed": 0.9, "hop-by-hop": 1.6}
    step = {**ways, "ringfence-profiled": 1.2, "alone": 0.8}
    rows: list[Row] = []
    for workers in (2, 4, 8):
        for size in (1 << 16, 1 << 20, 25 << 20):
            name, seconds = f"all_reduce-{size}-{workers}w", size * workers / 1e9 + 1e-4
            some = {**ways, "ringfence-profiled": 1.15} if size == 25 << 20 else ways
            sent = {"sent_bytes": 2.0 * (workers - 1) * size}
            rows += cell(name, seconds, some, operation="all_reduce", size=size, workers=workers, **sent)
        trace = {"kind": "trace", "model": "gpt2-xl", "strategy": "ddp", "device": "gpu", "scaled": 12.0}
        rows += cell(f"gpt2-xl-{workers}w", 2.0 * workers, step, workers=workers, **trace)
    for workers, factor in ((2, 0.99), (4, 1.3)):
        model = {"kind": "training", "model": "gpt2", "strategy": "ddp", "workers": workers}
        rows += cell(f"gpt2-{workers}w", 1.5, {**step, "ringfence": factor}, **model)
    noisy = {"kind": "training", "model": "bert-base", "strategy": "ddp", "resolution": 0.3}
    rows += cell("bert-base-2w", 1.8, step, **noisy)
    for bucket in (1.0, 50.0, 200.0):
        model = {"kind": "training", "model": "gpt2", "strategy": "ddp", "bucket_mb": bucket}
        rows += cell(f"gpt2-{bucket}", 1.5 + 0.5 / bucket, step, **model)
    rows += cell("gpt2-bfloat16", 1.2, step, kind="training", model="gpt2", strategy="ddp", wire="bfloat16")
    for rate in (10**9, 25 * 10**8):
        limited = {"hosts": 2, "rate_bits": rate, "operation": "all_reduce", "size": 25 << 20}
        rows += cell(f"all_reduce-{rate}", 0.4 * 1e9 / rate, {"ringfence": 1.01}, **limited)
    return rows


def write_study(folder: Path, rows: list[Row], runs: bool = True) -> Path:
    """The files that `ringfence study` leaves behind, as far as a report reads them."""
    (folder / "summary").mkdir(parents=True)
    (folder / "summary" / "cells.json").write_text(json.dumps(rows))
    if runs:
        machines = {name: {**FACTS, **RUN} for name in {each["machine"] for each in rows}}
        (folder / "summary" / "machines.json").write_text(json.dumps(machines))
    return folder


def from_bench(samples: Path) -> Iterator[Row]:
    """The project's own samples as summary rows."""
    rounds: dict[str, Measured] = {}
    for line in samples.read_text().splitlines():
        record = json.loads(line)
        if record.get("case", {}).get("kind") in ("collective", "training"):
            key = json.dumps(record["case"], sort_keys=True)
            rounds.setdefault(key, Measured(record["case"], [])).rounds.append(record["samples"])
    for number, measured in enumerate(rounds.values()):
        found = result(measured)
        for each in found.lines:
            yield _of_bench(f"cell-{number}", measured.case, each, found.rounds, found.resolution)


def _of_bench(name: str, case: Mapping[str, Any], line: VariantResult, rounds: int, resolution: float) -> Row:
    known = {key: case[key] for key in SETTINGS if key in case}
    known["rate_bits"] = bits_per_second(case["rate"]) if case["rate"] else None
    if case.get("strategy") == "fsdp2":
        known["bucket_mb"] = None
    spent = {f"stage_{stage}": (line.stages or {}).get(stage) for stage in STAGES}
    stages = {stage: None if share is None else share * line.seconds * 1e9 for stage, share in spent.items()}
    low, high = (line.seconds * end / line.ratio.median for end in (line.ratio.low, line.ratio.high))
    return {
        **row(name, line.variant, line.seconds, line.seconds / line.ratio.median, resolution=resolution),
        **known, **stages, "rounds": rounds, "seconds_low": low, "seconds_high": high, "cpu_seconds": line.cpu_seconds,
        "ratio_low": line.ratio.low, "ratio_high": line.ratio.high, "sent_bytes": line.wire_bytes,
    }  # fmt: skip
