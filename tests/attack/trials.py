"""Collectives whose result can be checked: expected, untouched, or something that must not be there.

Every element is an int64 of four 16-bit lanes. In a reduction rank r fills lane r only, so that any honest partial sum
is the expected sum with some lanes still zero. A changed bit is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ringfence.backend.binding import dtype_code, reduction_of
from ringfence.collectives import Buffer, Collective, choose, divide
from ringfence.dataplane.buffers import as_bytes
from ringfence.dataplane.request import POINT_TO_POINT, CollectiveRequest, Request
from ringfence.link.frames import Call
from ringfence.runtime.communicator import Communicator
from ringfence.runtime.point_to_point import Transfer
from tests.memory_cluster import engine_of

SECONDS = 10.0  # the timeout of every request
LANES = 4  # so there are at most four ranks

SEND = -1  # beside the kinds of collectives: every rank sends to the next and receives from the previous
REDUCING = (Collective.ALL_REDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER)
WHOLE = (Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST)  # one tensor, in place
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
class GroupCall:
    """One collective of all ranks of one communicator."""

    communicator: int
    kind: int
    elements: int  # of one part
    root: int = 0


class Completion(Protocol):
    """A request that may have ended, with or without an error."""

    done: bool
    error: Any

    def describe(self) -> str: ...


@dataclass
class CheckedRequest:
    """One rank's request, the tensor that it writes, and the contents that are allowed there."""

    request: Completion
    target: torch.Tensor
    old: torch.Tensor
    expected: torch.Tensor

    def fault(self) -> str | None:
        """Return what is wrong, or None. No attack may cause a fault."""
        if not self.request.done:
            return f"{self.request.describe()} hangs"
        if self.request.error is None:
            return None if torch.equal(self.target, self.expected) else f"{self.request.describe()}: wrong result"
        found, wanted = lanes(self.target), lanes(self.expected)
        honest = ((found == 0) | (found == wanted)).all(1) | (self.target == self.old)
        return None if bool(honest.all()) else f"{self.request.describe()}: a failed segment left data behind"


def lanes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16).view(-1, LANES)


def random_tensor(random: Random, count: int) -> torch.Tensor:
    """Return random values without a zero lane, whose sum overflows no lane."""
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    return torch.randint(1, 1 << 15, (count, LANES), generator=generator).to(torch.int16).view(torch.int64).view(-1)


def in_lane(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a copy with all lanes but this rank's set to zero."""
    kept = torch.zeros_like(tensor)
    lanes(kept)[:, rank] = lanes(tensor)[:, rank]
    return kept


def submit(spec: GroupCall, communicators: Sequence[Communicator], random: Random) -> list[CheckedRequest]:
    """Submit a call on every rank."""
    if spec.kind == SEND:
        return _send_and_receive(spec, communicators, random)
    return _collective(spec, communicators, random)


def _send_and_receive(spec: GroupCall, communicators: Sequence[Communicator], random: Random) -> list[CheckedRequest]:
    size = len(communicators)
    payloads = [random_tensor(random, spec.elements) for _ in communicators]
    call = Call(POINT_TO_POINT, dtype=dtype_code(torch.int64), elements=spec.elements, tag=spec.root)
    checked = []
    for rank, communicator in enumerate(communicators):
        engine, mine = engine_of(communicator), payloads[rank]
        deadline = engine.clock() + SECONDS
        send = Transfer(call, deadline, mine, as_bytes(mine))
        target = random_tensor(random, spec.elements)
        old = target.clone()
        receive = Transfer(call, deadline, target, as_bytes(target))
        engine.send(communicator, send, (rank + 1) % size)
        engine.receive(communicator, receive, (rank - 1) % size)
        checked += [
            CheckedRequest(send, mine, mine.clone(), mine.clone()),
            CheckedRequest(receive, target, old, payloads[(rank - 1) % size].clone()),
        ]
    return checked


def _collective(spec: GroupCall, communicators: Sequence[Communicator], random: Random) -> list[CheckedRequest]:
    kind, size, count = Collective(spec.kind), len(communicators), spec.elements
    # parts[r][p]: what rank r holds for part p
    parts = [[random_tensor(random, count) for _ in range(size)] for _ in range(size)]
    if kind in REDUCING:
        parts = [[in_lane(part, rank) for part in parts[rank]] for rank in range(size)]
    checked = []
    for rank, communicator in enumerate(communicators):
        expected = expected_of(kind, spec.root, rank, parts)
        target = parts[rank][0].clone() if kind in WHOLE else random_tensor(random, len(expected))
        checked.append(
            CheckedRequest(_submit_one(communicator, spec, parts[rank], target), target, target.clone(), expected)
        )
    return checked


def _submit_one(
    communicator: Communicator, spec: GroupCall, given: list[torch.Tensor], target: torch.Tensor
) -> Request:
    """Bind one rank's tensors as the backend does, and submit the request."""
    kind, rank, root = Collective(spec.kind), communicator.rank, spec.root
    if kind in (Collective.ALL_REDUCE, Collective.BROADCAST):
        parts = {Buffer.DATA: [target]}
    elif kind is Collective.REDUCE:
        parts = {Buffer.INPUT: [target], **({Buffer.OUTPUT: [target]} if rank == root else {})}
    else:
        parts = {}
        if kind is not Collective.SCATTER or rank == root:
            parts[Buffer.INPUT] = given[:1] if kind in GATHERING else given
        if len(target):
            parts[Buffer.OUTPUT] = list(target.split(spec.elements))
    elements = (
        spec.elements if kind in (*WHOLE, Collective.GATHER, Collective.SCATTER) else spec.elements * communicator.size
    )
    weight = 8 * spec.elements * (1 if kind in WHOLE else communicator.size)
    code, combine, _ = reduction_of(dist.ReduceOp.SUM, torch.int64) if kind in REDUCING else (0, None, False)
    schedule = choose(kind, communicator.size, rank, root, weight, communicator.table, adjacent=False)
    call = Call(kind, code, dtype_code(torch.int64), schedule.identifier, root, elements)
    passes = divide(kind, communicator.size, 8 * spec.elements, communicator.table)
    bound = {buffer: [as_bytes(tensor) for tensor in tensors] for buffer, tensors in parts.items()}
    deadline = communicator.context.platform.clock() + SECONDS
    request = CollectiveRequest(call, deadline, (parts, target), schedule, passes, bound, torch.int64, combine)
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
