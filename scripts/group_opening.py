"""Measure what opening a group costs: `python -m scripts.group_opening [members ...]`.

Real engines with real keys and sealing open one group in memory. Rounds are messages that wait for each other: on a network
each takes half a round trip, and the first message of a link a round trip more. CPU time includes the links' handshakes.
"""

from __future__ import annotations

import argparse
import collections
import json
import time

import torch

from ringfence.collectives import Action, ScheduleId, build
from ringfence.transport.in_memory import Pipe
from ringfence_lab.bench.machine import facts
from tests.memory_cluster import World


def rounds(size: int) -> int:
    """The longest chain of messages that wait for each other, over the schedules of all members."""
    schedules = [build.__wrapped__(ScheduleId.GROUP_OPENING, size, rank) for rank in range(size)]
    heard: dict[tuple[int, int, int], int] = {}  # (sender, receiver, label): its place in the longest chain
    places, depths = [0] * size, [0] * size
    waiting = collections.deque(range(size))
    while waiting:
        rank = waiting.popleft()
        steps = schedules[rank].steps
        while places[rank] < len(steps):
            step = steps[places[rank]]
            if step.action is Action.SEND:
                heard[rank, step.peer, step.label] = depths[rank] + 1
                waiting.append(step.peer)
            elif (step.peer, rank, step.label) in heard:
                depths[rank] = max(depths[rank], heard[step.peer, rank, step.label])
            else:
                break
            places[rank] += 1
    assert all(place == len(schedule.steps) for place, schedule in zip(places, schedules, strict=True))
    return max(depths)


def measure(size: int) -> dict[str, float]:
    """Open a group of all workers and count what the wires carry."""
    world = World(size, capacity=1 << 16)
    carried = collections.Counter[int]()

    def count(pipe: Pipe, data: bytes) -> bytes:
        carried[pipe.sender] += len(data)
        return data

    began = time.process_time()
    for communicator in world.communicators.values():
        communicator._open()
    opened = world.communicators.values()
    while not all(communicator._opened for communicator in opened):
        for engine in world.engines:
            engine.run_ready()
        assert world.wires.deliver(count) or any(engine.ready for engine in world.engines)
    seconds = time.process_time() - began
    assert len({communicator.instance for communicator in opened}) == 1
    return {
        "members": size,
        "rounds": rounds(size),
        "bytes_mean": sum(carried.values()) / size,
        "bytes_most": max(carried.values()),
        "cpu_seconds_mean": seconds / size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("members", type=int, nargs="*", default=[2, 8, 256, 4096])
    torch.set_num_threads(1)
    print(
        json.dumps({"machine": facts(), "openings": [measure(size) for size in parser.parse_args().members]}, indent=2)
    )


if __name__ == "__main__":
    main()
