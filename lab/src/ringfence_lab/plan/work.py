"""The work of a worker in a schedule: its messages, the bytes that it seals, opens, adds and copies, and what each costs.

A `Variant` says how bytes are moved. All variants run the same schedules, so that the cost of sealing is a ratio of two
predictions that differ in nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from ringfence.collectives import ScheduleId, build
from ringfence.collectives.schedule import Action, Buffer, Place, Schedule, Step
from ringfence.link.segments import segment_bytes, segment_count
from ringfence.machines import Machines, spread
from ringfence_lab.plan.hardware import Hardware

_CACHE: Final = 2 << 20  # bytes that a core of the day has to itself; only fitted variants pay for memory beyond it
_LIKE_MORE: Final = 64  # workers: the mean of so many is that of more
ON_THE_WIRE: Final = 1514 / 1448  # a byte with its share of Ethernet's, IP's and TCP's headers, in frames of 1500 bytes


@dataclass(frozen=True)
class Variant:
    """How a variant moves bytes from worker to worker."""

    name: str
    what: str
    sealed: bool  #      encrypted and authenticated
    forwards: bool  #    ciphertext that is only passed on is not sealed again
    pipelined: bool  #   in segments, whose stages overlap; otherwise chunk by chunk
    framed: bool = False  # copied into frames where the sealed variant encrypts into them
    each_hop: bool = False  # a device's data is copied to the host for every hop, not once for the whole collective
    at_once: int = 1  #  collectives that run at the same time
    segment: int = 0  #  its own largest segment, of which a message has at least two; 0: as the runtime cuts them
    shares: bool = True  # workers of one machine exchange segments in memory that they share


VARIANTS: Final = {
    variant.name: variant
    for variant in (
        Variant("ringfence", "sealed, in segments, forwarded as it came", True, True, True, at_once=4),
        Variant("ringfence-unsealed", "the same, bytes copied where they would be sealed", False, True, True, True, at_once=4),
        Variant("plaintext", "the same schedules in the clear, nothing copied", False, True, True, at_once=4),
        Variant("gloo", "a plaintext ring, as Gloo does it", False, True, True, at_once=2, segment=1 << 20, shares=False),
        Variant("hop-by-hop", "chunks sealed whole for every hop", True, False, False, each_hop=True, shares=False),
    )
}  # fmt: skip


class StageCosts(NamedTuple):
    """Costs of one variant on one hardware: seconds, and seconds per byte."""

    message: float
    switch: float
    seal: float  #     what a sender does to a byte before it writes it: seal, copy into a frame, or nothing
    open: float
    send: float
    receive: float
    reduce: float
    copy: float
    idle: float = 0.0  # the share of its time that a thread waits for another
    cold: float = 0.0  # what memory beyond the cache costs more, as a share
    half: float = 1.0  # times `reduce`, for bfloat16
    staged: float = 0.0
    fresh: float = 0.0
    near_copy: float = 0.0  # to shared memory, or from it
    near_message: float = 0.0
    between: float = 1.0  # times `send` and `receive`, between machines

    def met(self, lost: float, narrow: bool) -> StageCosts:
        """Return the costs in a collective: this share of all bytes is no longer in the cache; `narrow` means bfloat16."""
        slower = 1 + self.cold * lost
        stages = {
            stage: getattr(self, stage) * slower
            for stage in ("seal", "open", "send", "receive", "reduce", "copy", "near_copy")
        }
        return self._replace(**{**stages, "reduce": stages["reduce"] * (self.half if narrow else 1.0)})


def fitted_figures(hardware: Hardware, variant: Variant) -> Mapping[str, float] | None:
    """Return what was fitted for a variant, or for ringfence if it was not measured: it runs in the same engine.

    Otherwise it would pay nothing for messages where the others pay what was fitted, and the difference would look like the
    cost of sealing.
    """
    return hardware.variants.get(variant.name) or hardware.variants.get("ringfence")


@lru_cache(maxsize=256)
def stage_costs(hardware: Hardware, variant: Variant) -> StageCosts:
    """Return the costs of the stages; where the variant was fitted on this hardware, in its proportion."""
    fitted = fitted_figures(hardware, variant)
    factor = fitted["factor"] if fitted else 1.0
    core = {name: hardware["core", name] * factor for name in ("seal", "open", "send", "receive", "reduce", "copy")}
    frame = core["copy"] if variant.framed else 0.0
    return StageCosts(
        message=fitted["message"] * 1e-6 if fitted else hardware["core", "message"],
        switch=fitted["switch"] * 1e-6 if fitted else hardware["core", "switch"],
        seal=core["seal"] if variant.sealed else frame,
        open=core["open"] if variant.sealed else frame,
        send=core["send"],
        receive=core["receive"],
        reduce=core["reduce"],
        copy=core["copy"],
        near_copy=hardware["inside", "copy"],
        near_message=hardware["inside", "message"],
        **{name: fitted[name] for name in ("idle", "cold", "half", "between") if fitted},
        **{name: fitted[name] * 1e-9 for name in ("staged", "fresh") if fitted},
    )


@lru_cache(maxsize=4096)
def segments(variant: Variant, length: float) -> tuple[float, int]:
    """Return the length of a message's segments, and their number."""
    if not variant.pipelined:
        return length, 1
    if variant.segment:
        count = max(2, math.ceil(length / variant.segment))
        return length / count, count
    whole = int(length)
    return min(length, segment_bytes(whole)), segment_count(whole)


