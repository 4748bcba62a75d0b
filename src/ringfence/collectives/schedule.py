"""A collective as data: for each rank a list of steps over chunks, which the runtime executes and the planner simulates.

A schedule belongs to one rank of one group size (and root). It refers to *chunks*, not bytes, so one cached schedule
serves every tensor size. A chunk is one or more consecutive *parts* of one buffer. Binding the schedule to memory
defines the length of each part: an all-reduce of n elements among P ranks binds DATA as P parts of n/P elements.

Steps are listed in program order, but a step waits only for its dependencies: a reader for the last writers of its
parts, a writer also for the readers since. Between steps on the same chunk, segment s waits for segment s only; this
pipelines a large collective. Messages from one rank to another travel in program order: the k-th SEND to a peer
matches the peer's k-th RECV or REDUCE from this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple


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
    SCRATCH = 3  # temporary; part i has the length of the place `Schedule.scratch[i]`


class Place(NamedTuple):
    """Consecutive parts of one buffer; more than one only where they are adjacent in memory."""

    buffer: Buffer
    part: int
    parts: int = 1


class Step(NamedTuple):
    action: Action
    chunk: int  #          index into Schedule.chunks
    peer: int = -1  #      SEND: to; RECV, REDUCE: from (rank in the group)
    other: int = -1  #     REDUCE: the local operand; COPY: the source (index into Schedule.chunks)
    label: int = 0  #      on the wire: equal at sender and receiver, and at all hops of a forwarded chunk
    origin: int = -1  #    SEND, RECV: the rank that sealed this chunk once for all; -1: sealed for this hop only
    received_first: bool = True  # REDUCE: received (+) other, or other (+) received; fixes the order of addition


class Dependency(NamedTuple):
    step: int
    by_segment: bool  # same chunk on both sides: segment s waits for segment s. Otherwise: for the whole step


@dataclass(frozen=True)
class Schedule:
    name: str
    identifier: int  # on the wire, in the call descriptor
    rank: int
    size: int
    chunks: tuple[Place, ...]
    steps: tuple[Step, ...]
    scratch: tuple[Place, ...] = ()

    @cached_property
    def dependencies(self) -> tuple[tuple[Dependency, ...], ...]:
        """For each step, the earlier steps it must follow. Made when a schedule is executed; to cost one, none are needed."""
        return _dependencies(self.chunks, self.steps)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """By Buffer: its number of parts; 0: not used by this rank."""
        return _cuts(self.chunks, len(self.scratch))

    def parts(self, buffer: Buffer) -> int:
        """The number of parts of this buffer; 0 if this rank does not use it."""
        return self.cuts[buffer]


def _cuts(chunks: tuple[Place, ...], scratch: int) -> tuple[int, ...]:
    counts = [0] * len(Buffer)
    for buffer, part, parts in chunks:
        counts[buffer] = max(counts[buffer], part + parts)
    counts[Buffer.SCRATCH] = scratch
    return tuple(counts)


_BUFFER_STRIDE = 1 << 32  # gives every part of every buffer its own number


def _dependencies(chunks: tuple[Place, ...], steps: tuple[Step, ...]) -> tuple[tuple[Dependency, ...], ...]:
    """For each step, the earlier steps it must follow: read after write, write after write, write after read.

    A writer that follows readers depends only on these: they depend on the writer before them.
    """
    numbers = [_numbers(place) for place in chunks]
    touched = [_touched(step) for step in steps]
    alike = all(place.parts == 1 for place in chunks)  # then chunks that overlap are the same chunk
    writers: dict[int, int] = {}
    readers: dict[int, tuple[int, ...]] = {}  # since the last writer
    result = []
    for index, (read, written) in enumerate(touched):
        needed: set[int] = set()
        if written >= 0:
            for part in numbers[written]:
                if part in readers:
                    needed.update(readers.pop(part))
                elif part in writers:
                    needed.add(writers[part])
        if read >= 0:
            alone = (index,)
            for part in numbers[read]:
                if part in writers:
                    needed.add(writers[part])
                if read != written:
                    readers[part] = readers[part] + alone if part in readers else alone
        if written >= 0:
            for part in numbers[written]:
                writers[part] = index
        result.append(
            tuple([Dependency(n, alike or _in_step(chunks, touched[n], touched[index])) for n in sorted(needed)])
        )
    return tuple(result)


def _numbers(place: Place) -> range:
    first = place.buffer * _BUFFER_STRIDE + place.part
    return range(first, first + place.parts)


def _touched(step: Step) -> tuple[int, int]:
    """The chunk a step reads and the chunk it writes; -1: none."""
    action = step.action
    if action is Action.SEND:
        return step.chunk, -1
    if action is Action.RECV:
        return -1, step.chunk
    if action is Action.SCALE:
        return step.chunk, step.chunk
    return step.other, step.chunk


def _in_step(chunks: tuple[Place, ...], earlier: tuple[int, int], later: tuple[int, int]) -> bool:
    """Whether segment s of the later step touches only what segment s of the earlier step touched."""
    for one in earlier:
        for two in later:
            if one != two and one >= 0 and two >= 0 and _differ(chunks[one], chunks[two]):
                return False
    return True


def _differ(a: Place, b: Place) -> bool:
    """Whether two places share parts without being the same."""
    return a != b and a.buffer == b.buffer and a.part < b.part + b.parts and b.part < a.part + a.parts
