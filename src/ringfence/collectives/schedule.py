"""A collective as data: for each rank a list of steps over chunks; what the runtime runs, tests check, plan prices.

A schedule belongs to one rank of one group size (and root). It names *chunks*, never bytes, so one schedule serves
every tensor size and is cached. A chunk is a run of consecutive *parts* of one buffer; whoever binds the schedule to
memory says how long each part is (an all-reduce of n elements in a world of P binds DATA as P parts of n/P elements).

Order. Steps are listed in program order, but a step waits only for what it needs: a reader for the last writers of its
parts, a writer also for the readers since. Where two steps name the very same chunk that holds segment by segment,
which is what pipelines a large collective. Messages from one rank to another travel in program order of both ends: the
k-th SEND to a peer is the k-th RECV or REDUCE from it there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple


class Action(IntEnum):
    SEND = 0  #    chunk -> peer
    RECV = 1  #    chunk <- peer
    REDUCE = 2  #  chunk <- received (+) other, where (+) is the reduction
    COPY = 3  #    chunk <- other
    SCALE = 4  #   chunk <- chunk / group size (AVG)


class Buffer(IntEnum):
    DATA = 0  #    read and written: all-reduce, broadcast
    INPUT = 1  #   read only
    OUTPUT = 2  #  written
    SCRATCH = 3  # the schedule's own; part i is as long as the part that `Schedule.scratch[i]` names


class Place(NamedTuple):
    """Consecutive parts of one buffer. More than one part only in SCRATCH, where parts lie side by side."""

    buffer: Buffer
    part: int
    parts: int = 1


class Step(NamedTuple):
    action: Action
    chunk: int  #          index into Schedule.chunks
    peer: int = -1  #      SEND: to; RECV, REDUCE: from (rank in the group)
    other: int = -1  #     REDUCE: the local operand; COPY: the source (index into Schedule.chunks)
    label: int = (
        0  #      the chunk's name on the wire: equal at both ends of a message, and at all hops of a forwarded one
    )
    origin: int = -1  #    SEND, RECV: the rank that sealed this chunk once for everybody; -1: sealed for this hop only
    received_first: bool = True  # REDUCE: received (+) other, or other (+) received; fixes the order of addition


class Dependency(NamedTuple):
    step: int
    by_segment: bool  # same chunk on both sides: segment s waits for segment s. Otherwise: for the whole step


@dataclass(frozen=True, slots=True)
class Schedule:
    name: str
    identifier: int  # on the wire, in the call descriptor
    rank: int
    size: int
    chunks: tuple[Place, ...]
    steps: tuple[Step, ...]
    scratch: tuple[Place, ...] = ()
    dependencies: tuple[tuple[Dependency, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dependencies", _dependencies(self.chunks, self.steps))


def _dependencies(chunks: tuple[Place, ...], steps: tuple[Step, ...]) -> tuple[tuple[Dependency, ...], ...]:
    """For each step, the earlier ones it must follow: read after write, write after write, write after read."""
    writers: dict[tuple[int, int], int] = {}
    readers: dict[tuple[int, int], list[int]] = {}
    result = []
    for index, step in enumerate(steps):
        reads, writes = _touched(step)
        needed: set[int] = set()
        for chunk in (*reads, *writes):
            for part in _parts(chunks[chunk]):
                if part in writers:
                    needed.add(writers[part])
        for chunk in writes:
            for part in _parts(chunks[chunk]):
                needed.update(readers.get(part, ()))
        needed.discard(index)
        result.append(tuple(Dependency(n, _same_chunks(chunks, steps[n], step)) for n in sorted(needed)))
        for chunk in reads:
            for part in _parts(chunks[chunk]):
                readers.setdefault(part, []).append(index)
        for chunk in writes:
            for part in _parts(chunks[chunk]):
                writers[part] = index
                readers[part] = []
    return tuple(result)


def _touched(step: Step) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The chunks a step reads and the chunks it writes."""
    match step.action:
        case Action.SEND:
            return (step.chunk,), ()
        case Action.RECV:
            return (), (step.chunk,)
        case Action.REDUCE | Action.COPY:
            return (step.other,), (step.chunk,)
        case Action.SCALE:
            return (step.chunk,), (step.chunk,)


def _parts(place: Place) -> list[tuple[int, int]]:
    return [(place.buffer, part) for part in range(place.part, place.part + place.parts)]


def _same_chunks(chunks: tuple[Place, ...], earlier: Step, later: Step) -> bool:
    """Whether segment s of the later step touches only what segment s of the earlier step touched."""
    one = {chunks[c] for side in _touched(earlier) for c in side}
    two = {chunks[c] for side in _touched(later) for c in side}
    shared = {p for a in one for p in _parts(a)} & {p for b in two for p in _parts(b)}
    return all(a in two for a in one if set(_parts(a)) & shared)
