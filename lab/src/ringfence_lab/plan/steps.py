"""The cost of a training step: computing, its collectives, and how much of the one hides the other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Final

from ringfence.collectives import ScheduleId
from ringfence.config.cores import default_channels
from ringfence_lab.plan import fsdp, nccl
from ringfence_lab.plan.cost import collective_cost, shared_by, staging
from ringfence_lab.plan.hardware import Hardware
from ringfence_lab.plan.models import Model
from ringfence_lab.plan.schedules import STAGED, schedule_of
from ringfence_lab.plan.traces import Trace, trace
from ringfence_lab.plan.work import CLEAR, FREE, Cost, Variant, fitted_figures

# Times the rate of one channel, measured on 2 cores (docs/guides/channels.md), by channels: while the caller waits, as in a
# backward pass with DDP, and while it is busy in Python, as FSDP's hooks are. More than two were not measured.
CHANNELS: Final = {"ddp": {1: 1.0, 2: 1.46}, "fsdp": {1: 1.0, 2: 1.27}}
STRATEGIES: Final = tuple(CHANNELS)
_EVERYTHING: Final = 1 << 62  # a trace that is not cut


@dataclass(frozen=True)
class Question:
    """A training setting whose cost is to be predicted."""

    model: Model
    workers: int
    cap_mib: float | None = None
    bytes_each: int = 4
    samples: int = 8  #       of the training data, for each worker and step
    ring: bool = False  #     whether DDP's all-reduces are rings, not what the runtime chooses
    channels: int | None = None  # of a link between machines, at most two, if not as the runtime chooses
    every: int = 1  #         synchronise once in so many steps
    wire_bytes: int = 4  #    of an element on the wire; buckets are cut by `bytes_each`
    compute_seconds: float | None = None  # what a step costs without communication, if known
    strategy: str = "ddp"  #  or fsdp
    blocks: int = 1  #        of the model that form one unit of FSDP
    reshard: bool = True  #   FSDP frees parameters after the forward pass, and gathers them again
    per_machine: int | None = None  # workers that share a machine's memory, if not as the hardware says


@dataclass(frozen=True)
class StepCost:
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


def step(hardware: Hardware, variant: Variant, question: Question) -> StepCost:
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


def replayed(hardware: Hardware, variant: Variant, made: Trace, question: Question) -> StepCost:
    """Return the cost of a trace."""
    shrunk, narrow = question.wire_bytes / question.bytes_each, question.wire_bytes == 2
    around = (_threads(hardware, variant, question), narrow, question.per_machine, question.ring)
    counted = Counter(size for size, _ in made.steps)
    costs = {
        size: collective(hardware, variant, "all_reduce", question.workers, size * shrunk, *around) for size in counted
    }
    total = FREE
    for size, times in counted.items():
        total = total.plus(costs[size].times(times))
    compute = made.compute_seconds
    if question.every > 1:  # nothing to hide behind: the step's end is waited for, once in `every` steps
        return StepCost(compute + total.seconds / question.every, compute, total, len(made.steps))
    first = compute if copies_block(hardware, variant) else 0.0
    ready = [max(first, at) for at in accumulate(seconds for _, seconds in made.steps)]
    found = [(at, max(at, compute), costs[size]) for at, (size, _) in zip(ready, made.steps, strict=True)]
    finished = compute + waited(variant, found)
    return overlapped(
        hardware, variant, StepCost(finished, compute, total, len(made.steps)), question.workers, made.busy
    )


def copies_block(hardware: Hardware, variant: Variant) -> bool:
    """Return whether nothing is hidden behind computing: a confidential mode in which it stands still during copies.

    Collectives still overlap each other: while one is on the network, the next one is copied.
    """
    confidential = bool(hardware["device", "copy_rate"]) and not hardware["device", "computing"]
    return confidential and variant.name not in CLEAR


def channels_of(hardware: Hardware, question: Question) -> int:
    """Return the channels of a link between machines: as asked, or as the runtime chooses. One if workers share a machine."""
    cores, mbit = int(hardware["node", "cores"]), int(hardware.figures["network", "rate"].value * 1000)
    return question.channels or (1 if hardware["node", "workers"] > 1 else default_channels(cores, 1, mbit))


def _threads(hardware: Hardware, variant: Variant, question: Question) -> float:
    """Return a worker's threads, times the rate of one; only ringfence's engine has channels."""
    alone = variant.name in ("gloo", "hop-by-hop")
    return 1.0 if alone else CHANNELS[question.strategy][channels_of(hardware, question)]


def _sharded(hardware: Hardware, variant: Variant, question: Question, compute: float, busy: bool) -> StepCost:
    """Return the cost of a step with FSDP. Parameters and gradients are sent with `wire_bytes` per element."""
    found = fsdp.units(question.model, question.blocks)
    width, threads = question.wire_bytes, _threads(hardware, variant, question)
    gathers, scatters = (
        [
            collective(hardware, variant, operation, question.workers, unit.elements * width, threads, narrow)
            for unit in found
        ]
        for operation, narrow in (("all_gather", False), ("reduce_scatter", width == 2))
    )
    finished, collectives = fsdp.timeline(found, gathers, scatters, compute, question.reshard)
    total = FREE
    for each in collectives:
        total = total.plus(each)
    if copies_block(hardware, variant):
        finished = compute + total.seconds
    made = StepCost(finished, compute, total, len(collectives), of_buckets=False)
    return overlapped(hardware, variant, made, question.workers, busy)


def waited(variant: Variant, found: Sequence[tuple[float, float, Cost]]) -> float:
    """Return how long computing stands still: collectives run beside it, in order, until their results are needed.

    Of each collective: when it is ready and when it is needed, in seconds of computing, and its cost.
    """
    moments = sorted(
        [(ready, 0, index) for index, (ready, _, _) in enumerate(found)]
        + [(needed, 1, index) for index, (_, needed, _) in enumerate(found)]
    )
    late = free = 0.0
    ends: dict[int, float] = {}
    order: list[float] = []
    for at, is_wait, index in moments:
        if is_wait:
            late += max(0.0, ends[index] - (at + late))
            continue
        cost = found[index][2]
        begin = max(at + late, free, order[-variant.at_once] if len(order) >= variant.at_once else 0.0)
        free = begin + cost.work
        ends[index] = max(begin + cost.seconds, order[-1] if order else 0.0)
        order.append(ends[index])
    return late


def overlapped(hardware: Hardware, variant: Variant, made: StepCost, workers: int, busy: bool) -> StepCost:
    """Return the step with what the hardware makes of its overlap. Its seconds are those of full overlap before.

    Computing that takes the cores (`busy`) shares them with communication: their core seconds add up. A calibrated machine
    has a fitted factor for what is left.
    """
    fitted = fitted_figures(hardware, variant)
    if not busy:
        return replace(made, seconds=made.compute + made.exposed * (fitted["tail"] if fitted else 1.0))
    together = min(workers, max(1, int(hardware["node", "workers"])))
    cores = max(1.0, hardware["node", "cores"])
    computing = made.compute * min(1.0, cores / together) * together  # core seconds of the node
    talking = made.communication.cpu * together * (fitted["beside"] if fitted else 1.0)
    return replace(made, seconds=max(made.seconds, (computing + talking) / cores))


@lru_cache(maxsize=4096)
def collective(
    hardware: Hardware,
    variant: Variant,
    operation: str,
    workers: int,
    whole: float,
    threads: float = 1.0,
    narrow: bool = False,
    per_machine: int | None = None,
    ring: bool = False,
) -> Cost:
    """Return the cost of one collective of `whole` bytes in a step: others run at the same time, and the caches are cold.

    `per_machine`: how many workers share a machine's memory, if not as the hardware says. `ring`: an all-reduce is one,
    whatever the variant would choose.
    """
    if workers < 2:
        return FREE
    if variant.name == "nccl":
        return nccl.collective_cost(hardware, operation, workers, whole)
    shared = shared_by(hardware) if per_machine is None else per_machine
    chosen = schedule_of(variant.name, operation, workers, int(whole), shared)
    identifier = ScheduleId.ALL_REDUCE_RING if ring else chosen
    found = collective_cost(
        hardware, variant, identifier, workers, whole, threads, None, variant.at_once, math.inf, narrow, shared
    )
    if variant.name == "gloo" and operation in STAGED:
        found = found.plus(staging(hardware, variant, workers, whole, max(1, int(hardware["node", "workers"]))))
    return found
