"""Every collective, bound for one rank of a memory cluster, with its expected result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ringfence.backend.binding import bytes_of, dtype_code, reduction_of
from ringfence.collectives import Buffer, Collective, Thresholds, choose, divide
from ringfence.dataplane.buffers import as_bytes
from ringfence.dataplane.request import POINT_TO_POINT, CollectiveRequest
from ringfence.link.frames import Call
from ringfence.runtime.communicator import Communicator
from ringfence.runtime.point_to_point import Transfer
from tests.memory_cluster import World

TABLES = {
    "as shipped": Thresholds(),
    "rings and chains": Thresholds(
        small=0, ring_group=999, chain_slice=0, direct_group=0, direct_part=0, bruck_group=999
    ),
    "trees and halving": Thresholds(
        small=0, ring_group=0, chain_group=0, direct_group=0, direct_part=1 << 40, bruck_group=2
    ),
    "parts apart": Thresholds(small=0, ring_group=0, apart_bytes=0),
}


class Bound(NamedTuple):
    """An operation of one rank, the tensors it writes, and what has to stand in them."""

    request: CollectiveRequest
    results: list[torch.Tensor]
    expected: list[torch.Tensor]

    def right(self) -> bool:
        return all(torch.equal(*pair) for pair in zip(self.results, self.expected, strict=True))


def part(rank: int, index: int, count: int) -> torch.Tensor:
    """What `rank` holds as its part for or from rank `index`."""
    return torch.arange(count) * (rank + 2) + 1000 * index + rank


def bind(
    kind: Collective,
    communicator: Communicator,
    count: int,
    root: int = 0,
    *,
    deadline: float = 10.0,
    like: torch.dtype = torch.int64,
) -> Bound:
    """`kind` over parts of `count` elements."""
    buffers, results, expected = _SHAPES[kind](communicator, count, root)
    buffers = {buffer: [tensor.to(like) for tensor in tensors] for buffer, tensors in buffers.items()}
    results = [tensor for buffer in results for tensor in buffers[buffer]]
    return Bound(
        request(kind, communicator, buffers, root, deadline), results, [tensor.to(like) for tensor in expected]
    )


def request(
    kind: Collective,
    communicator: Communicator,
    buffers: dict[Buffer, list[torch.Tensor]],
    root: int = 0,
    deadline: float = 10.0,
) -> CollectiveRequest:
    """Chosen and bound as the backend does."""
    first = next((tensor for tensors in buffers.values() for tensor in tensors), torch.empty(0, dtype=torch.uint8))
    whole = communicator.size if kind not in (Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST) else 1
    each = buffers[Buffer.INPUT][0] if Buffer.INPUT in buffers else first
    reducing = kind in (Collective.ALL_REDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER)
    code, combine, _ = reduction_of(dist.ReduceOp.SUM, first.dtype) if reducing else (0, None, False)
    machines = communicator.machines
    schedule = choose(
        *(kind, communicator.size, communicator.rank, root, bytes_of(each) * whole, communicator.table),
        adjacent=False,
        machines=machines,
    )
    call = Call(kind, code, dtype_code(first.dtype), schedule.identifier, root, each.numel())
    passes = divide(kind, communicator.size, bytes_of(each), communicator.table, machines)
    tensors = {buffer: [as_bytes(tensor) for tensor in given] for buffer, given in buffers.items()}
    return CollectiveRequest(call, deadline, buffers, schedule, passes, tensors, first.dtype, combine)


Shape = tuple[dict[Buffer, list[torch.Tensor]], list[Buffer], list[torch.Tensor]]


def _blank(communicator: Communicator, count: int) -> list[torch.Tensor]:
    return [torch.full((count,), -1) for _ in range(communicator.size)]


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(parts)).sum(0)


def _all_reduce(communicator: Communicator, count: int, root: int) -> Shape:
    total = _sum([part(rank, 0, count) for rank in range(communicator.size)])
    return {Buffer.DATA: [part(communicator.rank, 0, count)]}, [Buffer.DATA], [total]


def _reduce(communicator: Communicator, count: int, root: int) -> Shape:
    buffers = {Buffer.INPUT: [part(communicator.rank, 0, count)]}
    if communicator.rank != root:
        return buffers, [Buffer.INPUT], [part(communicator.rank, 0, count)]
    buffers[Buffer.OUTPUT] = _blank(communicator, count)[:1]
    return buffers, [Buffer.OUTPUT], [_sum([part(rank, 0, count) for rank in range(communicator.size)])]


def _reduce_scatter(communicator: Communicator, count: int, root: int) -> Shape:
    inputs = [part(communicator.rank, index, count) for index in range(communicator.size)]
    total = _sum([part(rank, communicator.rank, count) for rank in range(communicator.size)])
    return {Buffer.INPUT: inputs, Buffer.OUTPUT: _blank(communicator, count)[:1]}, [Buffer.OUTPUT], [total]


def _all_gather(communicator: Communicator, count: int, root: int) -> Shape:
    buffers = {Buffer.INPUT: [part(communicator.rank, 0, count)], Buffer.OUTPUT: _blank(communicator, count)}
    return buffers, [Buffer.OUTPUT], [part(rank, 0, count) for rank in range(communicator.size)]


def _broadcast(communicator: Communicator, count: int, root: int) -> Shape:
    return {Buffer.DATA: [part(communicator.rank, 0, count)]}, [Buffer.DATA], [part(root, 0, count)]


def _gather(communicator: Communicator, count: int, root: int) -> Shape:
    buffers = {Buffer.INPUT: [part(communicator.rank, 0, count)]}
    if communicator.rank != root:
        return buffers, [], []
    buffers[Buffer.OUTPUT] = _blank(communicator, count)
    return buffers, [Buffer.OUTPUT], [part(rank, 0, count) for rank in range(communicator.size)]


def _scatter(communicator: Communicator, count: int, root: int) -> Shape:
    buffers = {Buffer.OUTPUT: _blank(communicator, count)[:1]}
    if communicator.rank == root:
        buffers[Buffer.INPUT] = [part(root, index, count) for index in range(communicator.size)]
    return buffers, [Buffer.OUTPUT], [part(root, communicator.rank, count)]


def _all_to_all(communicator: Communicator, count: int, root: int) -> Shape:
    inputs = [part(communicator.rank, index, count) for index in range(communicator.size)]
    expected = [part(rank, communicator.rank, count) for rank in range(communicator.size)]
    return {Buffer.INPUT: inputs, Buffer.OUTPUT: _blank(communicator, count)}, [Buffer.OUTPUT], expected


def _barrier(communicator: Communicator, count: int, root: int) -> Shape:
    return {}, [], []


_SHAPES: dict[Collective, Callable[[Communicator, int, int], Shape]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.REDUCE: _reduce,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.ALL_GATHER: _all_gather,
    Collective.BROADCAST: _broadcast,
    Collective.GATHER: _gather,
    Collective.SCATTER: _scatter,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.BARRIER: _barrier,
}
KINDS = tuple(_SHAPES)


def submit_everywhere(world: World, kind: Collective, count: int, root: int = 0) -> list[Bound]:
    """Submit the same collective on every rank; return it as bound for each rank."""
    bound = [bind(kind, world.communicators[rank], count, root) for rank in range(world.size)]
    for rank, each in enumerate(bound):
        world.submit(world.communicators[rank], each.request)
    return bound


def transfer(tensor: torch.Tensor, tag: int = 0, deadline: float = 10.0) -> Transfer:
    """A send or a recv of a contiguous tensor."""
    call = Call(POINT_TO_POINT, dtype=dtype_code(tensor.dtype), elements=tensor.numel(), tag=tag)
    return Transfer(call, deadline, tensor, as_bytes(tensor))


def send(world: World, source: int, target: int, tensor: torch.Tensor, tag: int = 0) -> Transfer:
    request = transfer(tensor, tag)
    world.engines[source].send(world.communicators[source], request, target)
    return request


def recv(world: World, rank: int, source: int | None, tensor: torch.Tensor, tag: int = 0) -> Transfer:
    request = transfer(tensor, tag)
    world.engines[rank].receive(world.communicators[rank], request, source)
    return request
