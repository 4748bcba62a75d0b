"""`ringfence.hooks.int8.all_reduce` against an exact sum: error, equal bits, values that are not finite, wrong calls."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ringfence.hooks import int8
from ringfence.hooks.blocks import BLOCK
from ringfence.hooks.pieces import DTYPES, PIECE
from tests import device
from tests.limits import FAR, HANG
from tests.pool import Failure, Pool

SIZES = (0, 1, 3, BLOCK - 1, BLOCK, 5 * BLOCK + 7, 100_000)
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-24}
STEPS = 50


def contribution(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A rank's values; their magnitude differs from block to block."""
    random = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randn(count, generator=random)
    return (values * torch.linspace(0.001, 2.0, max(1, count))[:count]).to(dtype)


def largest(values: torch.Tensor) -> torch.Tensor:
    """For each value the largest magnitude of its block."""
    blocks = torch.nn.functional.pad(values.abs().double(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    return blocks.amax(1, keepdim=True).expand(-1, BLOCK).flatten()[: values.numel()]


def within_the_bound(result: torch.Tensor, parts: list[torch.Tensor], average: bool) -> bool:
    """Return whether a result is as close to the exact sum as the documentation of `all_reduce` says."""
    divisor = len(parts) if average else 1
    exact = torch.stack([part.double() for part in parts]).sum(0) / divisor
    bound = torch.stack([largest(part) for part in parts]).sum(0) / 126 / divisor
    rounding = (exact.abs() + bound) * ROUNDING[result.dtype] + 2.0**-24  # of the smallest numbers of float16
    return bool(((result.double() - exact).abs() <= bound + rounding).all())


def equal_on_all(tensor: torch.Tensor, group: Any = None) -> bool:
    """Return whether all ranks have the same bits."""
    mine = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, mine, group)
    return all(torch.equal(mine, other) for other in others)


def sums(sizes: tuple[int, ...], on: str = "cpu", dtypes: Sequence[torch.dtype] = DTYPES) -> list[str]:
    """Return the cases with a wrong result."""
    rank, world = dist.get_rank(), dist.get_world_size()
    where = device.load() if on == "sim" else torch.device("cpu")
    wrong = []
    for dtype in dtypes:
        for count in sizes:
            for average in (False, True):
                parts = [contribution(each, count, dtype) for each in range(world)]
                tensor = parts[rank].to(where, copy=True)
                int8.all_reduce(tensor, average=average)
                if not (within_the_bound(tensor.cpu(), parts, average) and equal_on_all(tensor)):
                    wrong.append(f"{dtype}, {count} elements, average {average}")
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sums_are_within_the_bound_and_equal(pool: Pool, world: int) -> None:
    assert pool.check(sums, world, "ringfence", (SIZES,)) == [[]] * world


def test_sums_of_several_pieces(pool: Pool) -> None:
    assert pool.check(sums, 2, "ringfence", ((2 * PIECE + 300,), "cpu", DTYPES[1:3])) == [[]] * 2


def sums_of_small_pieces(count: int) -> list[str]:
    with patch("ringfence.hooks.pieces.PIECE", dist.get_world_size() * BLOCK):
        return sums((count * dist.get_world_size() * BLOCK + 5,), "cpu", DTYPES[2:3])


@pytest.mark.parametrize("count", [30, 31, 32, 70])  # 32 are in flight at once in each exchange
def test_sums_of_more_pieces_than_are_in_flight(pool: Pool, count: int) -> None:
    assert pool.check(sums_of_small_pieces, 3, "ringfence", (count,)) == [[]] * 3


def test_sums_over_gloo(pool: Pool) -> None:
    assert pool.check(sums, 2, "gloo", (SIZES,)) == [[]] * 2


@pytest.mark.processes
def test_sums_on_a_device(devices: Pool) -> None:
    assert devices.check(sums, 2, "ringfence", ((3, 5 * BLOCK + 7, PIECE + 300), "sim")) == [[]] * 2


def sums_of_strided_tensors() -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [contribution(each, 600, torch.float32) for each in range(world)]
    tensor = parts[rank].clone().view(20, 30).t()
    columns = torch.zeros(600, 2)
    columns[:, 0] = parts[rank]
    int8.all_reduce(tensor)
    int8.all_reduce(columns[:, 0])
    assert bool((columns[:, 1] == 0).all())
    flat = [part.view(20, 30).t().reshape(-1) for part in parts]
    return within_the_bound(tensor.reshape(-1), flat, False) and within_the_bound(columns[:, 0], parts, False)


def test_strided_tensors(pool: Pool) -> None:
    assert pool.check(sums_of_strided_tensors, 2, "ringfence") == [True, True]


def sums_in_a_subgroup() -> bool:
    members = [0, 2]
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        with pytest.raises(ValueError, match="not in the group"):
            int8.all_reduce(torch.ones(3), dist.GroupMember.NON_GROUP_MEMBER)
        return True
    parts = [contribution(each, 1000, torch.float32) for each in members]
    tensor = parts[members.index(dist.get_rank())].clone()
    int8.all_reduce(tensor, group)
    return within_the_bound(tensor, parts, False) and equal_on_all(tensor, group)


def test_a_subgroup(pool: Pool) -> None:
    assert pool.check(sums_in_a_subgroup, 3, "ringfence") == [True] * 3


# -- residuals ------------------------------------------------------------------------------------------------------


def schedules_of_a_large_group() -> tuple[set[str], set[str]]:
    """The schedules of an all-to-all and of an int8 all-reduce, where as few ranks as here count as a large group."""
    engine = dist.group.WORLD._session.engine  # type: ignore[union-attr]
    with patch.object(engine, "table", replace(engine.table, bruck_group=2)):
        group = dist.new_group()
        choose, chosen = group._choice, set()

        def noted(*call: Any) -> Any:
            found = choose(*call)
            chosen.add(found[0].name)
            return found

        group._choice = noted
        dist.all_to_all_single(torch.zeros(4), torch.ones(4), group=group)
        plain = set(chosen)
        chosen.clear()
        int8.all_reduce(torch.ones(4 * BLOCK), group)
    return plain, {name for name in chosen if name.startswith("all_to_all")}


def test_no_shard_passes_through_a_third_rank(pool: Pool) -> None:
    """It would see it as it is; a plain all-to-all of small parts in a large group forwards them."""
    assert pool.check(schedules_of_a_large_group, 4) == [({"all_to_all_bruck"}, {"all_to_all_direct"})] * 4


def mean_errors(count: int, dtype: torch.dtype, average: bool, on: str = "cpu") -> tuple[float, float]:
    """Return the largest error of the mean of all results, without and with a residual, over what one may be wrong."""
    rank, world = dist.get_rank(), dist.get_world_size()
    where = device.load() if on == "sim" else torch.device("cpu")
    parts = [contribution(each, count, dtype) for each in range(world)]
    exact = torch.stack([part.double() for part in parts]).sum(0) / (world if average else 1)
    bound = torch.stack([largest(part) for part in parts]).sum(0).amax().item() / 126 / (world if average else 1)
    found = []
    for residual in (None, torch.zeros(count, device=where)):
        total = torch.zeros(count, dtype=torch.float64)
        for _ in range(STEPS):
            tensor = parts[rank].to(where, copy=True)
            int8.all_reduce(tensor, average=average, residual=residual)
            total += tensor.cpu().double()
        found.append(float((total / STEPS - exact).abs().max()) / bound)
    return found[0], found[1]


@pytest.mark.parametrize(
    ("world", "count", "dtype", "average"),
    [
        (2, 4 * BLOCK, torch.float32, True),
        (3, 700, torch.float32, False),
        (2, 700, torch.float64, True),
        (2, 2 * BLOCK, torch.float64, False),
    ],
)
def test_a_residual_cancels_errors_over_calls(
    pool: Pool, world: int, count: int, dtype: torch.dtype, average: bool
) -> None:
    """What is lost in one call is sent in the next: all results together lack at most what the last residuals hold."""
    for without, with_residual in pool.check(mean_errors, world, "ringfence", (count, dtype, average)):
        assert without > 0.2  # the same error in each call
        assert with_residual < 2 / STEPS


@pytest.mark.processes
def test_a_residual_on_a_device(devices: Pool) -> None:
    for without, with_residual in devices.check(mean_errors, 2, "ringfence", (700, torch.float32, True, "sim")):
        assert without > 0.2 and with_residual < 2 / STEPS


def residual_after_infinity() -> None:
    rank = dist.get_rank()
    residual = torch.zeros(4 * BLOCK)
    tensor = contribution(rank, 4 * BLOCK, torch.float32)
    tensor[5 + BLOCK * rank] = math.inf
    int8.all_reduce(tensor, residual=residual)
    assert bool(tensor[: 2 * BLOCK].isnan().all()) and bool(tensor[2 * BLOCK :].isfinite().all())
    assert bool(residual.isfinite().all())


def test_a_residual_stays_finite(pool: Pool) -> None:
    pool.check(residual_after_infinity, 2, "ringfence")


def residual_alone() -> None:
    residual, tensor = torch.full((3,), 0.5), torch.ones(3)
    int8.all_reduce(tensor, residual=residual)
    assert tensor.tolist() == [1.5] * 3 and residual.tolist() == [0.0] * 3


def test_a_group_of_one_adds_the_residual(pool: Pool) -> None:
    pool.check(residual_alone, 1, "ringfence")


# -- values that are not finite -------------------------------------------------------------------------------------


def poisoned(bad: float, dtype: torch.dtype) -> list[list[int]]:
    """Return which blocks are NaN if a rank has a bad value in one block of each rank's shard; all others are finite."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for owner in range(world):
        tensor = contribution(rank, world * 2 * BLOCK, dtype)
        if rank == 1:
            tensor[owner * 2 * BLOCK + 3] = bad
        int8.all_reduce(tensor)
        nan = tensor.view(-1, BLOCK).isnan()
        assert torch.equal(nan.all(1), nan.any(1)) and bool(
            (nan.any(1) | tensor.view(-1, BLOCK).isfinite().all(1)).all()
        )
        found.append(nan.any(1).nonzero().flatten().tolist())
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_nan_on_every_rank(pool: Pool, dtype: torch.dtype, bad: float) -> None:
    assert pool.check(poisoned, 3, "ringfence", (bad, dtype)) == [[[0], [2], [4]]] * 3


def overflow() -> list[bool]:
    large = torch.full((2 * BLOCK,), 3e38)
    too_large = torch.full((BLOCK,), 1e300, dtype=torch.float64)
    for tensor in (large, too_large):
        int8.all_reduce(tensor)
    return [bool(tensor.isnan().all()) for tensor in (large, too_large)]


def test_sums_that_float32_cannot_hold_are_nan(pool: Pool) -> None:
    assert pool.check(overflow, 2, "ringfence") == [[True, True]] * 2


# -- wrong calls ----------------------------------------------------------------------------------------------------


def other_size_of_equal_blocks() -> None:
    int8.all_reduce(torch.ones(BLOCK + 1 + dist.get_rank()))


def other_number_of_blocks() -> None:
    int8.all_reduce(torch.ones(BLOCK * (1 + 4 * dist.get_rank())))


def other_number_of_pieces() -> None:
    int8.all_reduce(torch.ones(PIECE * (1 + dist.get_rank())))


def nothing_on_one_rank() -> None:
    int8.all_reduce(torch.ones(100 * dist.get_rank()))


def other_dtype() -> None:
    int8.all_reduce(torch.ones(100, dtype=(torch.float32, torch.float64)[dist.get_rank()]))


def other_average() -> None:
    int8.all_reduce(torch.ones(100), average=dist.get_rank() == 1)


@pytest.mark.parametrize(
    "call",
    [
        other_size_of_equal_blocks,
        other_number_of_blocks,
        other_number_of_pieces,
        nothing_on_one_rank,
        other_dtype,
        other_average,
    ],
)
def test_calls_that_differ_raise_on_every_rank(pool: Pool, call: Callable[[], None]) -> None:
    results = pool.run(call, 2, "ringfence", seconds=FAR, timeout=HANG, renew=True)
    assert all(isinstance(each, Failure) for each in results), results
    assert {each.type for each in results} <= {"MismatchError", "AbortedError"}, results
    assert any(each.type == "MismatchError" for each in results)


def residual_after(failure: str) -> tuple[str, float]:
    """Return the error, and the largest number in the residual."""
    rank = dist.get_rank()
    residual = torch.full((4 * BLOCK,), 0.25)

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory on this rank")

    broken = patch("ringfence.hooks.pieces.Piece.combine", fails) if failure == "memory" else contextlib.nullcontext()
    try:
        with broken:
            int8.all_reduce(torch.ones(4 * BLOCK), average=bool(rank) and failure == "average", residual=residual)
    except RuntimeError as error:
        return type(error).__name__, float(residual.abs().max())
    return "", math.nan


@pytest.mark.parametrize(("failure", "kind"), [("average", "MismatchError"), ("memory", "OutOfMemoryError")])
def test_a_residual_is_zero_after_a_failure(pool: Pool, failure: str, kind: str) -> None:
    """It held the contribution, which a caller that tries again would add twice."""
    results = pool.check(residual_after, 2, "ringfence", (failure,), seconds=FAR, timeout=HANG, renew=True)
    assert results == [(kind, 0.0)] * 2


def refusals() -> None:
    for wrong in (torch.ones(3, dtype=torch.int32), torch.ones(3, dtype=torch.complex64), torch.ones(3).to_sparse()):
        with pytest.raises(TypeError, match="int8 quantises dense float16"):
            int8.all_reduce(wrong)
    for residual in (torch.zeros(2), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 2)[:, 0]):
        with pytest.raises(ValueError, match="residual must be"):
            int8.all_reduce(torch.ones(3), residual=residual)


def test_what_does_not_fit_is_refused(pool: Pool) -> None:
    pool.check(refusals, 2, "ringfence")
