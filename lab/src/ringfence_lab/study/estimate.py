"""A rough estimate of how long a study takes.

The constants are those of two cores of a 2020s Xeon, and right to about a third on such a machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ringfence_lab.bench.measure import BATCH_SECONDS
from ringfence_lab.bench.names import ALONE, necessary_bytes
from ringfence_lab.bench.netns import bits_per_second
from ringfence_lab.bench.tee_variants import tee_of
from ringfence_lab.plan import models
from ringfence_lab.study import tee_cost
from ringfence_lab.study.cells import TEE, Cell

_POOL_SECONDS: Final = (3.0, 1.7)  # to start workers and their variants: fixed, and for each worker on two cores
_TURN_SECONDS: Final = 0.012  # two barriers and a command
_NS_PER_BYTE: Final = {
    "gloo-a": 0.6,
    "gloo-b": 0.6,
    "ringfence-unsealed": 0.6,
    "hop-by-hop": 1.0,
    "tls": 1.9,
}  # of a core
_SEALED_NS_PER_BYTE: Final = 0.75
_STEP_SECONDS: Final = {"resnet50": 1.6, "bert-base": 1.4, "gpt2": 1.6, "gpt2-tiny": 0.02}  # on one core
_BUILD_SECONDS_PER_BYTE: Final = 1.6e-9  # of a variant's copy of a model, on each worker


def seconds(cell: Cell, cores: int) -> float:
    """Return the seconds that measuring a cell takes, with its preparation."""
    settings = cell.settings
    if settings["kind"] == TEE:
        return _tee_seconds(cell)
    variants = settings["variants"]
    once = sum(_TURN_SECONDS + _seconds(cell, name, cores) for name in variants)
    if settings["kind"] == "collective":
        return (cell.rounds + 3) * once  # compared, and timed twice to find the repeats
    if settings["kind"] == "trace":
        return (cell.rounds + 1) * once + len(variants) * 0.1
    copies = 4 * models.load(settings["model"]).elements * _BUILD_SECONDS_PER_BYTE * len(variants)
    return (cell.rounds + 2) * once + (3.0 + copies) * _crowd(cell, cores)


def total(cells: Sequence[Cell], cores: int) -> float:
    """Return the seconds that all cells take, with the start of their workers."""
    fixed, each = _POOL_SECONDS
    pools = {cell.worker_pool for cell in cells}
    starting = sum(fixed * (2 if pool.devices else 1) + each * pool.workers * 2 / min(2, cores) for pool in pools)
    return starting + sum(seconds(cell, cores) for cell in cells)


def _tee_seconds(cell: Cell) -> float:
    """Results are checked without dilation, which takes as long as the work does."""
    settings, seconds = cell.settings, 0.0
    for name, dilation in settings["dilations"].items():
        tee = tee_of(name, settings["tee"])
        about = (settings["workers"], cell.trace, settings["operation"])
        passing = dilation * tee_cost.simulated(name, tee, *about, settings.get("host_cores", 1.0))
        seconds += cell.rounds * passing + 2 * tee_cost.work(name, *about)
    return seconds


def _seconds(cell: Cell, variant: str, cores: int) -> float:
    settings = cell.settings
    workers: int = settings["workers"]
    crowd = _crowd(cell, cores)
    if settings["kind"] == "collective":
        moved = necessary_bytes(settings["operation"], settings["size"], workers)
        return max(BATCH_SECONDS * 1.3, _moving(settings, moved, variant, cores))
    compute = _STEP_SECONDS.get(settings["model"], 0.0)
    if settings["kind"] == "trace":
        compute = sum(each for _, each in cell.trace)
        crowd = crowd if settings["device"] == "cpu" else 1.0
    if variant == ALONE:
        return compute * crowd
    size = sum(size for size, _ in cell.trace)
    if settings["kind"] == "training":
        size = models.load(settings["model"]).elements * (2 if settings["wire"] == "bfloat16" else 4)
    moving = _moving(settings, necessary_bytes("all_reduce", size, workers), variant, cores)
    return compute * crowd + moving  # on a machine with few cores, little of one hides behind the other


def _crowd(cell: Cell, cores: int) -> float:
    """Return how many workers share a core."""
    workers: int = cell.settings["workers"]
    return max(1.0, workers / cores)


def _moving(settings: Mapping[str, Any], moved: int, variant: str, cores: int) -> float:
    """Return the seconds to move bytes between workers, bound by the cores or by the network."""
    workers: int = settings["workers"]
    working = moved * _NS_PER_BYTE.get(variant, _SEALED_NS_PER_BYTE) * 1e-9 / min(cores, workers)
    wire = moved / workers * 8 / bits_per_second(settings["rate"]) * 1.1 if settings["rate"] else 0.0
    return max(working, wire)
