"""What a collective costs one worker, counted in the schedule that it runs: rounds, messages, seals, bytes, copies, memory.

Needs no network, no tensors and no torch, so that groups of any size can be counted. `ringfence.counters()` counts the same
bytes in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from ringfence.collectives.builder import rounds
from ringfence.collectives.passes import OF_ONE_TENSOR, PASSES_AT_ONCE
from ringfence.collectives.schedule import Action, Buffer, Collective, Place, Schedule
from ringfence.collectives.selection import ScheduleId, Thresholds, choose, divide
from ringfence.link.frames import FORWARD_OVERHEAD, HOP_OVERHEAD
from ringfence.link.segments import segment_count
from ringfence.machines import Machines


class Counts(NamedTuple):
    """One worker's share of a collective. "Sealed" and "opened" are between machines only."""

    rounds: int = 0  #     messages that wait for each other at most, in one pass; passes overlap
    messages: int = 0  #   sent
    seals: int = 0  #      segments that are encrypted; what is forwarded is not
    opens: int = 0
    sealed: int = 0  #     bytes of tensors that leave the machine
    wire: int = 0  #       the same as frames: with headers and tags
    opened: int = 0  #     bytes of tensors that arrive from other machines
    encrypted: int = 0  #  bytes of tensors that this worker encrypts
    reduced: int = 0  #    bytes that are added to others
    local: int = 0  #      bytes that it sends inside its machine, which are not sealed
    copied: int = 0  #     bytes that are copied in host memory
    links: int = 0  #      connections, each with a descriptor and its own keys
    peers: int = 0  #      workers at their other ends, each of which is verified once
    scratch: int = 0  #    bytes of temporary memory
    device_copies: int = 0  # between host and device, if the tensors are on one
    passes: int = 0


def count(
    kind: Collective,
    size: int,
    bytes_: int,
    table: Thresholds | None = None,
    machines: Machines = (),
    *,
    rank: int = 0,
    root: int = 0,
    width: int = 4,
    device: bool = False,
) -> Counts:
    """Return the counts of one rank of `size` in a collective of `bytes_` (as in `choose`) in elements of `width` bytes."""
    table = table or Thresholds()
    longest = bytes_ if kind in OF_ONE_TENSOR else bytes_ // size
    passes = divide(kind, size, longest, table, machines)
    schedule = choose(
        *(kind, size, rank, root, bytes_, table),
        adjacent=device or passes.number == 1,
        machines=machines,
    )
    near = next((frozenset(workers) for workers in machines if rank in workers), frozenset((rank,)))
    rest = longest - (passes.number - 1) * passes.each
    lengths = [(passes.each, passes.number - 1), (max(0, rest), 1)] if passes.number > 1 else [(longest, 1)]
    found, scratch = Counts(), 0
    for length, times in lengths:
        parts = _parts(kind, schedule, length, width)
        scratch = max(scratch, parts[Buffer.SCRATCH][-1])
        one = _of_pass(schedule, parts, near)
        found = Counts(*(have + times * more for have, more in zip(found, one, strict=True)))
    used = {(step.action is Action.SEND, step.peer) for step in schedule.steps if step.peer >= 0}
    buffers = sum(1 for buffer in (Buffer.DATA, Buffer.INPUT, Buffer.OUTPUT) if schedule.parts(buffer))
    copies = 2 if kind is Collective.ALL_REDUCE else buffers  # a broadcast reads or writes its tensor
    return found._replace(
        rounds=rounds_of(ScheduleId(schedule.identifier), size, machines),
        links=passes.channels * len(used),
        peers=len({peer for _, peer in used}),
        scratch=scratch * min(PASSES_AT_ONCE * passes.channels, passes.number),
        device_copies=copies * passes.number if device else 0,
        passes=passes.number,
    )


_Lengths = dict[Buffer, Sequence[int]]  # where each part of a buffer begins, and where the last one ends


