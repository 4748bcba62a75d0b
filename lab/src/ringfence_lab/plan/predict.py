"""Predicts what a cell of a study measures: the costs of a plan, for workers that share the cores of one machine.

Hosts of a cell are network namespaces: machines whose workers share memory, and which share the cores. Without hosts each
worker stands for a machine of its own, on the loopback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from ringfence.errors import ConfigurationError
from ringfence_lab.plan import models
from ringfence_lab.plan.cost import collective_cost, staging
from ringfence_lab.plan.hardware import Hardware
from ringfence_lab.plan.schedules import GLOO, STAGED, schedule_of
from ringfence_lab.plan.steps import Question, replayed
from ringfence_lab.plan.traces import Trace, as_replayed, trace
from ringfence_lab.plan.work import VARIANTS, Cost

BASELINE: Final = "gloo"  # the mean of the two Gloo runs of a cell
MEASURED: Final = (BASELINE, "ringfence", "ringfence-unsealed", "hop-by-hop")
_EVERYTHING: Final = 1 << 62
_SHARP: Final = 6

CellRow = Mapping[str, Any]


def covered(case: CellRow) -> bool:
    """Return whether the model covers a cell: DDP only, and no callers busy in Python."""
    if case["kind"] == "collective":
        return not case.get("busy") and case["operation"] in GLOO
    known = case["kind"] in ("training", "trace") and case.get("strategy") in (None, "ddp")
    return known and case["model"] in models.names()


def predict(hardware: Hardware, case: CellRow, variant: str, alone: float | None = None) -> float:
    """Return the seconds of a cell. `alone`: seconds of a step without communication.

    Raises ConfigurationError if the model does not cover the cell, or `alone` is needed and missing.
    """
    if variant not in MEASURED or not covered(case):
        raise ConfigurationError(f"the model does not cover {variant} in a cell of kind {case['kind']}")
    workers = int(case["workers"])
    if case["kind"] == "collective":
        return _over(hardware, case, 0.0, lambda here, per_node: _collective(here, case, variant, per_node).seconds)
    if alone is None:
        raise ConfigurationError("a step is predicted from what it takes alone: measure the variant `alone` too")
    scale = case.get("scaled") or 1.0
    made = _trace(case["model"], case["kind"], case.get("bucket_mb"), case.get("device"), scale, alone)
    wire = 2 if case.get("wire") == "bfloat16" else 4
    question = Question(
        models.load(case["model"]),
        workers,
        case.get("bucket_mb"),
        channels=1,
        wire_bytes=wire,
        per_machine=workers_per_machine(case),
    )
    chosen = VARIANTS[variant]
    return _over(hardware, case, alone, lambda here, per_node: replayed(here, chosen, made, question).seconds)


@lru_cache(maxsize=1024)
def _trace(name: str, kind: str, bucket: float | None, device: str | None, scale: float, alone: float) -> Trace:
    if kind == "training":
        return trace(models.load(name), bucket, 4, alone, True, most_bytes=_EVERYTHING)
    return as_replayed(models.load(name), bucket, 4, alone, device == "cpu", scale)


def _collective(hardware: Hardware, case: CellRow, variant: str, per_node: int) -> Cost:
    operation, workers, size = case["operation"], int(case["workers"]), int(case["size"])
    per_machine = workers_per_machine(case)
    chosen, identifier = VARIANTS[variant], schedule_of(variant, operation, workers, size, per_machine)
    found = collective_cost(hardware, chosen, identifier, workers, size, per_node=per_node, per_machine=per_machine)
    if variant == BASELINE and operation in STAGED:
        found = found.plus(staging(hardware, chosen, workers, size, per_node))
    return found


def workers_per_machine(case: CellRow) -> int:
    """Return how many workers of a cell share a machine; 0 on the loopback, where each stands for one."""
    hosts = int(case.get("hosts") or 0)
    return -(-int(case["workers"]) // hosts) if hosts else 0


def _over(hardware: Hardware, case: CellRow, alone: float, seconds: Callable[[Hardware, int], float]) -> float:
    """Return the seconds between hosts with limited links: the slower of the shared cores and the links.

    What is compared is what communication adds; where both add about the same, it is a little more than either.
    """
    workers, hosts, rate = int(case["workers"]), int(case.get("hosts") or 0), case.get("rate_bits")
    cores = seconds(hardware, workers)
    if not hosts or not rate:
        return cores
    each = -(-workers // hosts)
    wires = hardware.with_values(network_rate=rate / 1e9, node_workers=each, node_cores=1e6)
    ends = {
        variant: {**figures, "tail": 1.0} for variant, figures in hardware.variants.items()
    }  # those were fitted to cores
    limited = Hardware(wires.name, wires.title, wires.figures, ends)
    one, other = (max(0.0, found - alone) for found in (cores, seconds(limited, each)))
    return alone + float((one**_SHARP + other**_SHARP) ** (1 / _SHARP))
