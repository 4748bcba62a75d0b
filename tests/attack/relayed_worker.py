"""What the worker processes run behind the relay, and how each checks its results."""

from __future__ import annotations

from datetime import timedelta
from random import Random
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringfence.collectives import Collective
from ringfence.errors import RingfenceError
from tests.attack.trials import REDUCING, SEND, CheckedRequest, expected_of, in_lane, random_tensor

SECONDS = 3.0  # the timeout of a request under attack
SMALL, LARGE = 40, 100_000  # elements; the large ones make several segments

CALLS = (
    (Collective.ALL_REDUCE, SMALL),
    (Collective.ALL_GATHER, LARGE),
    (SEND, LARGE),
    (Collective.BROADCAST, LARGE),
    (Collective.REDUCE_SCATTER, SMALL),
    (Collective.ALL_REDUCE, LARGE),
    (SEND, SMALL),
    (Collective.ALL_TO_ALL, SMALL),
)


class WorkerResult(NamedTuple):
    """The result of one worker."""

    faults: list[str]
    error: str = ""  # the type of the first exception, if any
    message: str = ""


def run_calls(seed: int, seconds: float) -> WorkerResult:
    """Run all calls, alternating between two communicators, until one raises; `seconds` is the timeout of each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.group.WORLD.set_timeout(timedelta(seconds=seconds))
    twin = dist.new_group(timeout=timedelta(seconds=seconds))
    random = Random(seed)
    for number, (kind, count) in enumerate(CALLS):
        parts = [[random_tensor(random, count) for _ in range(size)] for _ in range(size)]
        if kind in REDUCING:
            parts = [[in_lane(part, owner) for part in parts[owner]] for owner in range(size)]
        checked = _run_call(kind, parts, rank, twin if number % 2 else dist.group.WORLD)
        faults = [fault for each in checked if (fault := each.fault())]
        error = checked[0].request.error
        if faults or error is not None:
            return WorkerResult(faults, type(error).__name__, str(error))
    return WorkerResult([])


def probe() -> str:
    """Return the error type if the session has failed on this worker, or an empty string."""
    try:
        dist.barrier()
    except RingfenceError as error:
        return type(error).__name__
    return ""


def train(steps: int) -> tuple[int, str]:
    """Train with DDP, which waits on futures; return the step that raised and the message."""
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


class _CompletedOperation:
    """An request that has returned or raised."""

    done = True

    def __init__(self, description: str) -> None:
        self.error: Exception | None = None
        self._description = description

    def describe(self) -> str:
        return self._description


def _run_call(
    kind: int, parts: list[list[torch.Tensor]], rank: int, communicator: dist.ProcessGroup
) -> list[CheckedRequest]:
    size = len(parts)
    mine = [part.clone() for part in parts[rank]]
    left, right = (rank - 1) % size, (rank + 1) % size
    expected = parts[left][0] if kind == SEND else expected_of(Collective(kind), 0, rank, parts)
    whole = kind in (Collective.ALL_REDUCE, Collective.BROADCAST)
    target = mine[0] if whole else random_tensor(Random(rank), len(expected))
    ended = _CompletedOperation(f"call of kind {kind}")
    checked = CheckedRequest(ended, target, target.clone(), expected)
    try:
        match kind:
            case Collective.ALL_REDUCE:
                dist.all_reduce(target, group=communicator)
            case Collective.BROADCAST:
                dist.broadcast(target, 0, group=communicator)
            case Collective.ALL_GATHER:
                dist.all_gather_into_tensor(target, mine[0], group=communicator)
            case Collective.REDUCE_SCATTER:
                dist.reduce_scatter_tensor(target, torch.cat(mine), group=communicator)
            case Collective.ALL_TO_ALL:
                dist.all_to_all_single(target, torch.cat(mine), group=communicator)
            case _:
                sending = dist.isend(mine[0], right, group=communicator)
                dist.recv(target, left, group=communicator)
                sending.wait()
    except RingfenceError as error:
        ended.error = error
    return [checked]
