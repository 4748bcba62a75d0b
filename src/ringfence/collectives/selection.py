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
from typing import Final

from ringfence.collectives import bruck, direct, doubling, ring, scatter_gather, tree, two_levels
from ringfence.collectives.builder import HOP, Builder
from ringfence.collectives.schedule import Schedule
from ringfence.errors import ProtocolError
from ringfence.keys import CHANNEL_LIMIT
from ringfence.machines import Machines, are_even

KIB: Final = 1024


class Collective(IntEnum):
    ALL_REDUCE = 0
    REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    GATHER = 5
    SCATTER = 6
    ALL_TO_ALL = 7
    BARRIER = 8
    GROUP_OPENING = 9  # every member contributes to the instance secret, which origins' keys are derived from


class ScheduleId(IntEnum):
    """Identifiers on the wire, in every call's description. A number is never reused."""

    ALL_REDUCE_RING = 1
    ALL_REDUCE_DOUBLING = 2
    ALL_REDUCE_TREE = 3
    REDUCE_SCATTER_RING = 4
    REDUCE_SCATTER_BRUCK = 5
    ALL_GATHER_RING = 6
    ALL_GATHER_BRUCK = 7
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


_BUILDERS: Final[dict[ScheduleId, Callable[[Builder], None]]] = {
    ScheduleId.ALL_REDUCE_RING: ring.all_reduce,
    ScheduleId.ALL_REDUCE_DOUBLING: doubling.all_reduce,
    ScheduleId.ALL_REDUCE_TREE: tree.all_reduce_tree,
    ScheduleId.REDUCE_SCATTER_RING: ring.reduce_scatter,
    ScheduleId.REDUCE_SCATTER_BRUCK: bruck.reduce_scatter,
    ScheduleId.ALL_GATHER_RING: ring.all_gather,
    ScheduleId.ALL_GATHER_BRUCK: bruck.all_gather,
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
}


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds, equal on every worker of a session because they are distributed with the roster."""

    small: int = 512 * KIB  #         total size up to which fewer messages matter more than fewer bytes
    ring_slice: int = 32 * KIB  #     slice of a worker from which a ring is worth its O(P) steps
    chain_slice: int = 128 * KIB  #   total size over group size from which a chain is worth its depth
    chain_group: int = 64  #          largest group that uses a chain
    direct_group: int = 16  #         largest group in which gather's root has a link to every rank for small parts too
    direct_part: int = 1024 * KIB  #  part from which it does in any group
    bruck_group: int = 16  #          smallest group in which all-to-all uses Bruck's algorithm,
    bruck_part: int = 4 * KIB  #      and largest part for which it does
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


_TABLE_VERSION: Final = 2
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
    machines: Machines = (),
) -> Schedule:
    """Return this rank's schedule. `root` is 0 for collectives without one.

    `machines`: which members share a machine, where nothing is sealed.

    `even`: all parts have the same length. For an all-to-all this must hold on every rank, because it decides the
    schedule; for a reduce-scatter it only saves scratch; other collectives ignore it.
    """
    chosen = _CHOICES[kind](size, bytes_, table, even)
    if machines and chosen in _LARGE and (chosen not in _EVEN or are_even(machines)):
        chosen = _LARGE[chosen]
    return build(chosen, size, rank, root, average, even, machines)


# What large tensors use if members share machines. In shared memory one copy serves all that read it.
_EVEN: Final = {
    ScheduleId.ALL_REDUCE_RING: ScheduleId.ALL_REDUCE_TWO_LEVELS,
    ScheduleId.REDUCE_SCATTER_RING: ScheduleId.REDUCE_SCATTER_TWO_LEVELS,
    ScheduleId.ALL_GATHER_RING: ScheduleId.ALL_GATHER_TWO_LEVELS,
}
_LARGE: Final = {
    **_EVEN,
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
) -> Schedule:
    """Build one schedule by its identifier, whether or not the table would select it."""
    if not (0 <= rank < size and 0 <= root < size):
        raise ValueError(f"rank {rank} or root {root} is not in a group of {size}")
    builder = Builder(rank, size, root, average, even, machines)
    _BUILDERS[identifier](builder)
    schedule = builder.finish(identifier.name.lower(), int(identifier))
    if len(machines) != 1:
        return schedule
    return replace(schedule, steps=tuple(step._replace(origin=HOP) for step in schedule.steps))  # nothing is sealed


def _all_reduce(size: int, bytes_: int, table: Thresholds, even: bool) -> ScheduleId:
    if bytes_ <= table.small:
        return ScheduleId.ALL_REDUCE_DOUBLING
    if bytes_ >= table.ring_slice * size:
        return ScheduleId.ALL_REDUCE_RING
    return ScheduleId.ALL_REDUCE_TREE


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
    return ScheduleId.ALL_GATHER_BRUCK if _use_bruck(size, bytes_, table) else ScheduleId.ALL_GATHER_RING


def _reduce_scatter(size: int, bytes_: int, table: Thresholds, even: bool) -> ScheduleId:
    return ScheduleId.REDUCE_SCATTER_BRUCK if _use_bruck(size, bytes_, table) else ScheduleId.REDUCE_SCATTER_RING


def _use_bruck(size: int, bytes_: int, table: Thresholds) -> bool:
    """With up to three workers a ring has no more rounds than Bruck's algorithm and copies less."""
    return size > 3 and (bytes_ <= table.small or bytes_ < table.ring_slice * size)


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
