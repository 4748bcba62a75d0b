"""The grid of a study: blocks of a TOML file, in each of which the lists multiply. What is not understood is an error.

rounds = 7                        # of every block that says nothing else

[[cells]]
kind = "training"                 # or "collective", or "trace"
models = ["gpt2", "bert-base"]    # two models
workers = [2, 4]                  # times two numbers of workers: four cells
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tomllib
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any, Final

from ringfence.errors import ConfigurationError
from ringfence.lab.bench import names
from ringfence.lab.bench.netns import burst_bytes
from ringfence.lab.bench.units import bytes_of
from ringfence.lab.plan import models, traces
from ringfence.lab.study.cells import SETTINGS, Cell

_ROUNDS: Final = 7
_GRADIENT_BYTES: Final = 4  # DDP cuts buckets of float32, whatever a hook sends in their place
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


def built_in(name: str) -> list[Cell]:
    """Return the cells of a built-in grid: "default" or "quick"."""
    file = resources.files("ringfence.lab.study") / "grids" / f"{name}.toml"
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
    blocks = document.get("cells")
    if not isinstance(blocks, list) or not blocks or not all(isinstance(block, dict) for block in blocks):
        raise ConfigurationError(f"{origin}: write at least one block [[cells]]")
    rounds = _Block(document, origin).one("rounds", _whole, _ROUNDS)
    cells = [
        cell for number, block in enumerate(blocks, 1) for cell in _cells(block, f"{origin}, block {number}", rounds)
    ]
    twice = [name for name, group in itertools.groupby(sorted(cell.name for cell in cells)) if len(list(group)) > 1]
    if twice:
        raise ConfigurationError(f"{origin}: {twice[0]} is there twice; take it out of one of the blocks")
    return cells


class _Block:
    """One table of the file. Its errors name the table."""

    def __init__(self, table: dict[str, Any], where: str) -> None:
        self._table = table
        self.where = where

    def refuse(self, key: str, problem: object) -> ConfigurationError:
        return ConfigurationError(f"{self.where}, {key}: {problem}")

    def one(self, key: str, parse: Callable[[Any], Any], default: Any = None) -> Any:
        if key not in self._table:
            if default is None:
                raise self.refuse(key, "is missing")
            return default
        try:
            return parse(self._table[key])
        except ValueError as error:
            raise self.refuse(key, error) from None

    def listed(self, key: str, parse: Callable[[Any], Any], default: Any = None) -> list[Any]:
        values = self._table.get(key, default)
        if not isinstance(values, list | tuple) or not values:
            raise self.refuse(key, "write a list with at least one value")
        try:
            return [parse(value) for value in values]
        except ValueError as error:
            raise self.refuse(key, error) from None

    def check_keys(self, known: set[str]) -> None:
        unknown = set(self._table) - known
        if unknown:
            raise self.refuse(sorted(unknown)[0], f"is unknown here; known are {', '.join(sorted(known))}")


def _cells(table: dict[str, Any], where: str, rounds: int) -> Iterator[Cell]:
    block = _Block(table, where)
    kind = block.one("kind", _name_of(_KEYS))
    block.check_keys(_COMMON | _KEYS[kind])
    rounds = block.one("rounds", _whole, rounds)
    hosts = block.one("hosts", _whole, 0)
    rates = block.listed("rates", _rate, [None]) if "rates" in table else [None]
    if hosts == 0 and rates != [None]:
        raise block.refuse("rates", "links are limited between hosts: say how many with `hosts`")
    wires = block.listed("wires", _name_of(names.WIRES), ["float32"])
    workers = block.listed("workers", _whole)
    if min(workers) < max(2, hosts):
        raise block.refuse("workers", "at least two, and one for each host, are needed")
    variants = _variants(block, kind)
    for some, rate, count, wire in itertools.product(_KINDS[kind](block), rates, workers, wires):
        settings = dict.fromkeys(SETTINGS) | {"kind": kind, "busy": False, "hosts": hosts, "rate": rate} | some
        settings |= {"workers": count, "wire": wire, "variants": variants}
        if rate is not None:
            settings["burst"] = burst_bytes(rate)
        yield _traced(block, settings, rounds) if kind == "trace" else Cell(settings, rounds)


def _variants(block: _Block, kind: str) -> list[str]:
    known = (*names.VARIANTS, *([] if kind == "collective" else [names.ALONE]))
    chosen = block.listed("variants", _name_of(known), _VARIANTS[kind])
    variants = list(dict.fromkeys((*names.BASELINE, *chosen)))  # without the baseline there is no ratio
    if block.one("strategy", str, "ddp") == "fsdp2" and (rings := [name for name in variants if name in names.RINGS]):
        raise block.refuse("variants", f"FSDP2 needs process groups: leave out {', '.join(rings)}")
    return variants


# -- the kinds --------------------------------------------------------------------------------------------------------


def _collectives(block: _Block) -> Iterator[dict[str, Any]]:
    busy = block.one("busy", _truth, False)
    operations = block.listed("operations", _name_of(names.OPERATIONS), ["all_reduce"])
    if busy and operations != ["all_reduce"]:
        raise block.refuse("busy", "is for all_reduce: Gloo ends other operations only when they are waited for")
    for operation, size in itertools.product(operations, block.listed("sizes", _size)):
        yield {"operation": operation, "size": size, "busy": busy}


def _trainings(block: _Block) -> Iterator[dict[str, Any]]:
    strategy = block.one("strategy", _name_of(names.STRATEGIES), "ddp")
    buckets = block.listed("buckets", _bucket, ["default"])
    if strategy == "fsdp2" and (buckets != [None] or block.listed("wires", str, ["float32"]) != ["float32"]):
        raise block.refuse("strategy", "FSDP2 has neither buckets nor wire types here")
    for model, bucket in itertools.product(block.listed("models", _name_of(names.MODELS)), buckets):
        yield {"model": model, "strategy": strategy, "bucket_mb": bucket}


def _traces(block: _Block) -> Iterator[dict[str, Any]]:
    devices = block.listed("devices", _name_of(("cpu", "gpu")))
    known, buckets = models.names(), block.listed("buckets", _bucket, ["default"])
    for model, bucket, device in itertools.product(block.listed("models", _name_of(known)), buckets, devices):
        yield {"model": model, "strategy": "ddp", "bucket_mb": bucket, "device": device}


_KINDS: Final = {"collective": _collectives, "training": _trainings, "trace": _traces}


def _traced(block: _Block, settings: dict[str, Any], rounds: int) -> Cell:
    """With the very steps that are replayed, named by a digest: another list of parameters makes another cell."""
    model = models.load(settings["model"])
    seconds = model.step_flops(block.one("samples", _whole, 1)) / block.one("flops", _positive)
    most = min(block.one("most", _size, traces.MOST_BYTES), traces.MOST_BYTES)
    trace = traces.trace(
        model, settings["bucket_mb"], _GRADIENT_BYTES, seconds, settings["device"] == "cpu", most_bytes=most
    )
    halved = 2 if settings["wire"] == "bfloat16" else 1  # the same buckets, half as long on the wire
    steps = tuple((size // halved, compute) for size, compute in trace.steps)
    digest = hashlib.sha256(json.dumps(steps).encode()).hexdigest()[:12]
    return Cell({**settings, "compute": seconds, "scaled": trace.scale, "trace": digest}, rounds, steps)


# -- values -----------------------------------------------------------------------------------------------------------


def _name_of(known: Any) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{value!r} is none of {', '.join(known)}")
        return value

    return parse


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 < value < 10**6:
        raise ValueError(f"{value!r} is no whole number above zero")
    return value


def _positive(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{value!r} is no number above zero")
    return float(value)


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _size(value: Any) -> int:
    if not isinstance(value, str):
        raise ValueError(f'{value!r}: write a size such as "25MiB"')
    return bytes_of(value)


def _rate(value: Any) -> str:
    try:
        burst_bytes(str(value))
    except ConfigurationError:
        raise ValueError(f'{value!r}: write a rate such as "1gbit"') from None
    return str(value)


def _bucket(value: Any) -> float | None:
    """Parse a bucket size in MiB; None is DDP's default."""
    return None if value == "default" else _positive(value)
