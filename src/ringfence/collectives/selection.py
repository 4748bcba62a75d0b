"""Selection of the schedule for a collective: the public interface of this package.

The choice depends only on values that all ranks share: the collective, the group's size, the root, the bytes, and, from the
roster, the table of thresholds and which workers are listed at one address. `bytes_` is the total size of a collective:

    ALL_REDUCE, REDUCE, BROADCAST   the tensor
    ALL_GATHER                      all parts of OUTPUT
    REDUCE_SCATTER                  all parts of INPUT
    GATHER, SCATTER, ALL_TO_ALL     one part, times the group's size (of an uneven ALL_TO_ALL: ignored)
    BARRIER, GROUP_OPENING          ignored
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from enum import IntEnum
from functools import lru_cache
from typing import Final, NamedTuple

from ringfence.collectives import bruck, direct, doubling, halving, ring, scatter_gather, tree, two_levels
from ringfence.collectives.builder import HOP, Builder, rounds
from ringfence.collectives.passes import PASS_BYTES, PASSES_AT_ONCE, Passes, passes
from ringfence.collectives.schedule import Collective, Schedule
from ringfence.errors import ProtocolError
from ringfence.keys import CHANNEL_LIMIT
from ringfence.machines import Machines, are_even

KIB: Final = 1024


class ScheduleId(IntEnum):
    """Identifiers on the wire, in every call's description. A number is never reused: 3, 5 and 7 were others."""

    ALL_REDUCE_RING = 1
    ALL_REDUCE_DOUBLING = 2
    REDUCE_SCATTER_RING = 4
    ALL_GATHER_RING = 6
    BROADCAST_BINOMIAL = 8
    BROADCAST_CHAIN = 9
    BROADCAST_TREE = 10
    REDUCE_BINOMIAL = 11
    REDUCE_CHAIN = 12
    REDUCE_TREE = 13
    GATHER_BINOMIAL = 14
    GATHER_DIRECT = 15
    SCATTER_BINOMIAL = 16
    SCATTER_DIRECT = 17
    ALL_TO_ALL_BRUCK = 18
    ALL_TO_ALL_DIRECT = 19
    BARRIER = 20
    GROUP_OPENING = 21
    ALL_REDUCE_TWO_LEVELS = 22
    REDUCE_SCATTER_TWO_LEVELS = 23
    ALL_GATHER_TWO_LEVELS = 24
    BROADCAST_TWO_LEVELS = 25
    REDUCE_TWO_LEVELS = 26
    ALL_REDUCE_HALVING = 27
    ALL_REDUCE_HALVING_APART = 28
    REDUCE_SCATTER_HALVING = 29
    REDUCE_SCATTER_HALVING_APART = 30
    ALL_GATHER_DOUBLING = 31
    ALL_GATHER_DOUBLING_APART = 32
    ALL_REDUCE_TWO_LEVELS_HALVING = 33
    REDUCE_SCATTER_TWO_LEVELS_HALVING = 34
    ALL_GATHER_TWO_LEVELS_DOUBLING = 35
    ALL_TO_ALL_TWO_LEVELS = 36


_BUILDERS: Final[dict[ScheduleId, Callable[[Builder], None]]] = {
    ScheduleId.ALL_REDUCE_RING: ring.all_reduce,
    ScheduleId.ALL_REDUCE_DOUBLING: doubling.all_reduce,
    ScheduleId.REDUCE_SCATTER_RING: ring.reduce_scatter,
    ScheduleId.ALL_GATHER_RING: ring.all_gather,
    ScheduleId.BROADCAST_BINOMIAL: tree.broadcast_binomial,
    ScheduleId.BROADCAST_CHAIN: tree.broadcast_chain,
    ScheduleId.BROADCAST_TREE: tree.broadcast_tree,
    ScheduleId.REDUCE_BINOMIAL: tree.reduce_binomial,
    ScheduleId.REDUCE_CHAIN: tree.reduce_chain,
    ScheduleId.REDUCE_TREE: tree.reduce_tree,
    ScheduleId.GATHER_BINOMIAL: scatter_gather.gather,
    ScheduleId.GATHER_DIRECT: direct.gather,
    ScheduleId.SCATTER_BINOMIAL: scatter_gather.scatter,
    ScheduleId.SCATTER_DIRECT: direct.scatter,
    ScheduleId.ALL_TO_ALL_BRUCK: bruck.all_to_all,
    ScheduleId.ALL_TO_ALL_DIRECT: direct.all_to_all,
    ScheduleId.BARRIER: doubling.barrier,
    ScheduleId.GROUP_OPENING: tree.group_opening,
    ScheduleId.ALL_REDUCE_TWO_LEVELS: two_levels.all_reduce,
    ScheduleId.REDUCE_SCATTER_TWO_LEVELS: two_levels.reduce_scatter,
    ScheduleId.ALL_GATHER_TWO_LEVELS: two_levels.all_gather,
    ScheduleId.BROADCAST_TWO_LEVELS: two_levels.broadcast,
    ScheduleId.REDUCE_TWO_LEVELS: two_levels.reduce,
    ScheduleId.ALL_REDUCE_HALVING: halving.all_reduce,
    ScheduleId.ALL_REDUCE_HALVING_APART: halving.all_reduce_apart,
    ScheduleId.REDUCE_SCATTER_HALVING: halving.reduce_scatter,
    ScheduleId.REDUCE_SCATTER_HALVING_APART: halving.reduce_scatter_apart,
    ScheduleId.ALL_GATHER_DOUBLING: halving.all_gather,
    ScheduleId.ALL_GATHER_DOUBLING_APART: halving.all_gather_apart,
    ScheduleId.ALL_REDUCE_TWO_LEVELS_HALVING: two_levels.all_reduce_halving,
    ScheduleId.REDUCE_SCATTER_TWO_LEVELS_HALVING: two_levels.reduce_scatter_halving,
    ScheduleId.ALL_GATHER_TWO_LEVELS_DOUBLING: two_levels.all_gather_doubling,
    ScheduleId.ALL_TO_ALL_TWO_LEVELS: two_levels.all_to_all,
}


