"""Blocks of a grid of kind "gpu-tee": data-parallel steps on simulated GPU TEEs.

[[cells]]
kind = "gpu-tee"
models = ["gpt2-xl"]              # or operations = ["all_reduce", "copy"] and sizes = ["25MiB"]
presets = ["h100"]
workers = [2, 4, 8]               # one for each device
vary = ["cpu_rate", "samples"]    # further cells with each of these inputs halved, and doubled
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from ringfence_lab.accelerator import tee
from ringfence_lab.accelerator.controls import MAX_DEVICES
from ringfence_lab.bench import names
from ringfence_lab.bench.netns import burst_bytes
from ringfence_lab.bench.tee_variants import figures_of, tee_of
from ringfence_lab.plan import models
from ringfence_lab.plan.buckets import buckets
from ringfence_lab.study import blocks, tee_cost
from ringfence_lab.study.blocks import Block
from ringfence_lab.study.cells import SETTINGS, TEE, Cell, Step

_KEYS: Final = {
    *("kind", "workers", "variants", "rounds", "models", "buckets", "presets", "samples", "flops", "most"),
    *("operations", "sizes", "vary", "load", "host_cores"),
}
_OPERATIONS: Final = ("all_reduce", "copy")
_LOAD: Final = 0.6  # cores of this machine in use while something is timed
_COPY_SECONDS: Final = 0.002  # the least that a copy takes here, so that the wakeups of threads are a small part of it
_FACTORS: Final = (0.5, 2.0)
SAMPLES: Final = "samples"
HOST_CORES: Final = "host_cores"
_VARIED: Final = (*tee.FIGURES, SAMPLES, HOST_CORES)


class _Point(NamedTuple):
    """What one cell replays."""

    settings: Mapping[str, Any]
    trace: tuple[Step, ...]


class _Inputs(NamedTuple):
    """The inputs of a cell, with at most one of them changed."""

    changed: str
    figures: Mapping[str, float]
    samples: int
    host_cores: float


def cells(block: Block, rounds: int) -> Iterator[Cell]:
    """Yield the cells of a block. Raises ConfigurationError, which names the block."""
    block.check_keys(_KEYS)
    workers = block.listed("workers", blocks.whole)
    if min(workers) < 2 or max(workers) > MAX_DEVICES:
        raise block.refuse("workers", f"from 2 to {MAX_DEVICES}: each has a simulated device")
    load = block.one("load", blocks.positive, _LOAD)
    chosen = block.listed("variants", blocks.name_of(names.TEE_VARIANTS), names.TEE_VARIANTS)
    for preset, count in itertools.product(block.listed("presets", blocks.name_of(tee.names())), workers):
        for inputs in _inputs(block, preset):
            for point in _points(block, inputs.samples):
                yield _cell(point, inputs, preset, count, load, chosen, rounds)


def _inputs(block: Block, preset: str) -> Iterator[_Inputs]:
    figures = figures_of(tee.load(preset))
    samples = block.one(SAMPLES, blocks.whole, 1)
    cores = block.one(HOST_CORES, blocks.positive, tee_cost.HOST_CORES)
    if not block.has("vary"):
        yield _Inputs("", figures, samples, cores)
        return
    for name in block.listed("vary", blocks.name_of(_VARIED)):
        for factor in _FACTORS:
            changed = f"{name} x{factor:g}"
            if name == SAMPLES:
                if samples % 2:
                    raise block.refuse("vary", "samples are halved: write an even number of them")
                yield _Inputs(changed, figures, round(samples * factor), cores)
            elif name == HOST_CORES:
                yield _Inputs(changed, figures, samples, cores * factor)
            elif figures[name] * factor >= 1 or name not in tee.COUNTS:
                yield _Inputs(changed, {**figures, name: figures[name] * factor}, samples, cores)


def _points(block: Block, samples: int) -> Iterator[_Point]:
    if block.has("operations"):
        if block.has("models"):
            raise block.refuse("operations", "write either models or operations with sizes")
        for operation, size in itertools.product(
            block.listed("operations", blocks.name_of(_OPERATIONS)), block.listed("sizes", blocks.size)
        ):
            yield _Point({"operation": operation, "size": size, "all_reduces": 1}, ((size, 0.0),))
        return
    block.one("flops", blocks.positive)  # without operations, a block needs it before anything else
    listed = block.listed("models", blocks.name_of(models.names()))
    for name, cap in itertools.product(listed, block.listed("buckets", blocks.bucket, ["default"])):
        trace, seconds = blocks.replayed(block, name, cap, samples, busy=False)
        whole = len(buckets(models.load(name).parameters, cap, blocks.GRADIENT_BYTES))
        about = {"model": name, "strategy": "ddp", "bucket_mb": cap, "samples": samples, "compute": seconds}
        yield _Point({**about, "scaled": trace.scale, "all_reduces": whole}, trace.steps)


def _cell(
    point: _Point, inputs: _Inputs, preset: str, devices: int, load: float, chosen: list[str], rounds: int
) -> Cell:
    operation = point.settings.get("operation")
    named = dict.fromkeys((*names.TEE_BASELINE, *chosen))
    variants = [name for name in names.TEE_VARIANTS if name in named]
    if operation == "copy":  # between host and device: of one device, and of no schedule
        variants = [name for name in variants if name not in ("direct", names.TEE_SEALED)]
    dilations = {name: _dilation(name, inputs, devices, load, point.trace, operation) for name in variants}
    settings = dict.fromkeys(SETTINGS) | {"kind": TEE, "busy": False, "hosts": 0, "wire": "float32", "device": "sim"}
    settings |= {**point.settings, "workers": devices, "variants": variants, "preset": preset}
    settings |= {"changed": inputs.changed, "load": load, "tee": dict(inputs.figures), "dilations": dilations}
    settings["trace"] = hashlib.sha256(json.dumps(point.trace).encode()).hexdigest()[:12]
    if names.TEE_SEALED in variants:
        bits = 8 * tee_cost.host_rate(inputs.host_cores) / dilations[names.TEE_SEALED]
        rate = f"{bits / 1e6:.0f}mbit"
        settings |= {"hosts": devices, "rate": rate, "burst": burst_bytes(rate), "host_cores": inputs.host_cores}
    return Cell(settings, rounds, point.trace)


def _dilation(
    variant: str, inputs: _Inputs, devices: int, load: float, trace: tuple[Step, ...], operation: str | None
) -> float:
    """Return the factor by which time passes more slowly, so that about `load` cores of this machine are in use."""
    tee = tee_of(variant, inputs.figures)
    simulated = tee_cost.simulated(variant, tee, devices, trace, operation, inputs.host_cores)
    needed = max(1.0, tee_cost.work(variant, devices, trace, operation) / (load * simulated))
    if variant != names.TEE_SEALED:
        shortest = min(tee_cost.one_copy(tee, size, devices, operation) for size, _ in trace)
        needed = max(needed, _COPY_SECONDS * _LOAD / load / shortest)
    if variant == names.TEE_SEALED:  # few different rates: cells with the same one share their workers
        return float(2 ** math.ceil(math.log2(needed)))
    return float(f"{needed:.2g}")


def without_sealed(cell: Cell) -> Cell:
    """Return the cell without ringfence, which needs network namespaces."""
    left = cell.without(names.TEE_SEALED)
    dropped = ("burst", HOST_CORES)
    settings = {name: value for name, value in left.settings.items() if name not in dropped}
    dilations = {name: value for name, value in settings["dilations"].items() if name != names.TEE_SEALED}
    return Cell({**settings, "hosts": 0, "rate": None, "dilations": dilations}, cell.rounds, cell.trace)
