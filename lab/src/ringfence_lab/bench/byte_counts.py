"""The bytes of a collective, counted in the schedules that run: through each stage, between machines and inside them.

Needs no torch, except `traffic`, which asks the runtime how it divides a collective into passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ringfence.collectives import Buffer, Collective, Thresholds, choose
from ringfence.collectives.schedule import Action, Place, Schedule
from ringfence.link.frames import FORWARD_OVERHEAD, HOP_OVERHEAD
from ringfence.link.segments import segment_count
from ringfence.machines import Machines, spread


class Traffic(NamedTuple):
    """What one worker, or all of them, send in a collective. `ringfence.counters()` counts the same."""

    sealed: int = 0  # bytes of tensors that leave a machine
    wire: int = 0  #   the same as frames: with headers and tags
    local: int = 0  #  bytes of tensors that stay inside a machine and are not sealed

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(*(one + two for one, two in zip(self, other, strict=True)))


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
    width: int = 4,
    table: Thresholds | None = None,
    only: Iterable[int] | None = None,
) -> Traffic:
    """Return what all ranks send, or `only` some, in a collective of `size` bytes in elements of `width` bytes.

    `size` is the tensor of an all-reduce, a reduce and a broadcast; of others it is the tensor with a part for each worker.
    """
    total = Traffic()
    for rank in range(ranks) if only is None else only:
        schedule = choose(kind, ranks, rank, root, size, table or Thresholds(), machines=machines)
        near = next((set(workers) for workers in machines if rank in workers), set())
        total = total.plus(_sent(kind, schedule, size, width, near))
    return total


def _sent(kind: Collective, schedule: Schedule, size: int, width: int, near: set[int]) -> Traffic:
    from ringfence.dataplane.request import PASS_BYTES, pass_count  # late: it needs torch

    whole = {buffer: _part_lengths(kind, schedule, buffer, size, width) for buffer in _OF_TENSORS}
    passes = pass_count(kind, schedule.size, max(max(each, default=0) for each in whole.values()))
    total = Traffic()
    for index in range(passes):
        parts = whole
        if passes > 1:
            start = index * PASS_BYTES
            parts = {buffer: [min(PASS_BYTES, max(0, one - start)) for one in each] for buffer, each in whole.items()}
        total = total.plus(_of_pass(schedule, parts, near))
    return total


def _of_pass(schedule: Schedule, parts: dict[Buffer, list[int]], near: set[int]) -> Traffic:
    sealed = wire = local = 0
    for step in schedule.steps:
        if step.action is not Action.SEND:
            continue
        length = _length(schedule, schedule.chunks[step.chunk], parts)
        if step.peer in near:
            local += length
            continue
        sealed += length
        wire += length + segment_count(length) * (HOP_OVERHEAD if step.origin < 0 else FORWARD_OVERHEAD)
    return Traffic(sealed, wire, local)


def _length(schedule: Schedule, place: Place, parts: dict[Buffer, list[int]]) -> int:
    """Return the bytes of a chunk, from those of each part of the tensors' buffers."""
    first, end = place.part, place.part + place.parts
    if place.buffer is Buffer.SCRATCH:
        return sum(_length(schedule, each, parts) for each in schedule.scratch[first:end])
    return sum(parts[place.buffer][first:end])


_OF_TENSORS = (Buffer.DATA, Buffer.INPUT, Buffer.OUTPUT)


def _part_lengths(kind: Collective, schedule: Schedule, buffer: Buffer, size: int, width: int) -> list[int]:
    """Return the bytes of each part of a buffer, as the process group divides its tensors."""
    count = schedule.parts(buffer)
    if buffer is Buffer.DATA or kind is Collective.REDUCE:
        each = -(-(size // width) // count) * width if count else 0
        return [max(0, min(each, size - part * each)) for part in range(count)]
    return [size // schedule.size] * count


def stage_bytes(operation: str, size: int, ranks: int, table: Thresholds | None = None) -> dict[str, int]:
    """Return the bytes that pass through each stage, over all ranks, each on a machine of its own."""
    kind = Collective[operation.upper()]
    total = dict.fromkeys(("seal", "open", "reduce", "send", "receive"), 0)
    for rank in range(ranks):
        schedule = choose(kind, ranks, rank, 0, size, table or Thresholds())
        parts = {buffer: _part_lengths(kind, schedule, buffer, size, 4) for buffer in _OF_TENSORS}
        for step in schedule.steps:
            length = _length(schedule, schedule.chunks[step.chunk], parts)
            if step.action is Action.SEND:
                total["send"] += length
                if step.origin in (-1, rank):
                    total["seal"] += length
            elif step.action in (Action.RECV, Action.REDUCE):
                total["receive"] += length
                total["open"] += length
                if step.action is Action.REDUCE:
                    total["reduce"] += length
    return total