class _Circles(NamedTuple):
    """The schedules of a collective whose workers are in a circle, or machines with as many workers each."""

    ring: ScheduleId
    together: ScheduleId  # small parts in one message
    apart: ScheduleId
    few_machines: ScheduleId
    many_machines: ScheduleId


_CIRCLES: Final = {
    Collective.ALL_REDUCE: _Circles(
        ScheduleId.ALL_REDUCE_RING,
        ScheduleId.ALL_REDUCE_HALVING,
        ScheduleId.ALL_REDUCE_HALVING_APART,
        ScheduleId.ALL_REDUCE_TWO_LEVELS,
        ScheduleId.ALL_REDUCE_TWO_LEVELS_HALVING,
    ),
    Collective.REDUCE_SCATTER: _Circles(
        ScheduleId.REDUCE_SCATTER_RING,
        ScheduleId.REDUCE_SCATTER_HALVING,
        ScheduleId.REDUCE_SCATTER_HALVING_APART,
        ScheduleId.REDUCE_SCATTER_TWO_LEVELS,
        ScheduleId.REDUCE_SCATTER_TWO_LEVELS_HALVING,
    ),
    Collective.ALL_GATHER: _Circles(
        ScheduleId.ALL_GATHER_RING,
        ScheduleId.ALL_GATHER_DOUBLING,
        ScheduleId.ALL_GATHER_DOUBLING_APART,
        ScheduleId.ALL_GATHER_TWO_LEVELS,
        ScheduleId.ALL_GATHER_TWO_LEVELS_DOUBLING,
    ),
}


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds, equal on every worker of a session because they are distributed with the roster."""

    small: int = 512 * KIB  #         total size up to which fewer messages matter more than fewer bytes
    ring_group: int = 7  #            largest circle, of workers or of machines, that uses a ring and its O(P) rounds
    apart_bytes: int = 512 * KIB  #   part from which it is a message of its own: at least 128 KiB for each segment
    chain_slice: int = 128 * KIB  #   total size over group size from which a chain is worth its depth
    chain_group: int = 64  #          largest group that uses a chain
    direct_group: int = 16  #         largest group in which gather's root has a link to every rank for small parts too
    direct_part: int = 1024 * KIB  #  part from which it does in any group
    bruck_group: int = 16  #          smallest group in which all-to-all uses Bruck's algorithm,
    bruck_part: int = 4 * KIB  #      and largest part for which it does
    bundle_part: int = 128 * KIB  #   largest part of which a machine's are sent together
    channels: int = 1  #              connections and threads of a link between machines
    channel_bytes: int = 2048 * KIB  # largest part for which one of them is used

    def to_bytes(self) -> bytes:
        return _LAYOUT.pack(_TABLE_VERSION, *astuple(self))

    @classmethod
    def from_bytes(cls, encoded: bytes) -> Thresholds:
        if len(encoded) != _LAYOUT.size:
            raise ProtocolError(f"a schedule table has {_LAYOUT.size} bytes, this one has {len(encoded)}")
        version, *thresholds = _LAYOUT.unpack(encoded)
        if version != _TABLE_VERSION:
            raise ProtocolError(f"schedule table of version {version}; this worker supports {_TABLE_VERSION}")
        table = cls(*thresholds)
        if not 1 <= table.channels <= CHANNEL_LIMIT:
            raise ProtocolError(f"a schedule table with {table.channels} channels; a link has 1 to {CHANNEL_LIMIT}")
        return table


_TABLE_VERSION: Final = 4
_LAYOUT: Final = struct.Struct(f">B{len(fields(Thresholds))}Q")


def choose(
    kind: Collective,
    size: int,
    rank: int,
    root: int,
    bytes_: int,
    table: Thresholds,
    *,
    average: bool = False,
    even: bool = True,
    adjacent: bool = True,
    machines: Machines = (),
) -> Schedule:
    """Return this rank's schedule. `root` is 0 for collectives without one.

    `machines`: which members share a machine, where nothing is sealed.

    `even`: all parts have the same length. For an all-to-all this must hold on every rank, because it decides the
    schedule; for a reduce-scatter it only saves scratch; other collectives ignore it.

    `adjacent`: the parts of this rank's tensors follow each other in memory, so that nothing is copied to send several. It
    changes no message.
    """
    if kind in _CIRCLES and not _is_small(kind, size, bytes_, table):
        chosen = _circle(kind, size, bytes_, table, machines)
    else:
        chosen = _CHOICES[kind](size, bytes_, table, even)
        chosen = _ON_MACHINES.get(chosen, chosen) if machines else chosen
        if kind is Collective.ALL_TO_ALL and even and _is_bundled(size, bytes_, table, machines):
            chosen = ScheduleId.ALL_TO_ALL_TWO_LEVELS
    return build(chosen, size, rank, root, average, even, machines, adjacent)


def chooser(size: int, rank: int, table: Thresholds, machines: Machines) -> Callable[..., tuple[Schedule, Passes]]:
    """Return what chooses schedule and passes of a group's calls, and remembers them: training repeats a few calls."""

    @lru_cache(maxsize=512)
    def choice(
        kind: Collective, root: int, bytes_: int, longest: int, average: bool, even: bool, whole: bool, staged: bool
    ) -> tuple[Schedule, Passes]:
        """`whole`: each buffer is one tensor, whose parts follow each other in one pass. If `staged`, they do in every pass."""
        found = divide(kind, size, longest, table, machines)
        adjacent = even if staged else whole and found.number == 1
        return choose(
            *(kind, size, rank, root, bytes_, table), average=average, even=even, adjacent=adjacent, machines=machines
        ), found

    return choice


