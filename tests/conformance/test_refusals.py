"""Invalid calls are refused on every rank at once, and the group stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool


def too_few_outputs() -> None:
    dist.all_gather([torch.empty(4) for _ in range(dist.get_world_size() - 1)], torch.ones(4))


def output_too_small() -> None:
    dist.all_gather_into_tensor(torch.empty(4), torch.ones(4))


def output_of_another_type() -> None:
    world = dist.get_world_size()
    dist.all_gather([torch.empty(4, dtype=torch.float64) for _ in range(world)], torch.ones(4))


def input_not_divisible() -> None:
    dist.reduce_scatter_tensor(torch.empty(4), torch.ones(4 * dist.get_world_size() + 1))


def splits_of_another_total() -> None:
    world = dist.get_world_size()
    dist.all_to_all_single(torch.empty(world), torch.ones(world), [1] * world, [2] * world)


def even_split_not_possible() -> None:
    world = dist.get_world_size()
    dist.all_to_all_single(torch.empty(world + 1), torch.ones(world + 1))


def root_outside_the_group() -> None:
    dist.broadcast(torch.ones(4), dist.get_world_size())


def premultiplied_sum() -> None:
    dist.all_reduce(torch.ones(4), op=dist._make_nccl_premul_sum(2.0))


def average_of_booleans() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.bool), op=dist.ReduceOp.AVG)


def scattered_average_of_another_type() -> None:
    world = dist.get_world_size()
    out, given = torch.empty(4, dtype=torch.int32), torch.ones(4 * world, dtype=torch.int64)
    dist.reduce_scatter_tensor(out, given, op=dist.ReduceOp.AVG)


def tag_below_zero() -> None:
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    dist.isend(torch.ones(4), peer, tag=-1)


REFUSALS: tuple[Callable[[], None], ...] = (
    too_few_outputs,
    output_too_small,
    output_of_another_type,
    input_not_divisible,
    splits_of_another_total,
    even_split_not_possible,
    root_outside_the_group,
    premultiplied_sum,
    average_of_booleans,
    scattered_average_of_another_type,
    tag_below_zero,
)


def refused(mistake: Callable[[], None]) -> tuple[str, int]:
    """Return the error of the invalid call, and the result of a valid call after it."""
    try:
        mistake()
        error = ""
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    return error, int(total.item())


@pytest.mark.parametrize("mistake", REFUSALS, ids=lambda mistake: mistake.__name__)
def test_invalid_calls_are_refused(pool: Pool, backend: str, mistake: Callable[[], Any]) -> None:
    for error, total in pool.check(refused, 3, backend, (mistake,)):
        assert error
        assert total == 3


def on_another_device() -> None:
    dist.all_reduce(torch.ones(4, device="meta"))


def test_tensor_on_another_device_is_refused(pool: Pool) -> None:
    # Not on Gloo, which accepts a tensor without memory and does nothing.
    for error, total in pool.check(refused, 3, "ringfence", (on_another_device,)):
        assert "meta" in error
        assert total == 3


def test_premul_sum_is_refused_with_advice_for_fsdp2(pool: Pool) -> None:
    for error, total in pool.check(refused, 3, "ringfence", (premultiplied_sum,)):
        assert "PREMUL_SUM is not supported" in error and "set_force_sum_reduction_for_comms(True)" in error
        assert total == 3


def operator_around_the_group() -> None:
    torch.ops.c10d.broadcast_([torch.ones(4)], dist.group.WORLD.boxed(), 0, 0, False, -1)


@pytest.mark.promise("torch operators that bypass the process group are refused.")
def test_torch_operators_cannot_bypass_the_group(pool: Pool) -> None:
    """torch's C++ operators use a group's default backend, which implements no collective."""
    for error, total in pool.check(refused, 3, "ringfence", (operator_around_the_group,)):
        assert "Backend ringfence does not support" in error or "No backend type associated" in error
        assert total == 3
