"""What the planner knows about the runtime's schedules: which one is executed, and what its workers do in it.

Tasks are counted in the schedules themselves (`ringfence.collectives.build`). The longest chain of messages and the shares of
a chain that are sealed anew, added or kept inside a machine are rules for each kind of schedule; tests compare them with a
simulation of every rank. All other modules of the planner ask here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from ringfence.collectives import Collective, ScheduleId, Thresholds, build, choose
from ringfence.collectives.schedule import Action, Buffer, Place, Schedule, Step
from ringfence.machines import Machines, spread

_LIKE_MORE: Final = 64  # workers: the mean of so many is that of more
RINGS: Final = (ScheduleId.ALL_REDUCE_RING, ScheduleId.REDUCE_SCATTER_RING, ScheduleId.ALL_GATHER_RING)
_ALIKE_ON_MACHINES: Final = (
    ScheduleId.ALL_TO_ALL_DIRECT,
    ScheduleId.ALL_REDUCE_TWO_LEVELS,
    ScheduleId.REDUCE_SCATTER_TWO_LEVELS,
    ScheduleId.ALL_GATHER_TWO_LEVELS,
    ScheduleId.ALL_TO_ALL_TWO_LEVELS,
)
TOGETHER: Final = (ScheduleId.ALL_REDUCE_HALVING, ScheduleId.REDUCE_SCATTER_HALVING, ScheduleId.ALL_GATHER_DOUBLING)
_APART: Final = (
    ScheduleId.ALL_REDUCE_HALVING_APART,
    ScheduleId.REDUCE_SCATTER_HALVING_APART,
    ScheduleId.ALL_GATHER_DOUBLING_APART,
)
SYMMETRIC: Final = frozenset(  # all workers do the same
    {
        *RINGS,
        *_ALIKE_ON_MACHINES,
        *_APART,
        ScheduleId.ALL_TO_ALL_BRUCK,
        ScheduleId.ALL_REDUCE_DOUBLING,
    }
)
# All workers do the same, but where a circle closes in the memory of a worker, it sends two messages in place of one.
_WRAPPED: Final = frozenset(
    {
        *TOGETHER,
        ScheduleId.ALL_REDUCE_TWO_LEVELS_HALVING,
        ScheduleId.REDUCE_SCATTER_TWO_LEVELS_HALVING,
        ScheduleId.ALL_GATHER_TWO_LEVELS_DOUBLING,
    }
)
# Of schedules with two levels: how often a message goes round its machine, round all machines, and on to the others of its
# machine; and whether it is the whole tensor.
_TWO_LEVELS: Final = {
    ScheduleId.ALL_REDUCE_TWO_LEVELS: (1, 2, 1, False),
    ScheduleId.REDUCE_SCATTER_TWO_LEVELS: (1, 1, 0, False),
    ScheduleId.ALL_GATHER_TWO_LEVELS: (0, 1, 1, False),
    ScheduleId.BROADCAST_TWO_LEVELS: (0, 1, 1, True),
}
# The same where machines halve and double what they have, and a message inside a machine is all that a worker has.
_TWO_LEVELS_HALVING: Final = {
    ScheduleId.ALL_REDUCE_TWO_LEVELS_HALVING: (1, 2, 1),
    ScheduleId.REDUCE_SCATTER_TWO_LEVELS_HALVING: (1, 1, 0),
    ScheduleId.ALL_GATHER_TWO_LEVELS_DOUBLING: (0, 1, 1),
}
GLOO: Final = {
    "all_reduce": ScheduleId.ALL_REDUCE_RING,
    "all_gather": ScheduleId.ALL_GATHER_RING,
    "reduce_scatter": ScheduleId.ALL_REDUCE_RING,  # torch's Gloo reduces a copy of everything, and keeps its part
    "broadcast": ScheduleId.BROADCAST_BINOMIAL,
    "all_to_all": ScheduleId.ALL_TO_ALL_DIRECT,
}
HOP_BY_HOP: Final = {  # each worker has two neighbours and no other peer
    **GLOO,
    "reduce_scatter": ScheduleId.REDUCE_SCATTER_RING,
    "broadcast": ScheduleId.BROADCAST_CHAIN,
}
STAGED: Final = ("all_gather", "reduce_scatter")  # for which torch's Gloo allocates a tensor in each call


def schedule_of(variant: str, operation: str, workers: int, size: int, per_machine: int = 0) -> ScheduleId:
    """Return the schedule of a collective of `size` bytes: ringfence's own table chooses, other variants have one.

    `per_machine`: how many workers share a machine.
    """
    if variant == "gloo":
        return GLOO[operation]
    if variant == "hop-by-hop":
        return HOP_BY_HOP[operation]
    machines = machines_of(workers, per_machine)
    return ScheduleId(
        choose(Collective[operation.upper()], workers, 0, 0, size, Thresholds(), machines=machines).identifier
    )


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
    chosen = _different(identifier, size, per_machine) if identifier in SYMMETRIC else ranks
    alike = identifier in SYMMETRIC or identifier in _WRAPPED
    return tuple(_tasks_of(identifier, size, rank, per_machine, shared) for rank in chosen), alike


def usual(identifier: ScheduleId, size: int, per_machine: int = 0, shared: bool = True) -> Mapping[Task, float]:
    """Return the mean tasks of a worker, which determine the use of what the workers of a node share.

    Beyond 64 workers it is that of 64: a tree has as many edges as workers, less one, whatever its size.
    """
    grows = identifier in SYMMETRIC or identifier in _WRAPPED
    return _mean(identifier, size if grows else min(size, _LIKE_MORE), per_machine, shared)


@lru_cache(maxsize=512)
def _mean(identifier: ScheduleId, size: int, per_machine: int, shared: bool) -> Mapping[Task, float]:
    step = max(1, size // _LIKE_MORE)  # more than one of schedules only that are alike for all
    step += step > 1 and per_machine > 1  # not always the same worker of a machine
    alike = identifier in SYMMETRIC
    ranks = _different(identifier, size, per_machine) if alike else dict.fromkeys(range(0, size, step), 1)
    counted: Counter[Task] = Counter()
    for rank, others in ranks.items():
        for task, times in _tasks_of(identifier, size, rank, per_machine, shared).items():
            counted[task] += times * others
    return {task: times / sum(ranks.values()) for task, times in counted.items()}


def _different(identifier: ScheduleId, size: int, per_machine: int) -> dict[int, int]:
    """Return ranks that do what the others of a symmetric schedule do, and how many of a machine do the same as each.

    In a ring over machines, the first and the last worker of a machine have a neighbour on another one.
    """
    here = min(size, per_machine)
    if here < 2 or identifier in _ALIKE_ON_MACHINES:
        return {0: 1}
    if identifier in RINGS and here > 2:
        return {0: 1, 1: here - 2, here - 1: 1}
    return dict.fromkeys(range(min(here, _LIKE_MORE)), 1)


class ChainMessage(NamedTuple):
    """One message of the longest chain of messages that wait for each other."""

    part: float
    times: int
    by_segment: bool  # its segments may go on while others of it are still to come
    near: bool = False  # inside a machine


@lru_cache(maxsize=512)
def chain(identifier: ScheduleId, size: int, per_machine: int = 1) -> tuple[ChainMessage, ...]:
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
        return tuple(ChainMessage(part, count, True, inside) for count, inside in times if count)
    if identifier in _TWO_LEVELS_HALVING:
        before, beyond, after = _TWO_LEVELS_HALVING[identifier]
        near, far = min(per_machine, size) - 1, -(-size // per_machine)
        inside = 1 / (near + 1)
        return (
            *([ChainMessage(inside, before * near, True, True)] if before * near else ()),
            *(ChainMessage(inside * part, beyond, False) for part in _in_turn(far)),
            *([ChainMessage(inside, after, True, True)] if after and near else ()),
        )
    if identifier is ScheduleId.ALL_TO_ALL_TWO_LEVELS:
        here = min(per_machine, size)
        messages = (ChainMessage(1 / here, here - 1, False, True), ChainMessage(here / size, size // here - 1, False))
        return tuple(each._replace(times=1) for each in messages if each.times)
    rounds, levels = (size - 1).bit_length(), size.bit_length() - 1
    both = 2 if identifier.name.startswith("ALL_REDUCE") else 1
    if identifier in TOGETHER:
        return tuple(ChainMessage(part, both, False) for part in _in_turn(size))
    if identifier in _APART:
        return (ChainMessage(1 / size, both * len(_in_turn(size)), True),)
    match identifier:
        case ScheduleId.ALL_REDUCE_RING:
            return (ChainMessage(1 / size, 2 * (size - 1), True),)
        case ScheduleId.REDUCE_SCATTER_RING | ScheduleId.ALL_GATHER_RING:
            return (ChainMessage(1 / size, size - 1, True),)
        case ScheduleId.ALL_REDUCE_DOUBLING:
            return (ChainMessage(1.0, levels + (2 if size > 1 << levels else 0), True),)
        case ScheduleId.BROADCAST_TREE | ScheduleId.BROADCAST_BINOMIAL:
            return (ChainMessage(1.0, levels, True),)
        case ScheduleId.BROADCAST_CHAIN:
            return (ChainMessage(1.0, size - 1, True),)
        case ScheduleId.ALL_TO_ALL_BRUCK:
            moving = [sum(1 for i in range(size) if i & (1 << turn)) / size for turn in range(rounds)]
            return tuple(ChainMessage(part, 1, False) for part in moving)
        case _:
            return (ChainMessage(1 / size, 1, True),)  # direct exchanges: no message waits for another


def _doubled(size: int) -> list[float]:
    """The shares of the whole that move in each round in which distances double."""
    return [min(1 << turn, size - (1 << turn)) / size for turn in range((size - 1).bit_length())]


def _in_turn(size: int) -> list[float]:
    """Those of the rounds that wait for each other: the one with the workers beyond a power of two may wait for none."""
    beyond = size - (1 << (size - 1).bit_length() >> 1)
    parts = _doubled(size)
    return parts if 1 + (beyond - 1).bit_length() >= len(parts) else parts[:-1]


def near_share(identifier: ScheduleId, size: int, machine: int) -> float:
    """Return the share of a chain's messages that stay inside a machine; where distances double, those of the short ones."""
    if identifier.name.endswith(("_BINOMIAL", "_DOUBLING", "_BRUCK")) or identifier in (*TOGETHER, *_APART):
        return (machine - 1).bit_length() / (size - 1).bit_length()
    sent = [
        (task.near, times) for task, times in usual(identifier, size, machine).items() if task.action is Action.SEND
    ]
    return sum(times for near, times in sent if near) / sum(times for _, times in sent)


def chain_shares(identifier: ScheduleId, forwards: bool, size: int) -> tuple[float, float]:
    """Return the shares of a chain's messages that are sealed anew and that are added to other data."""
    name = identifier.name
    if identifier is ScheduleId.ALL_REDUCE_DOUBLING:
        return 1.0, 1.0
    passed_on = forwards and size > 2 and identifier not in (*TOGETHER, *_TWO_LEVELS_HALVING)
    if name.startswith("ALL_REDUCE_"):
        return (0.5 if passed_on else 1.0), 0.5
    forwarded = identifier in (
        ScheduleId.ALL_GATHER_RING,
        ScheduleId.ALL_GATHER_DOUBLING_APART,
        ScheduleId.BROADCAST_CHAIN,
        ScheduleId.BROADCAST_TREE,
    )
    return (0.0 if passed_on and forwarded else 1.0), float("REDUCE" in name)


def copied(identifier: ScheduleId, size: int, whole: float) -> tuple[float, float]:
    """Return the bytes that a worker copies from its device and to it, in a collective of `whole` bytes."""
    if identifier.name.startswith("ALL_GATHER"):
        return whole / size, whole
    return whole, whole / size if identifier.name.startswith("REDUCE_SCATTER") else whole