# What large tensors with a root use if members share machines. In shared memory one copy serves all that read it.
_ON_MACHINES: Final = {
    ScheduleId.BROADCAST_CHAIN: ScheduleId.BROADCAST_TWO_LEVELS,
    ScheduleId.REDUCE_CHAIN: ScheduleId.REDUCE_TWO_LEVELS,
}


@lru_cache(maxsize=512)
def build(
    identifier: ScheduleId,
    size: int,
    rank: int,
    root: int = 0,
    average: bool = False,
    even: bool = True,
    machines: Machines = (),
    adjacent: bool = True,
) -> Schedule:
    """Build one schedule by its identifier, whether or not the table would select it."""
    if not (0 <= rank < size and 0 <= root < size):
        raise ValueError(f"rank {rank} or root {root} is not in a group of {size}")
    builder = Builder(rank, size, root, average, even, adjacent, machines)
    _BUILDERS[identifier](builder)
    schedule = builder.finish(identifier.name.lower(), int(identifier))
    if len(machines) != 1:
        return schedule
    return replace(schedule, steps=tuple(step._replace(origin=HOP) for step in schedule.steps))  # nothing is sealed


def _is_small(kind: Collective, size: int, bytes_: int, table: Thresholds) -> bool:
    """Whether fewer messages matter more than fewer bytes.

    An all-reduce by doubling sends everything in each of its R rounds, where halving sends it twice in 2 R: with more
    rounds it is worth its bytes for smaller tensors only.
    """
    turns = rounds(size)
    if kind is Collective.ALL_REDUCE and turns > 3:
        return 3 * (turns - 2) * bytes_ <= turns * table.small
    return bytes_ <= table.small


def _is_bundled(size: int, bytes_: int, table: Thresholds, machines: Machines) -> bool:
    """Whether all that a machine has for a worker of another one becomes one message, in an even all-to-all of a large group.

    The parts are copied on the way, so not if they are large. Among many machines Bruck's algorithm has fewer messages, for
    parts so small that their number is what matters.
    """
    if size < table.bruck_group or len(machines) < 2 or not are_even(machines):
        return False
    fits = bytes_ <= min(PASSES_AT_ONCE * PASS_BYTES, table.bundle_part * size)
    return fits and (len(machines) < table.bruck_group or bytes_ > table.bruck_part * size)