def lost(variant: Variant, memory: float, piece: float) -> float:
    """Return the share of bytes that are no longer in the cache when they are used again.

    Of so much memory that is gone through again and again, all may find it lost; a piece that is handled whole is lost from one
    stage to the next as well.
    """
    again = max(0.0, 1 - _CACHE / memory) if memory else 0.0
    between = max(0.0, 1 - _CACHE / piece) if piece else 0.0
    return again if variant.pipelined else (again + between) / 2


class Task(NamedTuple):
    """What a worker does with a message, or beside it. `part` is its length as a share of the whole."""

    action: Action
    part: float
    seals: bool = False  # a SEND of what was not sealed before
    near: bool = False  #  the peer is on the same machine
    copies: bool = False  # a SEND to it of what is in no memory that both share yet


def share(schedule: Schedule, place: Place) -> float:
    """Return the length of a chunk as a share of the collective's bytes."""
    if place.buffer is Buffer.SCRATCH:
        return sum(share(schedule, each) for each in schedule.scratch[place.part : place.part + place.parts])
    if place.buffer is Buffer.DATA:
        return place.parts / max(1, schedule.parts(Buffer.DATA))
    if ScheduleId(schedule.identifier).name.startswith("REDUCE_") and "SCATTER" not in schedule.name.upper():
        return float(place.parts)  # a reduce to one root: INPUT and OUTPUT are the whole
    return place.parts / schedule.size


