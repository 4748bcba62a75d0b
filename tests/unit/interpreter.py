"""Executes the schedules of all ranks of a collective in memory, in a random order of events.

The rules: a step waits for its dependencies, messages between two ranks keep their order, and a channel holds one
segment. All other events happen in random order. Elements are Python numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import NamedTuple

from ringfence.collectives import Action, Buffer, Schedule, Step

Memory = dict[tuple[Buffer, int], list]
Lane = tuple[str, int, int]  # ("send" | "receive", rank, peer) or ("local", rank, step): done in order, one at a time


class Message(NamedTuple):
    label: int
    origin: int
    segment: int
    length: int  # of the whole chunk
    values: list
    depth: int  # length of the chain of messages up to this one


class Deadlock(AssertionError):
    pass


class WrongMessage(AssertionError):
    pass


@dataclass
class Worker:
    schedule: Schedule
    memory: Memory
    done: list[int] = field(init=False)  # segments done, by step
    total: list[int] = field(init=False)  # segments in total, by step
    lanes: list[Lane] = field(init=False)  # by step
    followers: list[list[tuple[int, bool]]] = field(init=False)  # the steps that wait for a step, by segment or not
    depth: list[int] = field(init=False)  # length of the chain of messages, by step
    views: list[list[tuple[list, int]]] = field(default_factory=list)  # of chunks: where each element is
    sealed: dict[tuple[int, int, int], list] = field(default_factory=dict)  # (origin, label, segment) -> as received

    def __post_init__(self) -> None:
        offsets = [0]
        for buffer, first, parts in self.schedule.scratch:
            offsets.append(offsets[-1] + sum(len(self.memory[buffer, p]) for p in range(first, first + parts)))
        scratch = [None] * offsets[-1]  # reading before writing fails
        for buffer, part, parts in self.schedule.chunks:
            if buffer == Buffer.SCRATCH:
                self.views.append([(scratch, at) for at in range(offsets[part], offsets[part + parts])])
            else:
                lists = [self.memory[buffer, each] for each in range(part, part + parts)]
                self.views.append([(values, at) for values in lists for at in range(len(values))])
        steps = self.schedule.steps
        self.done = [0] * len(steps)
        self.depth = [0] * len(steps)
        self.lanes = [self._lane(index, step) for index, step in enumerate(steps)]
        self.followers = [[] for _ in steps]
        for index, dependencies in enumerate(self.schedule.dependencies):
            for dependency in dependencies:
                assert dependency.step < index
                self.followers[dependency.step].append((index, dependency.by_segment))

    def _lane(self, index: int, step: Step) -> Lane:
        if step.action == Action.SEND:
            return "send", self.schedule.rank, step.peer
        if step.action in (Action.RECV, Action.REDUCE):
            return "receive", self.schedule.rank, step.peer
        return "local", self.schedule.rank, index

    def length(self, chunk: int) -> int:
        return len(self.views[chunk])

    def ready(self, index: int) -> bool:
        """Whether the dependencies of the step's next segment are done."""
        segment, done, total = self.done[index], self.done, self.total
        for step, by_segment in self.schedule.dependencies[index]:
            if done[step] <= segment if by_segment else done[step] < total[step]:
                return False
        return True