def _circle(kind: Collective, size: int, bytes_: int, table: Thresholds, machines: Machines) -> ScheduleId:
    found = _CIRCLES[kind]
    if are_even(machines):
        return found.few_machines if len(machines) <= table.ring_group else found.many_machines
    if size <= table.ring_group:
        return found.ring
    return found.apart if _part_bytes(kind, size, bytes_, table, machines) >= table.apart_bytes else found.together


def _part_bytes(kind: Collective, size: int, bytes_: int, table: Thresholds, machines: Machines) -> int:
    """The bytes of a worker's part in one pass."""
    whole = kind is Collective.ALL_REDUCE
    each = divide(kind, size, bytes_ if whole else bytes_ // size, table, machines).each
    return each // size if whole else each


def divide(kind: Collective, size: int, longest: int, table: Thresholds, machines: Machines = ()) -> Passes:
    """Return the passes of a collective; `longest` is the bytes of its tensor, or of its longest part."""
    return passes(kind, size, longest, 1 if machines or size == 1 else table.channels, table.channel_bytes)


def _all_reduce(size: int, bytes_: int, table: Thresholds, even: bool) -> ScheduleId:
    return ScheduleId.ALL_REDUCE_DOUBLING


def _reduce(size: int, bytes_: int, table: Thresholds, even: bool) -> ScheduleId:
    if bytes_ <= table.small or size == 2:
        return ScheduleId.REDUCE_BINOMIAL
    return ScheduleId.REDUCE_CHAIN if _use_chain(size, bytes_, table) else ScheduleId.REDUCE_TREE


def _broadcast(size: int, bytes_: int, table: Thresholds, even: bool) -> ScheduleId:
    if bytes_ <= table.small or size == 2:
        return ScheduleId.BROADCAST_BINOMIAL
    return ScheduleId.BROADCAST_CHAIN if _use_chain(size, bytes_, table) else ScheduleId.BROADCAST_TREE


def _use_chain(size: int, bytes_: int, table: Thresholds) -> bool:
    return size <= table.chain_group and bytes_ >= table.chain_slice * size


def _all_gather(size: int, bytes_: int, table: Thresholds, even: bool) -> ScheduleId:
    return ScheduleId.ALL_GATHER_DOUBLING if size > 3 else ScheduleId.ALL_GATHER_RING


def _reduce_scatter(size: int, bytes_: int, table: Thresholds, even: bool) -> ScheduleId:
    """With up to three workers a ring has no more rounds than halving."""
    return ScheduleId.REDUCE_SCATTER_HALVING if size > 3 else ScheduleId.REDUCE_SCATTER_RING


def _gather(size: int, bytes_: int, table: Thresholds, even: bool) -> ScheduleId:
    return ScheduleId.GATHER_BINOMIAL if _use_tree(size, bytes_, table) else ScheduleId.GATHER_DIRECT


def _scatter(size: int, bytes_: int, table: Thresholds, even: bool) -> ScheduleId:
    return ScheduleId.SCATTER_BINOMIAL if _use_tree(size, bytes_, table) else ScheduleId.SCATTER_DIRECT


def _use_tree(size: int, bytes_: int, table: Thresholds) -> bool:
    """A tree needs few links, but its inner workers hold many parts, so it is not used for large parts."""
    if bytes_ <= table.small:
        return True
    return size > table.direct_group and bytes_ < table.direct_part * size


def _all_to_all(size: int, bytes_: int, table: Thresholds, even: bool) -> ScheduleId:
    if even and size >= table.bruck_group and bytes_ <= table.bruck_part * size:
        return ScheduleId.ALL_TO_ALL_BRUCK
    return ScheduleId.ALL_TO_ALL_DIRECT


def _barrier(size: int, bytes_: int, table: Thresholds, even: bool) -> ScheduleId:
    return ScheduleId.BARRIER


def _group_opening(size: int, bytes_: int, table: Thresholds, even: bool) -> ScheduleId:
    return ScheduleId.GROUP_OPENING


_CHOICES: Final[dict[Collective, Callable[[int, int, Thresholds, bool], ScheduleId]]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.REDUCE: _reduce,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.ALL_GATHER: _all_gather,
    Collective.BROADCAST: _broadcast,
    Collective.GATHER: _gather,
    Collective.SCATTER: _scatter,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.BARRIER: _barrier,
    Collective.GROUP_OPENING: _group_opening,
}
