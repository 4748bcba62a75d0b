"""`Builder` collects the steps of one rank's schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from ringfence.collectives.schedule import Action, Buffer, Place, Schedule, Step
from ringfence.machines import Machines

HOP: Final = -1  # value of `origin`: sealed for this hop only

DATA: Final = Place(Buffer.DATA, 0)
INPUT: Final = Place(Buffer.INPUT, 0)
OUTPUT: Final = Place(Buffer.OUTPUT, 0)


@dataclass(slots=True)
class Builder:
    """The steps of one rank, in program order. Labels are unique among the messages from one rank to another."""

    rank: int
    size: int
    root: int = 0
    average: bool = False  # divide the reduction by the group's size
    even: bool = True  # all parts of a buffer have the same length, on every rank
    adjacent: bool = True  # parts of this rank's tensors are adjacent in memory
    machines: Machines = ()  # which ranks share a machine
    steps: list[Step] = field(default_factory=list)
    chunks: dict[Place, int] = field(default_factory=dict)
    lengths: list[Place] = field(default_factory=list)  # of the scratch parts

    @property
    def relative_rank(self) -> int:
        """This rank relative to the root, which has relative rank 0."""
        return (self.rank - self.root) % self.size

    def rank_at(self, relative_rank: int) -> int:
        """The rank with this relative rank; negative values count backwards from the root."""
        return (self.root + relative_rank) % self.size

    def forwarded(self, origin: int, among: int = 0) -> int:
        """The `origin` of a chunk that others forward. Two workers forward nothing, and sealing for the hop is cheaper."""
        return origin if (among or self.size) > 2 else HOP

    def on_machines(self) -> Machines:
        """Which ranks share a machine; if none do, each has one of its own."""
        return self.machines or tuple((rank,) for rank in range(self.size))

    def by_machine(self) -> list[int]:
        """All ranks; those of one machine are next to each other."""
        return [rank for workers in self.on_machines() for rank in workers]

    def scratch(self, lengths: Iterable[Place]) -> int:
        """Add adjacent scratch parts with the lengths of these places; return the index of the first."""
        first = len(self.lengths)
        self.lengths.extend(lengths)
        return first

    def length_of(self, place: Place) -> Place:
        """The place outside of SCRATCH that has the length of this one."""
        return self.lengths[place.part] if place.buffer is Buffer.SCRATCH else place

    def send(self, chunk: Place, to: int, label: int, origin: int = HOP) -> None:
        self.steps.append(Step(Action.SEND, self._index(chunk), to, -1, label, origin))

    def receive(self, chunk: Place, source: int, label: int, origin: int = HOP) -> None:
        self.steps.append(Step(Action.RECV, self._index(chunk), source, -1, label, origin))

    def reduce(self, chunk: Place, source: int, label: int, other: Place, received_first: bool = True) -> None:
        step = Step(Action.REDUCE, self._index(chunk), source, self._index(other), label, HOP, received_first)
        self.steps.append(step)

    def copy(self, chunk: Place, other: Place) -> None:
        self.steps.append(Step(Action.COPY, self._index(chunk), -1, self._index(other)))

    def divide(self, chunk: Place) -> None:
        """Divide the chunk by the group's size, if the collective averages."""
        if self.average and self.size > 1:
            self.steps.append(Step(Action.SCALE, self._index(chunk)))

    def finish(self, name: str, identifier: int) -> Schedule:
        return Schedule(
            name, identifier, self.rank, self.size, tuple(self.chunks), tuple(self.steps), tuple(self.lengths)
        )

    def _index(self, chunk: Place) -> int:
        return self.chunks.setdefault(chunk, len(self.chunks))


def slice_of(buffer: Buffer, part: int, parts: int = 1) -> Place:
    """One worker's part of a buffer that has a part for each worker, or those of several workers."""
    return Place(buffer, part, parts)


def scratch(part: int, parts: int = 1) -> Place:
    return Place(Buffer.SCRATCH, part, parts)


def rounds(size: int) -> int:
    """ceil(log2(size)): the rounds of an algorithm that doubles its distance in each."""
    return (size - 1).bit_length()
