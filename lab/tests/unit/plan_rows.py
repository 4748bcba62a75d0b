"""Summary rows of a study that was never measured: the costs of a known machine, with noise that is always the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from ringfence_lab.accelerator import tee
from ringfence_lab.bench.tee_variants import figures_of, tee_of
from ringfence_lab.plan import models
from ringfence_lab.plan.calibrate import _ground
from ringfence_lab.plan.hardware import Hardware
from ringfence_lab.plan.predict import predict
from ringfence_lab.plan.traces import trace
from ringfence_lab.study import tee_cost

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
        "between": 1.0,
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
    ground = _ground(2, {"seal": 0.095, "open": 0.097, "send": 0.12, "receive": 0.1, "reduce": 0.053, "copy": 0.05})
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


INSIDE = {"inside_copy": 0.1, "inside_message": 30.0, "inside_sealed": 0.0}


def machines() -> Hardware:
    """The same machine, between whose namespaces a byte costs more, and inside which workers share memory."""
    truth = {variant: {**figures, "between": 1.5} for variant, figures in TRUTH.items()}
    return Hardware("truth", "", machine().with_values(**INSIDE).figures, truth)


def machine_cases() -> Iterator[dict[str, Any]]:
    """Machines x workers."""
    common = {"wire": "float32", "rate_bits": None, "busy": False, "machine": "m", "scaled": 1.0, "kind": "collective"}
    nothing = {"model": None, "strategy": None, "device": None, "bucket_mb": None}
    for hosts, workers in ((1, 2), (1, 4), (2, 2), (2, 4), (2, 8), (4, 4)):
        for operation in ("all_reduce", "all_gather", "broadcast"):
            for size in (4 << 10, 1 << 20, 25 << 20, 100 << 20):
                yield {**common, **nothing, "operation": operation, "size": size, "hosts": hosts, "workers": workers}


def synthetic(
    noise: float = 0.03, profile: Hardware | None = None, chosen: Iterable[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """One row for each cell and variant."""
    profile, rows = profile or machine(), []
    for number, case in enumerate(cases() if chosen is None else chosen):
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


_FLOPS = 989e12 * 0.4  # of the profiles of GPUs
_MOST = 128 << 20


def tee_cases() -> Iterator[dict[str, Any]]:
    """Settings of gpu-tee cells, with the trace of each."""
    for model, bucket, workers, samples in (
        ("gpt2-xl", None, 4, 4), ("gpt2-xl", None, 2, 4), ("bert-large", None, 8, 4), ("gpt2", 5.0, 4, 4),
        ("resnet50", None, 4, 32), ("resnet50", 1.0, 2, 32), ("resnet50", 100.0, 4, 512), ("bert-large", 10.0, 2, 4),
    ):  # fmt: skip
        made = models.load(model)
        cut = trace(made, bucket, 4, made.step_flops(samples) / _FLOPS, False, most_bytes=_MOST)
        about = {"model": model, "bucket_mb": bucket, "workers": workers, "samples": samples, "scaled": cut.scale}
        yield {**about, "operation": None, "size": None, "steps": cut.steps}
    for size in (1 << 20, 25 << 20):
        about = {"model": None, "bucket_mb": None, "workers": 4, "samples": None, "scaled": 1.0}
        yield {**about, "operation": "all_reduce", "size": size, "steps": ((size, 0.0),)}


def tee_rows(preset: str = "h100", **changes: float) -> list[dict[str, Any]]:
    """One row for each gpu-tee cell and variant, from the study's own estimate of rings, which does not use the planner."""
    figures = {**figures_of(tee.load(preset)), **changes}
    common = {"kind": "gpu-tee", "preset": preset, "changed": "", "strategy": "ddp", "device": "sim", "hosts": 0}
    common |= {"rate_bits": None, "dilation": 20.0, "wire": "float32", "busy": False, "machine": "m", "source": "s"}
    rows = []
    for number, case in enumerate(tee_cases()):
        about = {name: value for name, value in case.items() if name != "steps"}
        seconds = {
            variant: tee_cost.ring_seconds(tee_of(variant, figures), case["workers"], case["steps"])
            for variant in ("plain", "plain-again", "confidential", "direct")
        }
        for variant, value in seconds.items():
            row = {**common, **about, "cell": f"cell-{number}", "variant": variant, "load": 0.6, "host_cores": None}
            for column, found in (("seconds", value), ("ratio", value / seconds["plain"])):
                row |= {column: found, f"{column}_low": found, f"{column}_high": found}
            row |= {"cpu_seconds": value, "sent_bytes": 0.0, "wall_seconds": 20 * value, "late_seconds": 0.0}
            rows.append({**row, "all_reduces": 1, "resolution": 0.01, "scored": True, "rounds": 5})
    return rows