@lru_cache(maxsize=64)
def machines_of(size: int, per_machine: int) -> Machines:
    """Return which workers share a machine if each machine has so many, the last perhaps fewer."""
    return spread(rank // per_machine for rank in range(size)) if per_machine > 1 else ()


def tasks(schedule: Schedule, machine: Collection[int] = ()) -> Counter[Task]:
    """Count the tasks of a rank, by kind and length. `machine`: the ranks on its machine."""
    return Counter(step_tasks(schedule, machine))


def step_tasks(schedule: Schedule, machine: Collection[int] = ()) -> Iterator[Task]:
    """Yield the task of each step.

    A sum that is sent on inside a machine is written to shared memory at once, and what several workers read is copied once.
    """
    lengths = [share(schedule, place) for place in schedule.chunks]
    there: dict[int, bool] = {}  # chunk -> whether shared memory has it as it is now
    fused = _sent_on(schedule.steps) if machine else frozenset()
    for index, step in enumerate(schedule.steps):
        near, copies = step.peer in machine, False
        if step.action is not Action.SEND:
            there[step.chunk] = near and index in fused
        elif near:
            copies, there[step.chunk] = not there.get(step.chunk, False), True
        seals = step.action is Action.SEND and step.origin in (-1, schedule.rank) and not near
        yield Task(step.action, lengths[step.chunk], seals, near, copies)


def _sent_on(steps: Sequence[Step]) -> frozenset[int]:
    """Return the REDUCEs whose sum is sent once and then overwritten, so that it is written nowhere else."""
    found, after = set(), dict[int, list[Step]]()  # chunk -> the next two steps that touch it, the nearest first
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        following = after.get(step.chunk, [])
        if step.action is Action.REDUCE and len(following) == 2:
            sent, last = following
            overwritten = last.action in (Action.RECV, Action.REDUCE) and last.other != step.chunk
            if sent.action is Action.SEND and sent.origin < 0 and overwritten and last.chunk == step.chunk:
                found.add(index)
        for chunk in {step.chunk, step.other} - {-1}:
            after[chunk] = [step, *after.get(chunk, [])[:1]]
    return frozenset(found)


@lru_cache(maxsize=512)
def _tasks_of(identifier: ScheduleId, size: int, rank: int, per_machine: int, shared: bool) -> Mapping[Task, int]:
    """Return a rank's tasks. `shared`: the schedule knows of machines; others run the same one on them."""
    machines = machines_of(size, per_machine)
    # Called as `choose` calls it, so that one schedule is built once.
    schedule = build(identifier, size, rank, 0, False, True, machines if shared else ())
    return tasks(schedule, next((each for each in machines if rank in each), ()))


@lru_cache(maxsize=512)
def busiest(
    identifier: ScheduleId, size: int, per_machine: int = 0, shared: bool = True
) -> tuple[tuple[Mapping[Task, int], ...], bool]:
    """Return the tasks of the workers that determine a cost, and whether all workers do the same.

    In trees, the root, those next to it and the last have most to do, whatever the size.
    """
    some = sorted({0, 1, 2, 3, size // 2, size - 1, *range(min(per_machine, 8))})
    ranks = range(size) if size <= 16 else [rank for rank in some if rank < size]
    alike = identifier in SYMMETRIC
    chosen = _different(identifier, size, per_machine) if alike else ranks
    return tuple(_tasks_of(identifier, size, rank, per_machine, shared) for rank in chosen), alike


def usual(identifier: ScheduleId, size: int, per_machine: int = 0, shared: bool = True) -> Mapping[Task, float]:
    """Return the mean tasks of a worker, which determine the use of what the workers of a node share.

    Beyond 64 workers it is that of 64: a tree has as many edges as workers, less one, whatever its size.
    """
    return _mean(identifier, size if identifier in SYMMETRIC else min(size, _LIKE_MORE), per_machine, shared)


@lru_cache(maxsize=512)
def _mean(identifier: ScheduleId, size: int, per_machine: int, shared: bool) -> Mapping[Task, float]:
    ranks = _different(identifier, size, per_machine) if identifier in SYMMETRIC else dict.fromkeys(range(size), 1)
    counted: Counter[Task] = Counter()
    for rank, alike in ranks.items():
        for task, times in _tasks_of(identifier, size, rank, per_machine, shared).items():
            counted[task] += times * alike
    return {task: times / sum(ranks.values()) for task, times in counted.items()}


def _different(identifier: ScheduleId, size: int, per_machine: int) -> dict[int, int]:
    """Return ranks that do what the others of a symmetric schedule do, and how many of a machine do the same as each.

    In a ring over machines, the first and the last worker of a machine have a neighbour on another one.
    """
    here = min(size, per_machine)
    if here < 2 or identifier in _ALIKE_ON_MACHINES:
        return {0: 1}
    if identifier in _RINGS and here > 2:
        return {0: 1, 1: here - 2, here - 1: 1}
    return dict.fromkeys(range(min(here, _LIKE_MORE)), 1)


SYMMETRIC: Final = frozenset(
    {
        ScheduleId.ALL_REDUCE_RING,
        ScheduleId.REDUCE_SCATTER_RING,
        ScheduleId.REDUCE_SCATTER_BRUCK,
        ScheduleId.ALL_GATHER_RING,
        ScheduleId.ALL_GATHER_BRUCK,
        ScheduleId.ALL_TO_ALL_BRUCK,
        ScheduleId.ALL_TO_ALL_DIRECT,
        ScheduleId.ALL_REDUCE_DOUBLING,
        ScheduleId.BARRIER,
        ScheduleId.ALL_REDUCE_TWO_LEVELS,
        ScheduleId.REDUCE_SCATTER_TWO_LEVELS,
        ScheduleId.ALL_GATHER_TWO_LEVELS,
    }
)


_RINGS: Final = frozenset({ScheduleId.ALL_REDUCE_RING, ScheduleId.REDUCE_SCATTER_RING, ScheduleId.ALL_GATHER_RING})
_ALIKE_ON_MACHINES: Final = frozenset(
    {
        ScheduleId.ALL_TO_ALL_DIRECT,
        ScheduleId.ALL_REDUCE_TWO_LEVELS,
        ScheduleId.REDUCE_SCATTER_TWO_LEVELS,
        ScheduleId.ALL_GATHER_TWO_LEVELS,
    }
)

# Of schedules with two levels: how often a message goes round its machine, round all machines, and on to the others of its
# machine; and whether it is the whole tensor.
_TWO_LEVELS: Final = {
    ScheduleId.ALL_REDUCE_TWO_LEVELS: (1, 2, 1, False),
    ScheduleId.REDUCE_SCATTER_TWO_LEVELS: (1, 1, 0, False),
    ScheduleId.ALL_GATHER_TWO_LEVELS: (0, 1, 1, False),
    ScheduleId.BROADCAST_TWO_LEVELS: (0, 1, 1, True),
    ScheduleId.REDUCE_TWO_LEVELS: (1, 1, 0, True),
}


class Link(NamedTuple):
    """One message of the longest chain of messages that wait for each other."""

    part: float
    times: int
    by_segment: bool  # its segments may go on while others of it are still to come
    near: bool = False  # inside a machine


@lru_cache(maxsize=512)
def chain(identifier: ScheduleId, size: int, per_machine: int = 1) -> tuple[Link, ...]:
    """Return the longest chain of messages of a schedule, from its rule; a test compares it with the simulation.

    Of schedules with two levels only, the messages inside a machine are told apart.
    """
    if size < 2:
        return ()
    if identifier in _TWO_LEVELS:
        before, beyond, after, whole = _TWO_LEVELS[identifier]
        near, far = min(per_machine, size) - 1, -(-size // per_machine) - 1
        part = 1.0 if whole else 1 / size
        times = ((before * near, True), (beyond * far, False), (min(after, near), True))
        return tuple(Link(part, count, True, inside) for count, inside in times if count)
    rounds, levels = (size - 1).bit_length(), size.bit_length() - 1
    doubling = [(min(1 << turn, size - (1 << turn)) / size) for turn in range(rounds)]
    match identifier:
        case ScheduleId.ALL_REDUCE_RING:
            return (Link(1 / size, 2 * (size - 1), True),)
        case ScheduleId.REDUCE_SCATTER_RING | ScheduleId.ALL_GATHER_RING:
            return (Link(1 / size, size - 1, True),)
        case ScheduleId.ALL_REDUCE_DOUBLING:
            return (Link(1.0, levels + (2 if size > 1 << levels else 0), True),)
        case ScheduleId.ALL_REDUCE_TREE | ScheduleId.GROUP_OPENING:
            return (Link(1.0, 2 * levels, True),)
        case ScheduleId.REDUCE_TREE | ScheduleId.BROADCAST_TREE:
            return (Link(1.0, levels, True),)
        case ScheduleId.REDUCE_CHAIN | ScheduleId.BROADCAST_CHAIN:
            return (Link(1.0, size - 1, True),)
        case ScheduleId.REDUCE_BINOMIAL | ScheduleId.BROADCAST_BINOMIAL:
            return (Link(1.0, levels, True),)
        case ScheduleId.ALL_GATHER_BRUCK | ScheduleId.REDUCE_SCATTER_BRUCK:
            return tuple(Link(part, 1, False) for part in doubling)
        case ScheduleId.GATHER_BINOMIAL | ScheduleId.SCATTER_BINOMIAL:
            return tuple(Link(part, 1, False) for part in doubling)
        case ScheduleId.ALL_TO_ALL_BRUCK:
            moving = [sum(1 for i in range(size) if i & (1 << turn)) / size for turn in range(rounds)]
            return tuple(Link(part, 1, False) for part in moving)
        case ScheduleId.BARRIER:
            return (Link(0.0, rounds, True),)
        case _:
            return (Link(1 / size, 1, True),)  # direct exchanges: no message waits for another
