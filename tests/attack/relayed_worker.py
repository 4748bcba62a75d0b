"""What the worker processes do behind the relay, and how each verifies what it got."""

from __future__ import annotations

import time
from datetime import timedelta
from random import Random
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringfence.collectives import Collective
from ringfence.errors import RingfenceError
from tests.attack.trials import REDUCING, SEND, Watched, expected_of, in_lane, numbers

SECONDS = 3.0  # the timeout of every operation
SMALL, LARGE = 40, 100_000  # elements; the large ones make several segments

PLAYS = (
    (Collective.ALL_REDUCE, SMALL),
    (Collective.ALL_GATHER, LARGE),
    (SEND, LARGE),
    (Collective.BROADCAST, LARGE),
    (Collective.REDUCE_SCATTER, SMALL),
    (Collective.ALL_REDUCE, LARGE),
    (SEND, SMALL),
    (Collective.ALL_TO_ALL, SMALL),
)


class Verdict(NamedTuple):
    """How a worker fared."""

    faults: list[str]
    error: str = ""  # the type of the first exception, if any
    message: str = ""
    seconds: float = 0.0  # the longest that an operation took to end


def play(seed: int) -> Verdict:
    """All rounds, in two groups by turns, until one of them raises."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.group.WORLD.set_timeout(timedelta(seconds=SECONDS))
    twin = dist.new_group(timeout=timedelta(seconds=SECONDS))
    draw = Random(seed)
    longest = 0.0
    for number, (kind, count) in enumerate(PLAYS):
        parts = [[numbers(draw, count) for _ in range(size)] for _ in range(size)]
        if kind in REDUCING:
            parts = [[in_lane(part, owner) for part in parts[owner]] for owner in range(size)]
        started = time.monotonic()
        seen = _round(kind, parts, rank, twin if number % 2 else dist.group.WORLD)
        longest = max(longest, time.monotonic() - started)
        faults = [fault for each in seen if (fault := each.fault())]
        error = seen[0].request.error
        if faults or error is not None:
            return Verdict(faults, type(error).__name__, str(error), longest)
    return Verdict([], seconds=longest)


def once_more() -> str:
    """Whether this worker knows by now that the session is over."""
    try:
        dist.barrier()
    except RingfenceError as error:
        return type(error).__name__
    return ""


def train(steps: int) -> tuple[int, str]:
    """DDP, which learns of a collective's end through a future: after how many steps did it raise, and what?"""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        try:
            optimizer.zero_grad()
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
        except RuntimeError as error:
            return step, str(error)
    return steps, ""


class _Ended:
    """An operation that has returned or raised."""

    done = True

    def __init__(self, what: str) -> None:
        self.error: Exception | None = None
        self._what = what

    def describe(self) -> str:
        return self._what


def _round(kind: int, parts: list[list[torch.Tensor]], rank: int, group: dist.ProcessGroup) -> list[Watched]:
    size = len(parts)
    mine = [part.clone() for part in parts[rank]]
    left, right = (rank - 1) % size, (rank + 1) % size
    expected = parts[left][0] if kind == SEND else expected_of(Collective(kind), 0, rank, parts)
    whole = kind in (Collective.ALL_REDUCE, Collective.BROADCAST)
    target = mine[0] if whole else numbers(Random(rank), len(expected))
    ended = _Ended(f"round of kind {kind}")
    watched = Watched(ended, target, target.clone(), expected)
    try:
        match kind:
            case Collective.ALL_REDUCE:
                dist.all_reduce(target, group=group)
            case Collective.BROADCAST:
                dist.broadcast(target, 0, group=group)
            case Collective.ALL_GATHER:
                dist.all_gather_into_tensor(target, mine[0], group=group)
            case Collective.REDUCE_SCATTER:
                dist.reduce_scatter_tensor(target, torch.cat(mine), group=group)
            case Collective.ALL_TO_ALL:
                dist.all_to_all_single(target, torch.cat(mine), group=group)
            case _:
                sending = dist.isend(mine[0], right, group=group)
                dist.recv(target, left, group=group)
                sending.wait()
    except RingfenceError as error:
        ended.error = error
    return [watched]
