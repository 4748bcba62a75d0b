"""The bytes of a collective over all workers, counted in the schedules that run (`ringfence.collectives.counts`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ringfence.collectives import Collective, Thresholds
from ringfence.collectives.counts import count
from ringfence.machines import Machines, spread


class Traffic(NamedTuple):
    """What one worker, or all of them, send in a collective. `ringfence.counters()` counts the same."""

    sealed: int = 0  # bytes of tensors that leave a machine
    wire: int = 0  #   the same as frames: with headers and tags
    local: int = 0  #  bytes of tensors that stay inside a machine and are not sealed


def machines_of(hosts: int, workers: int) -> Machines:
    """Return which workers share a machine if they are distributed over so many hosts in order of rank; 0: none do."""
    return spread(rank * hosts // workers for rank in range(workers)) if hosts else ()


def traffic(
    kind: Collective,
    size: int,
    ranks: int,
    machines: Machines = (),
    *,
    root: int = 0,
    table: Thresholds | None = None,
    only: Iterable[int] | None = None,
) -> Traffic:
    """Return what all ranks send, or `only` some, in a collective of `size` bytes of float32.

    `size` is the tensor of an all-reduce, a reduce and a broadcast; of others it is the tensor with a part for each worker.
    """
    found = [
        count(kind, ranks, size, table, machines, rank=rank, root=root)
        for rank in (range(ranks) if only is None else only)
    ]
    return Traffic(
        sum(each.sealed for each in found), sum(each.wire for each in found), sum(each.local for each in found)
    )
