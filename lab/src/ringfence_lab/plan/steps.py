"""The cost of a training step: computing, its collectives, and how much of the one hides the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from ringfence.collectives import Collective, ScheduleId, Table, choose
from ringfence.errors import ConfigurationError
from ringfence_lab.plan import fsdp
from ringfence_lab.plan.cost import collective_cost, shared_by
from ringfence_lab.plan.hardware import Hardware
from ringfence_lab.plan.loads import FREE, Cost, load
from ringfence_lab.plan.models import Model
from ringfence_lab.plan.traces import Trace, trace
from ringfence_lab.plan.work import Variant, busiest, fitted_figures, machines_of

FLAT: Final = {
    "ring": ScheduleId.ALL_REDUCE_RING,
    "tree": ScheduleId.ALL_REDUCE_TREE,
    "doubling": ScheduleId.ALL_REDUCE_DOUBLING,
}
SCHEDULES: Final = ("table", *FLAT, "two-levels")
STRATEGIES: Final = ("ddp", "fsdp")
_EVERYTHING: Final = 1 << 62  # a trace that is not cut


@dataclass(frozen=True)
class Question:
    """A training setting whose cost is to be predicted."""

    model: Model
    workers: int
    cap_mib: float | None = None
    bytes_each: int = 4
    samples: int = 8  #       of the training data, for each worker and step
    schedule: str = "table"  # of DDP's all-reduces
    channels: int = 1  #      connections and threads of a link between machines
    every: int = 1  #         synchronise once in so many steps
    wire_bytes: int = 4  #    of an element on the wire; buckets are cut by `bytes_each`
    compute_seconds: float | None = None  # what a step costs without communication, if known
    strategy: str = "ddp"  #  or fsdp
    blocks: int = 1  #        of the model that form one unit of FSDP
    reshard: bool = True  #   FSDP frees parameters after the forward pass, and gathers them again
    per_machine: int | None = None  # workers that share a machine's memory, if not as the hardware says


@dataclass(frozen=True)
class Step:
    """The predicted cost of a step, and its parts."""

    seconds: float
    compute: float
    communication: Cost  # of all collectives, were nothing hidden
    buckets: int  # DDP's all-reduces, or FSDP's collectives
    of_buckets: bool = True

    @property
    def exposed(self) -> float:
        """What communication adds to the step."""
        return self.seconds - self.compute

    @property
    def terms(self) -> dict[str, float]:
        """The parts of the step: computing, and the exposed communication divided among its terms."""
        whole = self.communication.seconds
        share = self.exposed / whole if whole else 0.0
        return {"compute": self.compute, **{term: value * share for term, value in self.communication.terms.items()}}

    @property
    def dominant(self) -> str:
        return max(self.terms, key=lambda term: self.terms[term])


def step(hardware: Hardware, variant: Variant, question: Question) -> Step:
    """Return the cost of one training step, on average over `every` steps."""
    compute = question.compute_seconds
    if compute is None:
        compute = question.model.step_flops(question.samples) / (
            hardware["compute", "flops"] * hardware["compute", "utilisation"]
        )
    busy = bool(hardware["compute", "busy"])
    if question.strategy == "fsdp":
        return _sharded(hardware, variant, question, compute, busy)
    made = trace(question.model, question.cap_mib, question.bytes_each, compute, busy, most_bytes=_EVERYTHING)
    return replayed(hardware, variant, made, question)


def replayed(hardware: Hardware, variant: Variant, made: Trace, question: Question) -> Step:
    """Return the cost of a trace."""
    shrunk = question.wire_bytes / question.bytes_each
    costs = {
        size: all_reduce(
            hardware,
            variant,
            question.schedule,
            question.workers,
            size * shrunk,
            question.channels,
            question.wire_bytes == 2,
            question.per_machine,
        )
        for size in {size for size, _ in made.steps}
    }
    total = FREE
    for size in costs:
        total = total.plus(costs[size].times(sum(1 for each, _ in made.steps if each == size)))
    compute = made.compute_seconds
    if question.every > 1:  # nothing to hide behind: the step's end is waited for, once in `every` steps
        return Step(compute + total.seconds / question.every, compute, total, len(made.steps))
    seconds = _overlapped(hardware, variant, made, costs, question.workers)
    return Step(seconds, compute, total, len(made.steps))


def _sharded(hardware: Hardware, variant: Variant, question: Question, compute: float, busy: bool) -> Step:
    """Return the cost of a step with FSDP. Parameters and gradients are sent with `wire_bytes` per element."""
    found = fsdp.units(question.model, question.blocks)

    def costs_of(operation: str) -> list[Cost]:
        return [
            fsdp.collective(
                hardware,
                variant,
                operation,
                question.workers,
                unit.elements * question.wire_bytes,
                question.channels,
                question.wire_bytes == 2 and operation == "reduce_scatter",
            )
            for unit in found
        ]

    made = fsdp.timeline(found, costs_of("all_gather"), costs_of("reduce_scatter"), compute, question.reshard)
    total = FREE
    for each in made.collectives:
        total = total.plus(each)
    seconds = made.finished
    if overlaps_nothing(hardware, variant):
        seconds = compute + total.seconds
    elif busy:
        seconds = on_the_same_cores(hardware, variant, made.finished, compute, total.cpu, question.workers)
    else:
        fitted = fitted_figures(hardware, variant)
        seconds = compute + (made.finished - compute) * (fitted["tail"] if fitted else 1.0)
    return Step(seconds, compute, total, len(made.collectives), of_buckets=False)


def overlaps_nothing(hardware: Hardware, variant: Variant) -> bool:
    """Return whether no overlap of computing and communication is assumed: in a confidential mode whose copies serialise."""
    confidential = bool(hardware["device", "copy_rate"]) and not hardware["device", "computing"]
    return confidential and variant.name not in ("plaintext", "gloo")


def on_the_same_cores(
    hardware: Hardware, variant: Variant, finished: float, compute: float, cpu: float, workers: int
) -> float:
    """Return the seconds of a step whose computing and communication share the cores: their core seconds add up."""
    fitted = fitted_figures(hardware, variant)
    together = min(workers, max(1, int(hardware["node", "workers"])))
    cores = max(1.0, hardware["node", "cores"])
    computing = compute * min(1.0, cores / together) * together  # core seconds of the node: `compute` is as it was met
    talking = cpu * together
    return max(finished, (computing + talking * (fitted["beside"] if fitted else 1.0)) / cores)


def _overlapped(hardware: Hardware, variant: Variant, made: Trace, costs: Mapping[int, Cost], workers: int) -> float:
    fitted = fitted_figures(hardware, variant)
    compute = made.compute_seconds
    if overlaps_nothing(hardware, variant):
        return compute + sum(costs[size].seconds for size, _ in made.steps)
    ends: list[float] = []
    ready = free = 0.0
    for size, seconds in made.steps:
        ready += seconds
        begin = max(ready, free, ends[-variant.at_once] if len(ends) >= variant.at_once else 0.0)
        free = begin + costs[size].work
        ends.append(max(begin + costs[size].seconds, ends[-1] if ends else 0.0))
    finished = max(compute, ends[-1] if ends else 0.0)
    if not made.busy:
        return compute + (finished - compute) * (fitted["tail"] if fitted else 1.0)
    return on_the_same_cores(
        hardware, variant, finished, compute, sum(costs[size].cpu for size, _ in made.steps), workers
    )


@lru_cache(maxsize=4096)
def all_reduce(
    hardware: Hardware,
    variant: Variant,
    schedule: str,
    workers: int,
    whole: float,
    channels: int = 1,
    narrow: bool = False,
    per_machine: int | None = None,
) -> Cost:
    """Return the cost of one all-reduce of a step, with the runtime's choice (`table`) or a named schedule.

    `per_machine`: how many workers share a machine's memory, if not as the hardware says. Raises ConfigurationError for an
    unknown schedule.
    """
    if workers < 2:
        return FREE
    if schedule not in SCHEDULES:
        raise ConfigurationError(f"no schedule is called {schedule!r}: {', '.join(SCHEDULES)}")
    shared = shared_by(hardware) if per_machine is None else per_machine
    if variant.name in ("gloo", "hop-by-hop"):
        identifier = FLAT["ring"]  # their only one
    elif schedule == "two-levels" and hardware["inside", "rate"] and hierarchical_possible(hardware, workers):
        return _over_devices(hardware, variant, workers, whole, channels, narrow)
    elif schedule == "table":
        machines = machines_of(workers, shared)
        found = choose(Collective.ALL_REDUCE, workers, 0, 0, int(whole), Table(), machines=machines)
        identifier = ScheduleId(found.identifier)
    elif schedule == "two-levels":
        even = shared > 1 and workers % shared == 0
        identifier = ScheduleId.ALL_REDUCE_TWO_LEVELS if even else FLAT["ring"]
    else:
        identifier = FLAT[schedule]
    return _of_a_step(hardware, variant, identifier, workers, whole, channels, narrow, shared)


def _of_a_step(
    hardware: Hardware,
    variant: Variant,
    identifier: ScheduleId,
    workers: int,
    whole: float,
    channels: int,
    narrow: bool,
    per_machine: int | None = None,
) -> Cost:
    """Return the cost of a collective in a step: others run at the same time, and the caches are cold."""
    return collective_cost(
        hardware, variant, identifier, workers, whole, channels, None, variant.at_once, math.inf, narrow, per_machine
    )


def hierarchical_possible(hardware: Hardware, workers: int) -> bool:
    """Return whether devices of a machine have links of their own, and there are only full machines."""
    together = int(hardware["node", "workers"])
    return bool(hardware["inside", "rate"]) and together > 1 and workers >= together and workers % together == 0


def _over_devices(
    hardware: Hardware, variant: Variant, workers: int, whole: float, channels: int, narrow: bool
) -> Cost:
    """Return the cost of two levels whose inner one uses the links of a machine's devices (NVLink).

    The runtime has no such schedule: inside a machine it copies through memory that workers share.
    """
    together = int(hardware["node", "workers"])
    lone = _one_of(hardware, together)
    outer = _of_a_step(lone, variant, FLAT["ring"], workers // together, whole / together, channels, narrow, 1)
    counted, _ = busiest(FLAT["ring"], together)
    wire = load(variant, counted[0], whole).sent / hardware["inside", "rate"]
    latency = 2 * (together - 1) * hardware["inside", "latency"]
    return outer.plus(Cost(wire + latency, {"wire": wire, "latency": latency}, "network", wire))


@lru_cache(maxsize=64)
def _one_of(hardware: Hardware, together: int) -> Hardware:
    """Return a worker's share of its node while all workers of the node communicate at once."""
    rate, cores = (hardware.figures[key].value / together for key in (("network", "rate"), ("node", "cores")))
    memory = hardware.figures["memory", "rate"].value / together
    return hardware.with_values(network_rate=rate, node_cores=max(1.0, cores), node_workers=1, memory_rate=memory)
