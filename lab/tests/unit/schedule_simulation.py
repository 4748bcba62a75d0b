"""Simulates a schedule on every rank, event by event: slow and exact. The planner's closed form is compared with it.

Each rank has its threads and its node's cores, each node a card for what leaves and one for what comes. A worker serves its
links in turn, a segment each, as the runtime does. What a step waits for is what the schedule says: the same dependencies, by
segment or whole, that the runtime obeys. It leaves out what a calibration adds for waiting threads and small caches.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Final

from ringfence.collectives import ScheduleId, build
from ringfence.collectives.schedule import Action, Schedule
from ringfence.keys import SHARED_FROM_BYTES
from ringfence_lab.plan.cost import shared_by
from ringfence_lab.plan.hardware import Hardware
from ringfence_lab.plan.schedules import machines_of, share, step_tasks
from ringfence_lab.plan.work import ON_THE_WIRE, StageCosts, Variant, segments, stage_costs

_LOCAL: Final = (Action.COPY, Action.SCALE)


def _written(schedule: Schedule, machine: set[int]) -> set[int]:
    """Return the SENDs inside a machine that copy to shared memory."""
    return {index for index, task in enumerate(step_tasks(schedule, machine)) if task.copies}


class Simulation:
    """One collective in a group of workers."""

    def __init__(
        self,
        hardware: Hardware,
        variant: Variant,
        identifier: ScheduleId,
        size: int,
        whole: float,
        threads: int = 1,
    ) -> None:
        self._hardware = hardware
        self._variant = variant
        self._costs: StageCosts = stage_costs(hardware, variant)
        machines = machines_of(size, shared_by(hardware)) if variant.shares else ()
        self._schedules = [build(identifier, size, rank, machines=machines) for rank in range(size)]
        self._machine = [next((set(each) for each in machines if rank in each), set[int]()) for rank in range(size)]
        self._written = [_written(each, near) for each, near in zip(self._schedules, self._machine, strict=True)]
        self._whole = whole
        self._per_node = max(1, int(hardware["node", "workers"]))
        self._idle = [threads] * size
        nodes = -(-size // self._per_node)
        cores = max(1, int(hardware["node", "cores"]))
        self._cores = [cores] * nodes
        self._wanting: list[deque[int]] = [deque() for _ in range(nodes)]  # ranks that have work and found no core
        self._ready: list[deque[tuple[int, deque[tuple[int, int]]]]] = [deque() for _ in range(size)]
        self._queues: list[dict[int, deque[tuple[int, int]]]] = [{} for _ in range(size)]
        self._leaving = [0.0] * nodes
        self._arriving = [0.0] * nodes
        sharing = max(0.0, min(size, self._per_node) / cores - 1)
        self._switch = self._costs.switch * sharing
        self._events: list[tuple[float, int, int, int, int, bool]] = []
        self._ticket = 0
        self._prepare()

    def _prepare(self) -> None:
        self._pieces: list[list[tuple[float, int]]] = []
        self._waits: list[list[list[int]]] = []  # by rank, step, segment: how many things it still waits for
        self._wakes: list[dict[tuple[int, int], list[tuple[int, int]]]] = []
        self._targets: dict[tuple[int, int], tuple[int, int]] = {}  # (rank, send step) -> (peer, its step)
        for schedule in self._schedules:
            lengths = [share(schedule, place) * self._whole for place in schedule.chunks]
            pieces = [segments(self._variant, lengths[step.chunk]) for step in schedule.steps]
            self._pieces.append(pieces)
            self._waits.append([[0] * count for _, count in pieces])
            self._wakes.append({})
        self._match()
        for rank, schedule in enumerate(self._schedules):
            self._depend(rank, schedule)

    def _match(self) -> None:
        """Match the k-th SEND to a peer with the peer's k-th RECV or REDUCE from this rank."""
        receives: dict[tuple[int, int], list[int]] = {}
        for rank, schedule in enumerate(self._schedules):
            for index, step in enumerate(schedule.steps):
                if step.action in (Action.RECV, Action.REDUCE):
                    receives.setdefault((step.peer, rank), []).append(index)
        for rank, schedule in enumerate(self._schedules):
            seen: dict[int, int] = {}
            for index, step in enumerate(schedule.steps):
                if step.action is Action.SEND:
                    number = seen.get(step.peer, 0)
                    seen[step.peer] = number + 1
                    self._targets[rank, index] = (step.peer, receives[rank, step.peer][number])

    def _depend(self, rank: int, schedule: Schedule) -> None:
        before: dict[int, tuple[int, int]] = {}  # by peer: the last segment that goes to it
        for index, step in enumerate(schedule.steps):
            count = self._pieces[rank][index][1]
            for segment in range(count):
                for dependency in schedule.dependencies[index]:
                    others = self._pieces[rank][dependency.step][1]
                    if dependency.by_segment and others == count:
                        self._wait(rank, (dependency.step, segment), (index, segment))
                    else:
                        for other in range(others):
                            self._wait(rank, (dependency.step, other), (index, segment))
                if step.action is Action.SEND:
                    if step.peer in before:
                        self._wait(rank, before[step.peer], (index, segment))
                    before[step.peer] = (index, segment)
                elif step.action not in _LOCAL:
                    self._waits[rank][index][segment] += 1  # for the message itself

    def _wait(self, rank: int, earlier: tuple[int, int], later: tuple[int, int]) -> None:
        self._wakes[rank].setdefault(earlier, []).append(later)
        self._waits[rank][later[0]][later[1]] += 1

    def seconds(self) -> float:
        """Run the simulation; return when the last worker is done."""
        for rank in range(len(self._schedules)):
            for index, row in enumerate(self._waits[rank]):
                for segment, waiting in enumerate(row):
                    if not waiting:
                        self._queue(0.0, rank, index, segment)
        last = 0.0
        while self._events:
            last, _, rank, index, segment, done = heapq.heappop(self._events)
            if done:
                self._end(last, rank, index, segment)
            else:
                self._release(last, rank, (index, segment))
        return last

    def _put(self, when: float, rank: int, index: int, segment: int, done: bool) -> None:
        self._ticket += 1
        heapq.heappush(self._events, (when, self._ticket, rank, index, segment, done))

    def _queue(self, now: float, rank: int, index: int, segment: int) -> None:
        """Queue a segment behind others of its link; links take turns."""
        step = self._schedules[rank].steps[index]
        link = 2 * step.peer + (step.action is Action.SEND)
        queue = self._queues[rank].setdefault(link, deque())
        queue.append((index, segment))
        if len(queue) == 1:
            self._ready[rank].append((link, queue))
        self._start(now, rank)

    def _start(self, now: float, rank: int) -> None:
        """Start ready segments while the worker has a free thread and its node a free core."""
        node = rank // self._per_node
        while self._ready[rank] and self._idle[rank]:
            if not self._cores[node]:
                if rank not in self._wanting[node]:
                    self._wanting[node].append(rank)
                return
            link, queue = self._ready[rank].popleft()
            index, segment = queue.popleft()
            if queue:
                self._ready[rank].append((link, queue))
            self._idle[rank] -= 1
            self._cores[node] -= 1
            self._put(now + self._spent(rank, index), rank, index, segment, True)

    def _end(self, now: float, rank: int, index: int, segment: int) -> None:
        node = rank // self._per_node
        self._idle[rank] += 1
        self._cores[node] += 1
        if (rank, index) in self._targets:
            self._leave(now, rank, index, segment)
        for later in self._wakes[rank].get((index, segment), ()):
            self._release(now, rank, later)
        if self._ready[rank] and rank not in self._wanting[node]:
            self._wanting[node].append(rank)
        while self._wanting[node] and self._cores[node]:
            self._start(now, self._wanting[node].popleft())

    def _spent(self, rank: int, index: int) -> float:
        schedule, spent = self._schedules[rank], self._costs
        step, length = schedule.steps[index], self._pieces[rank][index][0]
        if step.peer in self._machine[rank]:
            adding = spent.reduce if step.action is Action.REDUCE else 0.0
            copies = index in self._written[rank] or step.action is Action.RECV
            message = spent.near_message if length >= SHARED_FROM_BYTES else spent.message
            return message + length * (adding + (spent.near_copy if copies else 0.0))
        if step.action is Action.SEND:
            seals = step.origin in (-1, rank) or not self._variant.forwards
            return spent.message + length * (spent.send + (spent.seal if seals else 0.0))
        if step.action in _LOCAL:
            return length * spent.copy
        adding = spent.reduce if step.action is Action.REDUCE else 0.0
        return spent.message + length * (spent.receive + spent.open + adding)

    def _leave(self, now: float, rank: int, index: int, segment: int) -> None:
        """Send a segment through both network cards, unless the peer is in the same node."""
        peer, theirs = self._targets[rank, index]
        here, there = rank // self._per_node, peer // self._per_node
        latency = self._switch
        arrived = now
        if here != there:
            spent = self._pieces[rank][index][0] * ON_THE_WIRE / self._hardware["network", "rate"]
            left = max(now, self._leaving[here]) + spent
            self._leaving[here] = left
            arrived = max(left, self._arriving[there] + spent)
            self._arriving[there] = arrived
            latency += self._hardware["network", "latency"]
        self._put(arrived + latency, peer, theirs, segment, False)

    def _release(self, now: float, rank: int, later: tuple[int, int]) -> None:
        index, segment = later
        self._waits[rank][index][segment] -= 1
        if not self._waits[rank][index][segment]:
            self._queue(now, rank, index, segment)
