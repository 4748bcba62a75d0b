"""The methods of a group, called directly: with a tensor and plain values instead of lists and options."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tests.pool import Pool

WORLD = 3
LONG = timedelta(seconds=30)


def direct() -> dict[str, object]:
    """Call each form once; return the tensors of this rank."""
    group, rank = dist.group.WORLD, dist.get_rank()
    found: dict[str, object] = {}

    def mine() -> Tensor:
        return torch.tensor(
            [rank, 10 * rank, 100 * rank]
        )  # as many elements as ranks: mistaken for a list, it would pass

    def parts() -> list[Tensor]:
        return [torch.tensor([rank, index, 7]) for index in range(WORLD)]

    for name, arguments, keywords in (
        ("tensor", (), {}),
        ("op", (dist.ReduceOp.MAX,), {}),
        ("op and time", (dist.ReduceOp.MAX, LONG), {}),
        ("keywords", (), {"op": dist.ReduceOp.MAX, "timeout": LONG}),
    ):
        tensor = mine()
        group.allreduce(tensor, *arguments, **keywords).wait()
        found[f"allreduce {name}"] = tensor.tolist()
    tensor = mine()
    group.allreduce([tensor], dist.ReduceOp.MAX).wait()
    found["allreduce list and op"] = tensor.tolist()
    for name, arguments, keywords in (("root", (1,), {}), ("keyword", (), {"root": 2}), ("time", (1, LONG), {})):
        tensor = mine()
        group.broadcast(tensor, *arguments, **keywords).wait()
        found[f"broadcast {name}"] = tensor.tolist()
    tensor = mine()
    group.reduce(tensor, 1, dist.ReduceOp.SUM, LONG).wait()
    found["reduce"] = tensor.tolist() if rank == 1 else None
    outputs = [torch.zeros(3, dtype=torch.int64) for _ in range(WORLD)]
    group.allgather(outputs, mine(), LONG).wait()
    found["allgather"] = [output.tolist() for output in outputs]
    outputs = [torch.zeros(3, dtype=torch.int64) for _ in range(WORLD)]
    group.gather(outputs if rank == 1 else [], mine(), 1).wait()
    found["gather"] = [output.tolist() for output in outputs] if rank == 1 else None
    tensor = torch.zeros(3, dtype=torch.int64)
    group.scatter(tensor, parts() if rank == 1 else [], root=1).wait()
    found["scatter"] = tensor.tolist()
    tensor = torch.zeros(3, dtype=torch.int64)
    group.reduce_scatter(tensor, parts(), dist.ReduceOp.MAX).wait()
    found["reduce_scatter"] = tensor.tolist()
    tensor = torch.zeros(3, dtype=torch.int64)
    group.alltoall_base(tensor, mine(), [], [], timeout=LONG).wait()
    found["alltoall_base"] = tensor.tolist()
    group.barrier(timeout=LONG).wait()
    return found


def expected(rank: int) -> dict[str, object]:
    def held(by: int) -> list[int]:
        return [by, 10 * by, 100 * by]

    return {
        "allreduce tensor": held(3),
        "allreduce op": held(2),
        "allreduce op and time": held(2),
        "allreduce keywords": held(2),
        "allreduce list and op": held(2),
        "broadcast root": held(1),
        "broadcast keyword": held(2),
        "broadcast time": held(1),
        "reduce": held(3) if rank == 1 else None,
        "allgather": [held(0), held(1), held(2)],
        "gather": [held(0), held(1), held(2)] if rank == 1 else None,
        "scatter": [1, rank, 7],
        "reduce_scatter": [2, rank, 7],
        "alltoall_base": [0, 10**rank, 2 * 10**rank],
    }


def test_all_call_signatures_are_equivalent(pool: Pool, backend: str) -> None:
    assert pool.check(direct, WORLD, backend) == [expected(rank) for rank in range(WORLD)]
