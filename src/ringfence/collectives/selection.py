"""Which schedule a collective runs: the door of this package.

The choice depends only on what all ranks share: the collective, the group's size, the root, the bytes, and the table
of thresholds that came with the roster. `bytes_` is the whole that a collective is about:

    ALL_REDUCE, REDUCE, BROADCAST   the tensor
    ALL_GATHER                      all parts of OUTPUT
    REDUCE_SCATTER                  all parts of INPUT
    GATHER, SCATTER, ALL_TO_ALL     one part, times the group's size (of an uneven ALL_TO_ALL: ignored)
    BARRIER, GROUP_OPENING          ignored
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from functools import lru_cache
from typing import Final

from ringfence.collectives import bruck, direct, doubling, ring, scatter_gather, tree
from ringfence.collectives.builder import Builder
from ringfence.collectives.schedule import Schedule
from ringfence.errors import ProtocolError

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
    GROUP_OPENING = 9  # every member contributes to the instance secret: before it, nothing can be sealed as an origin


class ScheduleId(IntEnum):
    """On the wire in every call's description: never give a number a second meaning."""

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
}


@dataclass(frozen=True, slots=True)
class Table:
    """Thresholds, the same on every worker of a session because they travel with the roster."""

    small: int = 512 * KIB  #         the whole, up to which few messages matter more than few bytes
    ring_slice: int = 32 * KIB  #     a worker's slice, from which a ring is worth its O(P) steps
    chain_slice: int = 128 * KIB  #   the whole over the group's size, from which a chain is worth its depth
    chain_group: int = 64  #          the largest group in which a chain is used at all
    direct_group: int = 16  #         the largest group in which gather's root talks to all even about small parts
    direct_part: int = 1024 * KIB  #  a part, from which it does in any group
    bruck_group: int = 16  #          the smallest group in which all-to-all saves messages by Bruck's algorithm,
    bruck_part: int = 4 * KIB  #      and the largest part with which it does

    def to_bytes(self) -> bytes:
        return _LAYOUT.pack(_TABLE_VERSION, *astuple(self))

    @classmethod
    def from_bytes(cls, encoded: bytes) -> Table:
        if len(encoded) != _LAYOUT.size:
            raise ProtocolError(f"a schedule table has {_LAYOUT.size} bytes, this one {len(encoded)}")
        version, *thresholds = _LAYOUT.unpack(encoded)
        if version != _TABLE_VERSION:
            raise ProtocolError(f"schedule table of version {version}; this worker knows {_TABLE_VERSION}")
        return cls(*thresholds)


_TABLE_VERSION: Final = 1
_LAYOUT: Final = struct.Struct(f">B{len(fields(Table))}Q")


def choose(
    kind: Collective,
    size: int,
    rank: int,
    root: int,
    bytes_: int,
    table: Table,
    *,
    average: bool = False,
    even: bool = True,
) -> Schedule:
    """This rank's schedule. `root` is 0 where there is none.

    `even` says that all parts are equally long. For an all-to-all the caller must know that of every rank, because it
    decides the schedule; for a reduce-scatter it only saves scratch; elsewhere it means nothing.
    """
    return build(_CHOICES[kind](size, bytes_, table, even), size, rank, root, average, even)


@lru_cache(maxsize=512)
def build(
    identifier: ScheduleId, size: int, rank: int, root: int = 0, average: bool = False, even: bool = True
) -> Schedule:
    """One named schedule, whether or not the table would choose it."""
    if not (0 <= rank < size and 0 <= root < size):
        raise ValueError(f"rank {rank} or root {root} is not in a group of {size}")
    builder = Builder(rank, size, root, average, even)
    _BUILDERS[identifier](builder)
    return builder.finish(identifier.name.lower(), int(identifier))


def _all_reduce(size: int, bytes_: int, table: Table, even: bool) -> ScheduleId:
    if bytes_ <= table.small:
        return ScheduleId.ALL_REDUCE_DOUBLING
    if bytes_ >= table.ring_slice * size:
        return ScheduleId.ALL_REDUCE_RING
    return ScheduleId.ALL_REDUCE_TREE


def _reduce(size: int, bytes_: int, table: Table, even: bool) -> ScheduleId:
    if bytes_ <= table.small or size == 2:
        return ScheduleId.REDUCE_BINOMIAL
    return ScheduleId.REDUCE_CHAIN if _chained(size, bytes_, table) else ScheduleId.REDUCE_TREE


def _broadcast(size: int, bytes_: int, table: Table, even: bool) -> ScheduleId:
    if bytes_ <= table.small or size == 2:
        return ScheduleId.BROADCAST_BINOMIAL
    return ScheduleId.BROADCAST_CHAIN if _chained(size, bytes_, table) else ScheduleId.BROADCAST_TREE


def _chained(size: int, bytes_: int, table: Table) -> bool:
    return size <= table.chain_group and bytes_ >= table.chain_slice * size


def _all_gather(size: int, bytes_: int, table: Table, even: bool) -> ScheduleId:
    return ScheduleId.ALL_GATHER_BRUCK if _in_few_rounds(size, bytes_, table) else ScheduleId.ALL_GATHER_RING


def _reduce_scatter(size: int, bytes_: int, table: Table, even: bool) -> ScheduleId:
    return ScheduleId.REDUCE_SCATTER_BRUCK if _in_few_rounds(size, bytes_, table) else ScheduleId.REDUCE_SCATTER_RING


def _in_few_rounds(size: int, bytes_: int, table: Table) -> bool:
    """Up to three workers, a ring has no more rounds than Bruck's algorithm and copies less."""
    return size > 3 and (bytes_ <= table.small or bytes_ < table.ring_slice * size)


def _gather(size: int, bytes_: int, table: Table, even: bool) -> ScheduleId:
    return ScheduleId.GATHER_BINOMIAL if _relayed(size, bytes_, table) else ScheduleId.GATHER_DIRECT


def _scatter(size: int, bytes_: int, table: Table, even: bool) -> ScheduleId:
    return ScheduleId.SCATTER_BINOMIAL if _relayed(size, bytes_, table) else ScheduleId.SCATTER_DIRECT


def _relayed(size: int, bytes_: int, table: Table) -> bool:
    """Through a tree: few links, but its inner workers hold many parts, so not with large ones."""
    if bytes_ <= table.small:
        return True
    return size > table.direct_group and bytes_ < table.direct_part * size


def _all_to_all(size: int, bytes_: int, table: Table, even: bool) -> ScheduleId:
    if even and size >= table.bruck_group and bytes_ <= table.bruck_part * size:
        return ScheduleId.ALL_TO_ALL_BRUCK
    return ScheduleId.ALL_TO_ALL_DIRECT


def _barrier(size: int, bytes_: int, table: Table, even: bool) -> ScheduleId:
    return ScheduleId.BARRIER


def _group_opening(size: int, bytes_: int, table: Table, even: bool) -> ScheduleId:
    return ScheduleId.GROUP_OPENING


_CHOICES: Final[dict[Collective, Callable[[int, int, Table, bool], ScheduleId]]] = {
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