class World:
    def __init__(
        self,
        schedules: Sequence[Schedule],
        memories: Sequence[Memory],
        random: Random,
        segments: int = 3,  # of the longest chunk
        add: Callable = lambda left, right: left + right,
        divide: Callable = lambda value, size: value // size,
    ) -> None:
        self.workers = [Worker(s, m) for s, m in zip(schedules, memories, strict=True)]
        self.random, self.add, self.divide = random, add, divide
        self.channels: dict[tuple[int, int], deque[Message]] = {}
        self.queues: dict[Lane, deque[int]] = {}
        longest = max((w.length(chunk) for w in self.workers for chunk in range(len(w.schedule.chunks))), default=0)
        self.segment = max(1, -(-longest // segments))
        for worker in self.workers:
            worker.total = [max(1, -(-worker.length(s.chunk) // self.segment)) for s in worker.schedule.steps]
            for index, lane in enumerate(worker.lanes):
                self.queues.setdefault(lane, deque()).append(index)

    def run(self) -> None:
        """Run to the end. Raises Deadlock if no step can proceed."""
        waiting = [lane for lane, queue in self.queues.items() if self.workers[lane[1]].ready(queue[0])]
        queued = set(waiting)
        while waiting:
            pick = int(self.random.random() * len(waiting))
            waiting[pick], waiting[-1] = waiting[-1], waiting[pick]
            lane = waiting.pop()
            queued.discard(lane)
            for woken in self._advance(lane):
                if woken not in queued and self.queues[woken]:
                    queued.add(woken)
                    waiting.append(woken)
        stuck = {lane: queue[0] for lane, queue in self.queues.items() if queue}
        if stuck:
            raise Deadlock(f"{len(stuck)} lanes cannot move, among them {list(stuck.items())[:8]}")
        left = {channel for channel, messages in self.channels.items() if messages}
        if left:
            raise WrongMessage(f"nobody took the last message of {left}")

    def depth(self) -> int:
        """The longest chain of messages: the latency of the collective in hops."""
        return max((depth for worker in self.workers for depth in worker.depth), default=0)

    def _advance(self, lane: Lane) -> list[Lane]:
        """Execute one segment of the lane's first step, if it is ready. Returns the lanes that may be able to proceed."""
        kind, rank, peer = lane
        worker = self.workers[rank]
        index = self.queues[lane][0]
        if not worker.ready(index):
            return []
        step = worker.schedule.steps[index]
        for dependency in worker.schedule.dependencies[index]:
            worker.depth[index] = max(worker.depth[index], worker.depth[dependency.step])
        woken = [lane]
        if kind == "send":
            channel = self.channels.setdefault((rank, peer), deque())
            if channel:
                return []
            channel.append(self._seal(worker, step, worker.done[index], worker.depth[index] + 1))
            woken.append(("receive", peer, rank))
            if woken[-1] not in self.queues:
                raise WrongMessage(f"rank {peer} expects nothing from rank {rank}")
        elif kind == "receive":
            channel = self.channels.setdefault((peer, rank), deque())
            if not channel:
                return []
            message = channel.popleft()
            self._open(worker, step, worker.done[index], message)
            worker.depth[index] = max(worker.depth[index], message.depth)
            woken.append(("send", peer, rank))
        else:
            self._local(worker, step, worker.done[index])
        worker.done[index] += 1
        complete = worker.done[index] == worker.total[index]
        if complete:
            self.queues[lane].popleft()
        woken.extend(worker.lanes[f] for f, by_segment in worker.followers[index] if by_segment or complete)
        return woken

    def _read(self, worker: Worker, chunk: int, segment: int) -> list:
        first = segment * self.segment
        values = [memory[at] for memory, at in worker.views[chunk][first : first + self.segment]]
        assert None not in values, f"{worker.schedule.name}: rank {worker.schedule.rank} reads what nobody wrote"
        return values

    def _write(self, worker: Worker, chunk: int, segment: int, values: list) -> None:
        first = segment * self.segment
        for (memory, at), value in zip(worker.views[chunk][first : first + self.segment], values, strict=True):
            memory[at] = value

    def _seal(self, worker: Worker, step: Step, segment: int, depth: int) -> Message:
        values = self._read(worker, step.chunk, segment)
        if step.origin not in (-1, worker.schedule.rank):
            came = worker.sealed[step.origin, step.label, segment]  # KeyError: it has not received this ciphertext
            assert came == values, "the ciphertext that is passed on is not what this rank holds"
        return Message(step.label, step.origin, segment, worker.length(step.chunk), values, depth)

    def _open(self, worker: Worker, step: Step, segment: int, message: Message) -> None:
        expected = (step.label, step.origin, segment, worker.length(step.chunk))
        if message[:4] != expected:
            raise WrongMessage(f"{worker.schedule.name}: {message[:4]} came, {expected} was due")
        values = message.values
        if step.origin != -1:
            worker.sealed[step.origin, step.label, segment] = values
        if step.action == Action.REDUCE:
            mine = self._read(worker, step.other, segment)
            pairs = zip(values, mine, strict=True) if step.received_first else zip(mine, values, strict=True)
            values = [self.add(left, right) for left, right in pairs]
        self._write(worker, step.chunk, segment, values)

    def _local(self, worker: Worker, step: Step, segment: int) -> None:
        if step.action == Action.SCALE:
            values = [self.divide(value, worker.schedule.size) for value in self._read(worker, step.chunk, segment)]
        else:
            values = self._read(worker, step.other, segment)
        self._write(worker, step.chunk, segment, values)


def cut(values: list, parts: int) -> list[list]:
    """Divide values into parts whose lengths differ by at most one."""
    bounds = [len(values) * i // parts for i in range(parts + 1)]
    return [values[a:b] for a, b in pairwise(bounds)]


def links(schedule: Schedule) -> set[int]:
    return {step.peer for step in schedule.steps if step.peer >= 0}


def messages(schedule: Schedule) -> int:
    return sum(step.action == Action.SEND for step in schedule.steps)


def sent(schedule: Schedule, peer: int) -> list[tuple[int, int]]:
    """The messages to a peer: (label, origin), in order."""
    return [(s.label, s.origin) for s in schedule.steps if s.action == Action.SEND and s.peer == peer]


def received(schedule: Schedule, peer: int) -> list[tuple[int, int]]:
    actions = (Action.RECV, Action.REDUCE)
    return [(s.label, s.origin) for s in schedule.steps if s.action in actions and s.peer == peer]
