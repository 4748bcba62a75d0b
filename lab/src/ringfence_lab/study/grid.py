"""The grid of a study: blocks of a TOML file, in each of which the lists multiply. What is not understood is an error.

rounds = 7                        # of every block that says nothing else

[[cells]]
kind = "training"                 # or "collective", "trace", "gpu-tee"
models = ["gpt2", "bert-base"]    # two models
workers = [2, 4]                  # times two numbers of workers: four cells
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterator
from importlib import resources
from typing import Any, Final

from ringfence.errors import ConfigurationError
from ringfence_lab.bench import names
from ringfence_lab.bench.netns import burst_bytes
from ringfence_lab.plan import models
from ringfence_lab.study import blocks, tee_grid
from ringfence_lab.study.blocks import Block
from ringfence_lab.study.cells import SETTINGS, TEE, Cell

_ROUNDS: Final = 7
_COMMON: Final = {"kind", "workers", "variants", "rounds", "hosts", "rates", "wires"}
_KEYS: Final = {
    "collective": {"operations", "sizes", "busy"},
    "training": {"models", "buckets", "strategy"},
    "trace": {"models", "buckets", "devices", "flops", "samples", "most"},
}
_TRANSPORTS: Final = (*names.BASELINE, "ringfence", "ringfence-unsealed", "hop-by-hop")
_VARIANTS: Final = {
    "collective": _TRANSPORTS,
    "training": (*_TRANSPORTS, names.PROFILED, names.ALONE),
    "trace": (*_TRANSPORTS, names.PROFILED, names.ALONE),
}


BUILT_IN: Final = ("default", "quick", "machines", "machines-few", "gpu-tee", "gpu-tee-ringfence", "gpu-tee-published")


def built_in(name: str) -> list[Cell]:
    """Return the cells of a built-in grid, one of BUILT_IN."""
    file = resources.files("ringfence_lab.study") / "grids" / f"{name}.toml"
    return read(file.read_text(encoding="utf-8"), f"the grid {name!r}")


def read(text: str, origin: str) -> list[Cell]:
    """Return all cells of a grid, in the order of the file.

    Raises ConfigurationError, which names the line or block.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{origin}: {error}") from None
    unknown = set(document) - {"rounds", "cells"}
    if unknown:
        raise ConfigurationError(f"{origin}: unknown key {', '.join(sorted(unknown))}; known are rounds and [[cells]]")
    tables = document.get("cells")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigurationError(f"{origin}: write at least one block [[cells]]")
    rounds = Block(document, origin).one("rounds", blocks.whole, _ROUNDS)
    cells = [
        cell for number, table in enumerate(tables, 1) for cell in _cells(table, f"{origin}, block {number}", rounds)
    ]
    twice = [name for name, group in itertools.groupby(sorted(cell.name for cell in cells)) if len(list(group)) > 1]
    if twice:
        raise ConfigurationError(f"{origin}: {twice[0]} is there twice; take it out of one of the blocks")
    return cells


def _cells(table: dict[str, Any], where: str, rounds: int) -> Iterator[Cell]:
    block = Block(table, where)
    kind = block.one("kind", blocks.name_of((*_KEYS, TEE)))
    rounds = block.one("rounds", blocks.whole, rounds)
    if kind == TEE:
        yield from tee_grid.cells(block, rounds)
        return
    block.check_keys(_COMMON | _KEYS[kind])
    hosts = block.one("hosts", blocks.whole, 0)
    rates = block.listed("rates", blocks.rate, [None]) if "rates" in table else [None]
    if hosts == 0 and rates != [None]:
        raise block.refuse("rates", "links are limited between hosts: say how many with `hosts`")
    wires = block.listed("wires", blocks.name_of(names.WIRES), ["float32"])
    workers = block.listed("workers", blocks.whole)
    if min(workers) < max(2, hosts):
        raise block.refuse("workers", "at least two, and one for each host, are needed")
    variants = _variants(block, kind)
    for some, rate, count, wire in itertools.product(_KINDS[kind](block), rates, workers, wires):
        settings = dict.fromkeys(SETTINGS) | {"kind": kind, "busy": False, "hosts": hosts, "rate": rate} | some
        settings |= {"workers": count, "wire": wire, "variants": variants}
        if rate is not None:
            settings["burst"] = burst_bytes(rate)
        yield _traced(block, settings, rounds) if kind == "trace" else Cell(settings, rounds)


def _variants(block: Block, kind: str) -> list[str]:
    known = (*names.VARIANTS, *([] if kind == "collective" else [names.ALONE]))
    chosen = block.listed("variants", blocks.name_of(known), _VARIANTS[kind])
    variants = list(dict.fromkeys((*names.BASELINE, *chosen)))  # without the baseline there is no ratio
    if block.one("strategy", str, "ddp") == "fsdp2" and (rings := [name for name in variants if name in names.RINGS]):
        raise block.refuse("variants", f"FSDP2 needs process groups: leave out {', '.join(rings)}")
    return variants


# -- the kinds --------------------------------------------------------------------------------------------------------


def _collectives(block: Block) -> Iterator[dict[str, Any]]:
    busy = block.one("busy", blocks.truth, False)
    operations = block.listed("operations", blocks.name_of(names.OPERATIONS), ["all_reduce"])
    if busy and operations != ["all_reduce"]:
        raise block.refuse("busy", "is for all_reduce: Gloo ends other operations only when they are waited for")
    for operation, size in itertools.product(operations, block.listed("sizes", blocks.size)):
        yield {"operation": operation, "size": size, "busy": busy}


def _trainings(block: Block) -> Iterator[dict[str, Any]]:
    strategy = block.one("strategy", blocks.name_of(names.STRATEGIES), "ddp")
    buckets = block.listed("buckets", blocks.bucket, ["default"])
    if strategy == "fsdp2" and (buckets != [None] or block.listed("wires", str, ["float32"]) != ["float32"]):
        raise block.refuse("strategy", "FSDP2 has neither buckets nor wire types here")
    for model, bucket in itertools.product(block.listed("models", blocks.name_of(names.MODELS)), buckets):
        yield {"model": model, "strategy": strategy, "bucket_mb": bucket}


def _traces(block: Block) -> Iterator[dict[str, Any]]:
    devices = block.listed("devices", blocks.name_of(("cpu", "gpu")))
    known, buckets = models.names(), block.listed("buckets", blocks.bucket, ["default"])
    for model, bucket, device in itertools.product(block.listed("models", blocks.name_of(known)), buckets, devices):
        yield {"model": model, "strategy": "ddp", "bucket_mb": bucket, "device": device}


_KINDS: Final = {"collective": _collectives, "training": _trainings, "trace": _traces}


def _traced(block: Block, settings: dict[str, Any], rounds: int) -> Cell:
    """With the very steps that are replayed, named by a digest: another list of parameters makes another cell."""
    samples, busy = block.one("samples", blocks.whole, 1), settings["device"] == "cpu"
    trace, seconds = blocks.replayed(block, settings["model"], settings["bucket_mb"], samples, busy)
    halved = 2 if settings["wire"] == "bfloat16" else 1  # the same buckets, half as long on the wire
    steps = tuple((size // halved, compute) for size, compute in trace.steps)
    digest = hashlib.sha256(json.dumps(steps).encode()).hexdigest()[:12]
    return Cell({**settings, "compute": seconds, "scaled": trace.scale, "trace": digest}, rounds, steps)
