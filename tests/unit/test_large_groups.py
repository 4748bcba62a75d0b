"""The schedules of large tensors in groups of thousands: every worker's result, against a plain sum.

Segments and the order of events do not grow with a group, and are tested in small ones: here a message travels whole, and each
worker executes its steps in program order.
"""

from __future__ import annotations

from collections import defaultdict, deque

import pytest
import torch

from ringfence.collectives import Action, Buffer, Schedule, ScheduleId, build
from ringfence.machines import Machines, spread

Memory = list[torch.Tensor]  # by Buffer; one element for each part

TOGETHER = (
    ScheduleId.ALL_REDUCE_HALVING,
    ScheduleId.REDUCE_SCATTER_HALVING,
    ScheduleId.ALL_GATHER_DOUBLING,
)
APART = (
    ScheduleId.ALL_REDUCE_HALVING_APART,
    ScheduleId.REDUCE_SCATTER_HALVING_APART,
    ScheduleId.ALL_GATHER_DOUBLING_APART,
)
TWO_LEVELS = (
    ScheduleId.ALL_REDUCE_TWO_LEVELS_HALVING,
    ScheduleId.REDUCE_SCATTER_TWO_LEVELS_HALVING,
    ScheduleId.ALL_GATHER_TWO_LEVELS_DOUBLING,
)


def execute(schedules: list[Schedule], memories: list[Memory]) -> None:
    """Execute the schedules of all ranks; a worker stops where a message is due that nobody has sent yet."""
    channels: dict[tuple[int, int], deque[tuple[int, torch.Tensor]]] = defaultdict(deque)
    at = [0] * len(schedules)
    waiting: dict[tuple[int, int], int] = {}  # who waits for a message of whom
    ready = deque(range(len(schedules)))
    while ready:
        rank = ready.popleft()
        schedule, memory = schedules[rank], memories[rank]

        def part(chunk: int, schedule: Schedule = schedule, memory: Memory = memory) -> torch.Tensor:
            buffer, first, parts = schedule.chunks[chunk]
            return memory[buffer][first : first + parts]

        while at[rank] < len(schedule.steps):
            step = schedule.steps[at[rank]]
            if step.action is Action.SEND:
                channels[rank, step.peer].append((step.label, part(step.chunk).clone()))
                if waiting.pop((step.peer, rank), None) is not None:
                    ready.append(step.peer)
            elif step.action is Action.COPY:
                part(step.chunk).copy_(part(step.other))
            else:
                assert step.action is not Action.SCALE
                messages = channels[step.peer, rank]
                if not messages:
                    waiting[rank, step.peer] = rank
                    break
                label, values = messages.popleft()
                assert label == step.label
                part(step.chunk).copy_(values if step.action is Action.RECV else values + part(step.other))
            at[rank] += 1
    assert all(place == len(schedule.steps) for place, schedule in zip(at, schedules, strict=True)), "deadlock"
    assert not any(channels.values()), "a message that nobody took"


def check(identifier: ScheduleId, size: int, machines: Machines = ()) -> None:
    make = build.__wrapped__  # without the cache, which would keep thousands of schedules alive
    schedules = [make(identifier, size, rank, 0, False, True, machines) for rank in range(size)]
    values = torch.randint(-(2**16), 2**16, (size, size), dtype=torch.int32)
    sums = values.sum(0, dtype=torch.int32)
    memories: list[Memory] = []
    for rank, schedule in enumerate(schedules):
        memory = [torch.full((parts,), -(2**31), dtype=torch.int32) for parts in schedule.cuts]
        if memory[Buffer.DATA].numel():
            memory[Buffer.DATA] = values[rank].clone()
        if "GATHER" in identifier.name:
            memory[Buffer.INPUT] = values[0, rank : rank + 1].clone()
        elif memory[Buffer.INPUT].numel():
            memory[Buffer.INPUT] = values[rank]
        memories.append(memory)
    execute(schedules, memories)
    for rank, memory in enumerate(memories):
        if "GATHER" in identifier.name:
            assert torch.equal(memory[Buffer.OUTPUT], values[0])
        elif "SCATTER" in identifier.name:
            assert torch.equal(memory[Buffer.OUTPUT], sums[rank : rank + 1])
        else:
            assert torch.equal(memory[Buffer.DATA], sums)


@pytest.mark.parametrize("size", [259, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1024, 2049, 4096))])
@pytest.mark.parametrize("identifier", TOGETHER, ids=lambda i: i.name.lower())
def test_parts_that_travel_together(identifier: ScheduleId, size: int) -> None:
    check(identifier, size)


@pytest.mark.parametrize("size", [67, *(pytest.param(n, marks=pytest.mark.nightly) for n in (512, 1025))])
@pytest.mark.parametrize("identifier", APART, ids=lambda i: i.name.lower())
def test_parts_that_travel_apart(identifier: ScheduleId, size: int) -> None:
    check(identifier, size)


@pytest.mark.parametrize(
    "shape", [(17, 4), *(pytest.param(s, marks=pytest.mark.nightly) for s in ((128, 8), (512, 8), (1025, 3)))], ids=str
)
@pytest.mark.parametrize("identifier", TWO_LEVELS, ids=lambda i: i.name.lower())
def test_two_levels(identifier: ScheduleId, shape: tuple[int, int]) -> None:
    count, workers = shape
    check(identifier, count * workers, spread(rank // workers for rank in range(count * workers)))
