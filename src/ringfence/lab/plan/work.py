"""The work of a worker in a schedule: its messages, the bytes that it seals, opens, adds and copies, and what each costs.

A `Variant` says how bytes are moved. All variants run the same schedules, so that the cost of sealing is a ratio of two
predictions that differ in nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from ringfence.collectives import ScheduleId, build
from ringfence.collectives.schedule import Action, Buffer, Place, Schedule
from ringfence.lab.plan.hardware import Hardware
from ringfence.link.segments import segment_bytes, segment_count

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


VARIANTS: Final = {
    variant.name: variant
    for variant in (
        Variant("ringfence", "sealed, in segments, forwarded as it came", True, True, True, at_once=4),
        Variant("ringfence-unsealed", "the same, bytes copied where they would be sealed", False, True, True, True, at_once=4),
        Variant("plaintext", "the same schedules in the clear, nothing copied", False, True, True, at_once=4),
        Variant("gloo", "a plaintext ring, as Gloo does it", False, True, True, at_once=2, segment=1 << 20),
        Variant("hop-by-hop", "every chunk sealed whole for every hop, nothing overlapped", True, False, False, each_hop=True),
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

    def met(self, lost: float, narrow: bool) -> StageCosts:
        """Return the costs in a collective: this share of all bytes is no longer in the cache; `narrow` means bfloat16."""
        slower = 1 + self.cold * lost
        stages = {
            stage: getattr(self, stage) * slower for stage in ("seal", "open", "send", "receive", "reduce", "copy")
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
        **{name: fitted[name] for name in ("idle", "cold", "half") if fitted},
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


def share(schedule: Schedule, place: Place) -> float:
    """Return the length of a chunk as a share of the collective's bytes."""
    if place.buffer is Buffer.SCRATCH:
        return sum(share(schedule, each) for each in schedule.scratch[place.part : place.part + place.parts])
    if place.buffer is Buffer.DATA:
        return place.parts / max(1, schedule.parts(Buffer.DATA))
    if ScheduleId(schedule.identifier).name.startswith("REDUCE_") and "SCATTER" not in schedule.name.upper():
        return float(place.parts)  # a reduce to one root: INPUT and OUTPUT are the whole
    return place.parts / schedule.size


def tasks(schedule: Schedule) -> Counter[Task]:
    """Count the tasks of a rank, by kind and length."""
    lengths = [share(schedule, place) for place in schedule.chunks]
    found: Counter[Task] = Counter()
    for step in schedule.steps:
        seals = step.action is Action.SEND and step.origin in (-1, schedule.rank)
        found[Task(step.action, lengths[step.chunk], seals)] += 1
    return found


@lru_cache(maxsize=512)
def busiest(identifier: ScheduleId, size: int) -> tuple[tuple[Counter[Task], ...], bool]:
    """Return the tasks of the workers that determine a cost, and whether all workers do the same.

    Rings, Bruck's and the doubling schedules of a power of two are alike for all. In trees, the root, those next to it and the
    last have most to do, whatever the size.
    """
    ranks = range(size) if size <= 16 else sorted({0, 1, 2, 3, size // 2, size - 1})
    alike = identifier in SYMMETRIC
    chosen = [0] if alike else ranks
    # Called as `choose` calls it, so that one schedule is built once.
    return tuple(tasks(build(identifier, size, rank, 0, False, True)) for rank in chosen), alike


def usual(identifier: ScheduleId, size: int) -> Mapping[Task, float]:
    """Return the mean tasks of a worker, which determine the use of what the workers of a node share.

    Beyond 64 workers it is that of 64: a tree has as many edges as workers, less one, whatever its size.
    """
    return _mean(identifier, size if identifier in SYMMETRIC else min(size, _LIKE_MORE))


@lru_cache(maxsize=512)
def _mean(identifier: ScheduleId, size: int) -> Mapping[Task, float]:
    counted: Counter[Task] = Counter()
    ranks = 1 if identifier in SYMMETRIC else size
    for rank in range(ranks):
        counted += tasks(build(identifier, size, rank, 0, False, True))
    return {task: times / ranks for task, times in counted.items()}


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
    }
)


class Link(NamedTuple):
    """One message of the longest chain of messages that wait for each other."""

    part: float
    times: int
    by_segment: bool  # its segments may go on while others of it are still to come


@lru_cache(maxsize=512)
def chain(identifier: ScheduleId, size: int) -> tuple[Link, ...]:
    """Return the longest chain of messages of a schedule, from its rule; a test compares it with the simulation."""
    if size < 2:
        return ()
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
