"""Summary rows of a study that was never measured: the prices of a known machine, with noise that is always the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from ringfence.plan.calibrate import _ground
from ringfence.plan.hardware import Hardware
from ringfence.plan.predict import predict

TRUTH = {
    "gloo": {"factor": 1.6, "message": 90.0, "switch": 80.0, "tail": 1.1, "beside": 1.3},
    "ringfence": {"factor": 1.2, "message": 30.0, "switch": 150.0, "tail": 1.0, "beside": 1.2},
    "ringfence-unsealed": {"factor": 1.1, "message": 30.0, "switch": 130.0, "tail": 0.9, "beside": 1.1},
    "hop-by-hop": {"factor": 1.8, "message": 12.0, "switch": 60.0, "tail": 1.2, "beside": 1.6},
}


def machine() -> Hardware:
    """The machine that the rows are made from."""
    ground = _ground(
        "truth", 2, {"seal": 0.095, "open": 0.097, "send": 0.12, "receive": 0.1, "reduce": 0.053, "copy": 0.05}
    )
    return Hardware("truth", ground.title, ground.figures, TRUTH)


def cases() -> Iterator[dict[str, Any]]:
    common = {"wire": "float32", "hosts": 0, "rate_bits": None, "busy": False, "machine": "m", "scaled": 1.0}
    nothing = {"operation": None, "size": None, "model": None, "strategy": None, "device": None, "bucket_mb": None}
    for workers in (2, 4, 8):
        for size in (64 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20):
            yield {
                **common,
                **nothing,
                "kind": "collective",
                "operation": "all_reduce",
                "size": size,
                "workers": workers,
            }
        for model, bucket in (("gpt2", None), ("resnet50", 10.0)):
            step = {"kind": "training", "strategy": "ddp", "model": model, "bucket_mb": bucket}
            yield {**common, **nothing, **step, "workers": workers}
            yield {**common, **nothing, **step, "kind": "trace", "device": "gpu", "workers": workers}


def synthetic(noise: float = 0.03) -> list[dict[str, Any]]:
    """One row for each cell and contender."""
    profile, rows = machine(), []
    for number, case in enumerate(cases()):
        cell = f"cell-{number:02}"
        alone = 0.4 * (case["workers"] / 2)
        step = case["kind"] != "collective"
        seconds = {way: predict(profile, case, way, alone if step else None) for way in TRUTH}
        found = {
            "gloo-a": seconds["gloo"],
            "gloo-b": seconds["gloo"],
            **{way: seconds[way] for way in TRUTH if way != "gloo"},
        }
        if step:
            found["alone"] = alone
        noisy = {name: value * (1 + noise * _wobble(cell, name)) for name, value in found.items()}
        base = (noisy["gloo-a"] + noisy["gloo-b"]) / 2
        for name, value in noisy.items():
            row = {**case, "cell": cell, "contender": name, "cpu_seconds": value, "sent_bytes": 0.0, "source": "s"}
            for column, found_value in (("seconds", value), ("ratio", value / base)):
                row |= {column: found_value, f"{column}_low": found_value, f"{column}_high": found_value}
            rows.append({**row, "resolution": 0.05, "scored": number % 7 != 6, "rounds": 7})
    return rows


def _wobble(cell: str, contender: str) -> float:
    """Between -1 and 1, and always the same."""
    return int.from_bytes(hashlib.sha256(f"{cell} {contender}".encode()).digest()[:4], "big") / 2**31 - 1
