"""A study on simulated GPU TEEs that nobody measured: summary rows with a cell for each figure of its page."""

from __future__ import annotations

from typing import Any

from lab.tests.unit.report_samples import Row, row

BASELINE = {"plain": 1.0, "plain-again": 1.0}
SWITCHED = {"direct": 0.4, "parallel-authentication": 0.9, "overlap": 0.8, "all": 0.15}  # of the confidential step
DILATION = 20.0


def tee_cell(name: str, plain: float, factors: dict[str, float], **settings: Any) -> list[Row]:
    """Return the rows of a cell: a step without a TEE twice, and every variant as many times its time."""
    about: dict[str, Any] = {
        "kind": "gpu-tee", "device": "sim", "strategy": "ddp", "preset": "h100", "changed": "", "samples": 4,
        "all_reduces": 38, "load": 0.6, "host_cores": 1.0, "workers": 4, "hosts": 4, "rate_bits": 10**9, "scaled": 20.0,
        "resolution": 0.02,
    } | settings  # fmt: skip
    rows = []
    for variant, factor in {**BASELINE, **factors}.items():
        each = row(name, variant, plain * factor, plain, **about)
        wall = DILATION * 0.6 / about["load"] * each["seconds"]
        each |= {"dilation": DILATION, "wall_seconds": wall, "late_seconds": 0.04 * wall, "cpu_seconds": 0.5 * wall}
        rows.append(each)
    return rows


def everything() -> list[Row]:
    """Return cells for each figure."""
    rows: list[Row] = []
    for preset, model, factor in (("h100", "gpt2-xl", 40.0), ("h100", "resnet50", 12.0), ("software", "gpt2-xl", 25.0)):
        switched = {name: max(1.0, factor * share) for name, share in SWITCHED.items()}
        full = {"confidential": factor, **switched, "ringfence": 0.8 * factor}
        about = {"preset": preset, "model": model}
        rows += tee_cell(f"{model}-{preset}-4d", 0.002, full, **about)
        few = {"confidential": 1.01 * factor, "all": 1.02 * switched["all"], "ringfence": 0.8 * factor}
        if model == "gpt2-xl":
            rows += tee_cell(f"{model}-{preset}-4d-0.3", 0.002, few, **about, load=0.3)
            rows += tee_cell(
                f"{model}-{preset}-2d", 0.002, {"confidential": factor / 2, "ringfence": 20.0}, **about, workers=2
            )
            rows += tee_cell(f"{model}-{preset}-8d", 0.002, {"confidential": factor * 2}, **about, workers=8)
            for size, effect in ((5.0, 1.2), (100.0, 0.8)):
                bucketed = {"bucket_mb": size, "all_reduces": round(1000 / size)}
                rows += tee_cell(
                    f"{model}-{preset}-{size}", 0.002, {"confidential": factor * effect}, **about, **bucketed
                )
        copy = {"operation": "copy", "size": 25 << 20, "model": None, "scaled": 1.0, "preset": preset}
        if model == "gpt2-xl":
            rows += tee_cell(f"copy-{preset}", 0.001, {"confidential": 15.0, "all": 2.0}, **copy)
        for changed, effect in (
            ("cpu_rate x0.5", 1.8),
            ("cpu_rate x2", 0.6),
            ("samples x0.5", 1.1),
            ("samples x2", 0.9),
        ):
            if model == "gpt2-xl":
                rows += tee_cell(
                    f"{model}-{preset}-{changed}", 0.002, {"confidential": factor * effect}, **about, changed=changed
                )
    rows += tee_cell("host_cores", 0.002, {"ringfence": 16.0}, model="gpt2-xl", changed="host_cores x2")
    return rows
