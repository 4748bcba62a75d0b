"""Collectives whose outcome can be verified: right, old, or something that should not be there.

Every element is an int64 of four 16-bit lanes. In a reduction rank r fills lane r only, so that any honest partial sum
is the expected sum with some lanes still zero; a single changed bit is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ringfence.backend.binding import dtype_code, even_parts, parts_of, reduction_of
from ringfence.collectives import Buffer, Collective, choose
from ringfence.dataplane.request import POINT_TO_POINT, CollectiveRequest, Request
from ringfence.link.frames import Call
from ringfence.runtime.communicator import Communicator
from ringfence.runtime.point_to_point import Transfer
from tests.memory_cluster import engine_of

SECONDS = 10.0  # the operations' timeout
LANES = 4  # so there are at most four ranks

SEND = -1  # beside the kinds of collectives: every rank sends to its right and receives from its left
REDUCING = (Collective.ALL_REDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER)
WHOLE = (Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST)  # about one tensor, in place
GATHERING = (Collective.ALL_GATHER, Collective.GATHER)
KINDS = (
    Collective.ALL_REDUCE,
    Collective.BROADCAST,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.REDUCE,
    Collective.GATHER,
    Collective.SCATTER,
    Collective.ALL_TO_ALL,
    SEND,
)


@dataclass(frozen=True)
class Round:
    """One collective of all ranks of one group."""

    communicator: int
    kind: int
    elements: int  # of one part
    root: int = 0


class Ending(Protocol):
    """What is known of an operation: whether it has ended, and how."""

    done: bool
    error: Any

    def describe(self) -> str: ...


@dataclass
class Watched:
    """One rank's operation, and the memory it writes with what may be found there."""

    request: Ending
    target: torch.Tensor
    old: torch.Tensor
    expected: torch.Tensor

    def fault(self) -> str | None:
        """What is wrong, if anything: the invariant that no attack may break."""
        if not self.request.done:
            return f"{self.request.describe()} hangs"
        if self.request.error is None:
            return None if torch.equal(self.target, self.expected) else f"{self.request.describe()}: wrong numbers"
        found, wanted = lanes(self.target), lanes(self.expected)
        honest = ((found == 0) | (found == wanted)).all(1) | (self.target == self.old)
        return None if bool(honest.all()) else f"{self.request.describe()}: a failed segment left something behind"


def lanes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16).view(-1, LANES)


def numbers(draw: Random, count: int) -> torch.Tensor:
    """No lane is zero, and the sum of such numbers overflows nowhere."""
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    return torch.randint(1, 1 << 15, (count, LANES), generator=generator).to(torch.int16).view(torch.int64).view(-1)


def in_lane(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Only the lane of this rank."""
    kept = torch.zeros_like(tensor)
    lanes(kept)[:, rank] = lanes(tensor)[:, rank]
    return kept


def submit(play: Round, communicators: Sequence[Communicator], draw: Random) -> list[Watched]:
    """Begin a round on every rank."""
    if play.kind == SEND:
        return _exchange(play, communicators, draw)
    return _collective(play, communicators, draw)


def _exchange(play: Round, communicators: Sequence[Communicator], draw: Random) -> list[Watched]:
    size = len(communicators)
    payloads = [numbers(draw, play.elements) for _ in communicators]
    call = Call(POINT_TO_POINT, dtype=dtype_code(torch.int64), elements=play.elements, tag=play.root)
    watched = []
    for rank, communicator in enumerate(communicators):
        engine, mine = engine_of(communicator), payloads[rank]
        deadline = engine.clock() + SECONDS
        send = Transfer(call, deadline, mine, parts_of(None, Buffer.DATA, [mine])[0])
        target = numbers(draw, play.elements)
        old = target.clone()
        receive = Transfer(call, deadline, target, parts_of(None, Buffer.DATA, [target])[0])
        engine.send(communicator, send, (rank + 1) % size)
        engine.receive(communicator, receive, (rank - 1) % size)
        watched += [
            Watched(send, mine, mine.clone(), mine.clone()),
            Watched(receive, target, old, payloads[(rank - 1) % size].clone()),
        ]
    return watched


def _collective(play: Round, communicators: Sequence[Communicator], draw: Random) -> list[Watched]:
    kind, size, count = Collective(play.kind), len(communicators), play.elements
    # parts[r][p]: what rank r holds for part p
    parts = [[numbers(draw, count) for _ in range(size)] for _ in range(size)]
    if kind in REDUCING:
        parts = [[in_lane(part, rank) for part in parts[rank]] for rank in range(size)]
    watched = []
    for rank, communicator in enumerate(communicators):
        expected = expected_of(kind, play.root, rank, parts)
        target = parts[rank][0].clone() if kind in WHOLE else numbers(draw, len(expected))
        watched.append(Watched(_begin(communicator, play, parts[rank], target), target, target.clone(), expected))
    return watched


def _begin(communicator: Communicator, play: Round, given: list[torch.Tensor], target: torch.Tensor) -> Request:
    """Bind one rank's memory as the backend does, and submit it."""
    kind, rank, root = Collective(play.kind), communicator.rank, play.root
    if kind in (Collective.ALL_REDUCE, Collective.BROADCAST):
        parts = {Buffer.DATA: [target]}
    elif kind is Collective.REDUCE:
        parts = {Buffer.INPUT: [target], **({Buffer.OUTPUT: [target]} if rank == root else {})}
    else:
        parts = {}
        if kind is not Collective.SCATTER or rank == root:
            parts[Buffer.INPUT] = given[:1] if kind in GATHERING else given
        if len(target):
            parts[Buffer.OUTPUT] = even_parts(target, len(target) // play.elements)
    elements = (
        play.elements if kind in (*WHOLE, Collective.GATHER, Collective.SCATTER) else play.elements * communicator.size
    )
    weight = 8 * play.elements * (1 if kind in WHOLE else communicator.size)
    code, combine, _ = reduction_of(dist.ReduceOp.SUM, torch.int64) if kind in REDUCING else (0, None, False)
    schedule = choose(kind, communicator.size, rank, root, weight, communicator.table)
    call = Call(kind, code, dtype_code(torch.int64), schedule.identifier, root, elements)
    bound = {buffer: parts_of(schedule, buffer, tensors) for buffer, tensors in parts.items()}
    deadline = communicator.context.platform.clock() + SECONDS
    request = CollectiveRequest(call, deadline, (parts, target), schedule, bound, torch.int64, combine)
    engine_of(communicator).submit(communicator, request)
    return request


def expected_of(kind: Collective, root: int, rank: int, parts: list[list[torch.Tensor]]) -> torch.Tensor:
    ranks = range(len(parts))
    match kind:
        case Collective.ALL_REDUCE:
            return sum_of([parts[r][0] for r in ranks])
        case Collective.REDUCE:
            return sum_of([parts[r][0] for r in ranks]) if rank == root else parts[rank][0].clone()
        case Collective.BROADCAST:
            return parts[root][0].clone()
        case Collective.REDUCE_SCATTER:
            return sum_of([parts[r][rank] for r in ranks])
        case Collective.SCATTER:
            return parts[root][rank].clone()
        case Collective.ALL_TO_ALL:
            return torch.cat([parts[r][rank] for r in ranks])
        case Collective.ALL_GATHER:
            return torch.cat([parts[r][0] for r in ranks])
        case Collective.GATHER:
            return torch.cat([parts[r][0] for r in ranks]) if rank == root else torch.empty(0, dtype=torch.int64)
    raise ValueError(kind)


def sum_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors)).sum(0)
