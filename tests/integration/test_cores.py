"""Workers with the compiled data plane and workers with the one in Python in the same run: they interoperate."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.limits import HANG
from tests.pool import Pool

SIZES = (0, 1, 1000, 262_145, 2_000_003)  # elements: one segment, several, and several passes


def in_company() -> bool:
    """Run every kind of collective and a transfer in each direction; return whether this data plane is compiled."""
    from ringfence.dataplane import native

    rank, size = dist.get_rank(), dist.get_world_size()
    total = float(sum(range(1, size + 1)))
    for count in SIZES:
        whole = torch.full((count,), float(rank + 1))
        dist.all_reduce(whole)
        assert bool(whole.eq(total).all())
        gathered = [torch.empty(count) for _ in range(size)]
        dist.all_gather(gathered, torch.full((count,), float(rank)))
        assert all(bool(each.eq(source).all()) for source, each in enumerate(gathered))
        part = torch.empty(count)
        dist.reduce_scatter_tensor(part, torch.full((count * size,), float(rank + 1)))
        assert bool(part.eq(total).all())
        parts = [torch.empty(count) for _ in range(size)]
        dist.all_to_all(parts, [torch.full((count,), float(10 * rank + target)) for target in range(size)])
        assert all(bool(each.eq(10 * source + rank).all()) for source, each in enumerate(parts))
        for root in range(size):
            word = torch.full((count,), float(rank))
            dist.broadcast(word, root)
            assert bool(word.eq(root).all())
        for operation, expected in ((dist.ReduceOp.MAX, float(size)), (dist.ReduceOp.AVG, total / size)):
            other = torch.full((count,), float(rank + 1), dtype=torch.bfloat16)
            dist.all_reduce(other, operation)
            assert bool(other.eq(expected).all())
        taken = torch.empty(count)
        sent = dist.isend(torch.full((count,), float(rank)), (rank + 1) % size)
        dist.recv(taken, (rank - 1) % size)
        sent.wait()
        assert bool(taken.eq((rank - 1) % size).all())
    return native.COMPILED


def test_both_data_planes_interoperate(pool: Pool) -> None:
    kinds = ["python", "compiled", "compiled", "python"]
    with pool.fresh([["env", f"RINGFENCE_DATAPLANE={kind}"] for kind in kinds]) as mixed:
        assert mixed.check(in_company, world=4, timeout=HANG) == [kind == "compiled" for kind in kinds]
        said = ["the data plane is not the compiled one" in mixed.workers[rank].read_log() for rank in range(4)]
    assert said == [True, False, False, False]  # rank 0 prints the summary of the session
