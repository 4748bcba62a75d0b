"""Summary rows of a study that was never measured: the costs of a known machine, with noise that is always the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from ringfence.lab.plan.calibrate import _ground
from ringfence.lab.plan.hardware import Hardware
from ringfence.lab.plan.predict import predict

_MORE = {
    "gloo": {"idle": 0.35, "cold": 0.2, "half": 4.0, "staged": 0.2, "fresh": 0.5},
    "hop-by-hop": {"idle": 0.1, "cold": 0.4, "half": 1.2, "staged": 0.0, "fresh": 0.0},
}
_OURS = {"idle": 0.15, "cold": 0.3, "half": 1.2, "staged": 0.0, "fresh": 0.0}
TRUTH = {
    variant: {
        "factor": factor,
        "message": message,
        "switch": switch,
        "tail": tail,
        "beside": beside,
        **_MORE.get(variant, _OURS),
    }
    for variant, factor, message, switch, tail, beside in (
        ("gloo", 1.6, 90.0, 80.0, 1.1, 1.3),
        ("ringfence", 1.2, 30.0, 150.0, 1.0, 1.2),
        ("ringfence-unsealed", 1.1, 30.0, 130.0, 0.9, 1.1),
        ("hop-by-hop", 1.8, 12.0, 60.0, 1.2, 1.6),
    )
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
        sizes: dict[str, tuple[int, ...]] = {"all_reduce": (64 << 10, 128 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20)}
        sizes |= dict.fromkeys(("all_gather", "reduce_scatter"), (25 << 20, 100 << 20))
        for operation, size in ((name, size) for name in sizes for size in sizes[name]):
            one = {"kind": "collective", "operation": operation, "size": size}
            yield {**common, **nothing, **one, "workers": workers}
        for model, bucket in (("gpt2", None), ("resnet50", 10.0)):
            step = {"kind": "training", "strategy": "ddp", "model": model, "bucket_mb": bucket}
            yield {**common, **nothing, **step, "workers": workers}
            yield {**common, **nothing, **step, "kind": "trace", "device": "gpu", "workers": workers}


def synthetic(noise: float = 0.03) -> list[dict[str, Any]]:
    """One row for each cell and variant."""
    profile, rows = machine(), []
    for number, case in enumerate(cases()):
        cell = f"cell-{number:02}"
        alone = 0.4 * (case["workers"] / 2)
        step = case["kind"] != "collective"
        seconds = {variant: predict(profile, case, variant, alone if step else None) for variant in TRUTH}
        found = {
            "gloo-a": seconds["gloo"],
            "gloo-b": seconds["gloo"],
            **{variant: seconds[variant] for variant in TRUTH if variant != "gloo"},
        }
        if step:
            found["alone"] = alone
        noisy = {name: value * (1 + noise * _wobble(cell, name)) for name, value in found.items()}
        base = (noisy["gloo-a"] + noisy["gloo-b"]) / 2
        for name, value in noisy.items():
            row = {**case, "cell": cell, "variant": name, "cpu_seconds": value, "sent_bytes": 0.0, "source": "s"}
            for column, found_value in (("seconds", value), ("ratio", value / base)):
                row |= {column: found_value, f"{column}_low": found_value, f"{column}_high": found_value}
            rows.append({**row, "resolution": 0.05, "scored": number % 7 != 6, "rounds": 7})
    return rows


def _wobble(cell: str, variant: str) -> float:
    """Between -1 and 1, and always the same."""
    return int.from_bytes(hashlib.sha256(f"{cell} {variant}".encode()).digest()[:4], "big") / 2**31 - 1