def _parts(kind: Collective, schedule: Schedule, length: int, width: int) -> _Lengths:
    """Return where the parts of each buffer begin, if a pass takes `length` bytes of the tensor, or of every part."""
    found: _Lengths = {}
    for buffer in (Buffer.DATA, Buffer.INPUT, Buffer.OUTPUT):
        parts = schedule.parts(buffer)
        if parts and kind in OF_ONE_TENSOR:
            each = -(-length // (parts * width)) * width
            found[buffer] = [min(length, part * each) for part in range(parts + 1)]
        elif parts:
            found[buffer] = range(0, (parts + 1) * length, length) if length else [0] * (parts + 1)
    lengths = (_between(found.get(place.buffer, ()), place) for place in schedule.scratch)
    found[Buffer.SCRATCH] = [0, *accumulate(lengths)]
    return found


def _between(begins: Sequence[int], place: Place) -> int:
    return begins[place.part + place.parts] - begins[place.part] if place.parts else 0


def _of_pass(schedule: Schedule, parts: _Lengths, near: frozenset[int]) -> Counts:
    messages = seals = opens = sealed = wire = opened = encrypted = reduced = local = copied = 0
    own: set[int] = set()  # chunks that this rank has sealed once for all
    for step in schedule.steps:
        length = _between(parts[schedule.chunks[step.chunk].buffer], schedule.chunks[step.chunk])
        if step.action is Action.COPY or step.action is Action.SCALE:
            copied += length
            continue
        segments = segment_count(length)
        messages += step.action is Action.SEND
        reduced += length if step.action is Action.REDUCE else 0
        if step.peer in near:
            local += length if step.action is Action.SEND else 0
        elif step.action is not Action.SEND:
            opens += segments
            opened += length
        else:
            sealed += length
            wire += length + segments * (HOP_OVERHEAD if step.origin < 0 else FORWARD_OVERHEAD)
            if step.origin < 0 or (step.origin == schedule.rank and step.chunk not in own):
                own.add(step.chunk)
                seals += segments
                encrypted += length
    return Counts(0, messages, seals, opens, sealed, wire, opened, encrypted, reduced, local, copied)


def rounds_of(identifier: ScheduleId, size: int, machines: Machines = ()) -> int:
    """Return how many messages wait for each other at most."""
    workers = max(map(len, machines), default=1)
    return _ROUNDS[identifier](size, len(machines) or size, workers)


def _two_levels(between: Callable[[int], int], inside: Callable[[int], int]) -> Callable[[int, int, int], int]:
    return lambda size, machines, workers: between(machines) + inside(workers)


def _flat(between: Callable[[int], int]) -> Callable[[int, int, int], int]:
    return lambda size, machines, workers: between(size)


def _around(size: int) -> int:
    return size - 1


def _exchanged(workers: int) -> int:
    return int(workers > 1)


def _twice(of: Callable[[int], int]) -> Callable[[int], int]:
    return lambda size: 2 * of(size)


def _doubling(size: int) -> int:
    whole = size.bit_length() - 1
    return whole + 2 * (size > 1 << whole)


def _binary_depth(size: int) -> int:
    return size.bit_length() - 1


def _once(size: int) -> int:
    return int(size > 1)


_ROUNDS: Final[dict[ScheduleId, Callable[[int, int, int], int]]] = {
    ScheduleId.ALL_REDUCE_RING: _flat(_twice(_around)),
    ScheduleId.ALL_REDUCE_DOUBLING: _flat(_doubling),
    ScheduleId.ALL_REDUCE_HALVING: _flat(_twice(rounds)),
    ScheduleId.ALL_REDUCE_HALVING_APART: _flat(_twice(rounds)),
    ScheduleId.ALL_REDUCE_TWO_LEVELS: _two_levels(_twice(_around), lambda workers: workers - 1 + _exchanged(workers)),
    ScheduleId.ALL_REDUCE_TWO_LEVELS_HALVING: _two_levels(
        _twice(rounds), lambda workers: workers - 1 + _exchanged(workers)
    ),
    ScheduleId.REDUCE_SCATTER_RING: _flat(_around),
    ScheduleId.REDUCE_SCATTER_HALVING: _flat(rounds),
    ScheduleId.REDUCE_SCATTER_HALVING_APART: _flat(rounds),
    ScheduleId.REDUCE_SCATTER_TWO_LEVELS: _two_levels(_around, _around),
    ScheduleId.REDUCE_SCATTER_TWO_LEVELS_HALVING: _two_levels(rounds, _around),
    ScheduleId.ALL_GATHER_RING: _flat(_around),
    ScheduleId.ALL_GATHER_DOUBLING: _flat(rounds),
    ScheduleId.ALL_GATHER_DOUBLING_APART: _flat(rounds),
    ScheduleId.ALL_GATHER_TWO_LEVELS: _two_levels(_around, _exchanged),
    ScheduleId.ALL_GATHER_TWO_LEVELS_DOUBLING: _two_levels(rounds, _exchanged),
    ScheduleId.BROADCAST_BINOMIAL: _flat(rounds),
    ScheduleId.BROADCAST_CHAIN: _flat(_around),
    ScheduleId.BROADCAST_TREE: _flat(_binary_depth),
    ScheduleId.BROADCAST_TWO_LEVELS: _two_levels(_around, _exchanged),
    ScheduleId.REDUCE_BINOMIAL: _flat(rounds),
    ScheduleId.REDUCE_CHAIN: _flat(_around),
    ScheduleId.REDUCE_TREE: _flat(_binary_depth),
    ScheduleId.REDUCE_TWO_LEVELS: _two_levels(_around, _around),
    ScheduleId.GATHER_BINOMIAL: _flat(rounds),
    ScheduleId.GATHER_DIRECT: _flat(_once),
    ScheduleId.SCATTER_BINOMIAL: _flat(rounds),
    ScheduleId.SCATTER_DIRECT: _flat(_once),
    ScheduleId.ALL_TO_ALL_BRUCK: _flat(rounds),
    ScheduleId.ALL_TO_ALL_DIRECT: _flat(_once),
    ScheduleId.ALL_TO_ALL_TWO_LEVELS: _two_levels(_once, _exchanged),
    ScheduleId.BARRIER: _flat(rounds),
    ScheduleId.GROUP_OPENING: _flat(_twice(rounds)),
}
