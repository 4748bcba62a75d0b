"""Every collective compared with plain torch, on Gloo and on ringfence: types, operations, views, sizes, groups."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.attack.forgery import EVERY_HOP
from tests.conformance.cases import (
    DTYPES,
    OPS,
    WORLDS,
    Case,
    every_type,
    every_view,
    is_defined,
    large_cases,
    pairwise_cases,
)
from tests.conformance.collectives import RIGHT, play
from tests.conformance.gloo_differences import DIFFERENCES, Difference, difference
from tests.limits import HANG
from tests.pool import IN_SHARED_MEMORY, ON_TWO_MACHINES, Pool

Numbered = list[tuple[int, Case]]
PAIRWISE = list(enumerate(pairwise_cases()))


def outcomes(pool: Pool, backend: str, cases: Numbered, timeout: float = HANG) -> list[tuple[Case, list[str]]]:
    """Return each case with the reports of its members."""
    (world,) = {case.world for _, case in cases}
    ranks = pool.check(play, world, backend, (cases,), timeout)
    return [(case, [rank[index] for rank in ranks if rank[index] is not None]) for index, (_, case) in enumerate(cases)]


def unexpected(played: Iterable[tuple[Case, list[str]]], backend: str) -> list[str]:
    """Return the cases with an unexpected outcome."""
    return [
        f"{case}: {reports}"
        for case, reports in played
        if not as_expected(reports, difference(case) if backend == "gloo" else None)
    ]


def as_expected(reports: list[str], entry: Difference | None) -> bool:
    if entry is None:
        return set(reports) == {RIGHT}
    matches = [report.startswith(entry.outcome) and entry.text in report for report in reports]
    return all(matches) if entry.outcome == "refused" else any(matches)


def test_every_type_and_operation(pool: Pool, backend: str) -> None:
    assert not unexpected(outcomes(pool, backend, list(enumerate(every_type(3)))), backend)


def test_every_view_and_way_to_wait(pool: Pool, backend: str) -> None:
    assert not unexpected(outcomes(pool, backend, list(enumerate(every_view(3)))), backend)


def average_of_what_cannot_be_summed() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for count in (3, 1_000_000):  # one for each schedule of an all-reduce
        mine = torch.full((count,), 40_000.0, dtype=torch.float16)
        dist.all_reduce(mine, op=dist.ReduceOp.AVG)
        assert torch.allclose(mine, torch.full_like(mine, 40_000.0), rtol=2e-3)
    given = torch.full((world * 5,), 40_000.0, dtype=torch.float16)
    part = torch.empty(5, dtype=torch.float16)
    dist.reduce_scatter_tensor(part, given, op=dist.ReduceOp.AVG)
    assert torch.allclose(part, torch.full_like(part, 40_000.0), rtol=2e-3) and bool((given == 40_000.0).all())
    whole = torch.full((5,), 40_000.0, dtype=torch.float16)
    dist.reduce(whole, 0, op=dist.ReduceOp.AVG)
    assert torch.allclose(whole, torch.full_like(whole, 40_000.0), rtol=2e-3), rank


@pytest.mark.parametrize("world", [2, 3])
def test_average_is_correct_if_the_sum_overflows(pool: Pool, world: int) -> None:
    pool.check(average_of_what_cannot_be_summed, world, "ringfence")


INTEGER_TYPES = ("uint8", "int8", "int32", "int64")


def averages_of_integers(divide: bool) -> list[list[int]]:
    """Sums that fit the type, also negative ones and ones not divisible by the world size. `divide`: compute the average
    as libraries do that assume no AVG in Gloo: divide the sum as floats and copy it back."""
    rank, world = dist.get_rank(), dist.get_world_size()
    results = []
    for name in INTEGER_TYPES:
        values = torch.arange(60) + rank if name == "uint8" else torch.arange(-30, 30) + rank
        tensor = values.to(getattr(torch, name))
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM if divide else dist.ReduceOp.AVG)
        results.append((tensor.copy_(tensor / world) if divide else tensor).tolist())
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_integer_averages_equal_a_divided_sum_on_gloo(pool: Pool, world: int) -> None:
    expected = pool.check(averages_of_integers, world, "gloo", (True,))
    assert any(value < 0 for value in expected[0][-1])
    assert pool.check(averages_of_integers, world, "ringfence", (False,)) == expected


def averages_of_large_integers() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        ends = torch.iinfo(dtype)
        for value in (ends.max, ends.min):
            for count in (3, 200_000):
                mine = torch.full((count,), value, dtype=dtype)
                dist.all_reduce(mine, op=dist.ReduceOp.AVG)
                assert bool((mine == value).all()), (dtype, value, mine[0])
            given, part = torch.full((world * 5,), value, dtype=dtype), torch.empty(5, dtype=dtype)
            dist.reduce_scatter_tensor(part, given, op=dist.ReduceOp.AVG)
            assert bool((part == value).all()) and bool((given == value).all())
            whole = torch.full((5,), value, dtype=dtype)
            dist.reduce(whole, 0, op=dist.ReduceOp.AVG)
            assert bool((whole == value).all()), rank


@pytest.mark.parametrize("world", [2, 3])
def test_average_of_short_integers_does_not_overflow(pool: Pool, world: int) -> None:
    pool.check(averages_of_large_integers, world, "ringfence")


def test_every_known_difference_occurs() -> None:
    cases = [*every_type(3), *every_view(3)]
    assert all(any(difference(case) is entry for case in cases) for entry in DIFFERENCES)


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.nightly) if n in (4, 6, 7) else n for n in WORLDS])
def test_pairwise(pool: Pool, backend: str, world: int) -> None:
    # Cases that Gloo refuses on some ranks only (an empty view is contiguous) would disturb the following ones.
    cases = [(n, c) for n, c in PAIRWISE if c.world == world and (backend != "gloo" or difference(c) is None)]
    assert not unexpected(outcomes(pool, backend, cases), backend)


@pytest.mark.parametrize("mebibytes", [8, pytest.param(64, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("world", [2, 4])
def test_large(pool: Pool, backend: str, world: int, mebibytes: int) -> None:
    cases = list(enumerate(large_cases(world, mebibytes << 18)))  # elements of four bytes
    assert not unexpected(outcomes(pool, backend, cases, HANG), backend)


@pytest.mark.parametrize(
    ("where", "world"),
    [
        ("ringfence", 4),
        ("ringfence", 8),
        (IN_SHARED_MEMORY, 3),
        (ON_TWO_MACHINES, 5),
    ],  # 5: machines that differ in size
)
def test_collectives_if_every_hop_authenticates_what_it_forwards(
    pool: Pool, tmp_path: Path, where: str, world: int
) -> None:
    (tmp_path / "policy.toml").write_text(EVERY_HOP)
    cases = [case for elements in (4000, 500_000) for case in large_cases(world, elements)]
    env = {"RINGFENCE_POLICY": str(tmp_path / "policy.toml")}
    ranks = pool.check(play, world, where, (list(enumerate(cases)),), env=env)
    assert ranks == [[RIGHT] * len(cases)] * world


def test_undefined_reductions_are_refused_on_every_rank(pool: Pool, backend: str) -> None:
    cases = [
        Case("all_reduce", dtype, op, 37, "plain", 3, "sync", "world")
        for dtype in DTYPES
        for op in OPS
        if not is_defined(op, dtype)
    ]
    played = outcomes(pool, backend, list(enumerate(cases)))
    accepted = [(str(case), reports) for case, reports in played if not all(r.startswith("refused") for r in reports)]
    assert not accepted


def sparse(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """A few elements; some indices occur on other ranks too, one occurs twice."""
    places = torch.tensor([[0, rank, rank + 1, rank], [1, 2, 0, 2]])
    return torch.sparse_coo_tensor(places, torch.tensor([1, 2, 3, rank + 1]).to(dtype), (9, 3))


def reduce_sparse(dtypes: list[str], world: int, asynchronous: bool) -> list[str]:
    faults = []
    for name in dtypes:
        dtype = getattr(torch, name)
        tensor = sparse(dist.get_rank(), dtype)
        if asynchronous:
            dist.all_reduce(tensor, async_op=True).wait()
        else:
            dist.all_reduce(tensor)
        dense = sum(sparse(rank, torch.float64).to_dense() for rank in range(world))
        if not torch.equal(tensor.to_dense(), dense.to(dtype)):
            faults.append(f"{name}: {tensor}")
    empty = torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (4, 3))
    dist.all_reduce(empty)
    if empty.to_dense().count_nonzero():
        faults.append("empty")
    return faults


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_sparse_all_reduce(pool: Pool, backend: str, world: int, asynchronous: bool) -> None:
    dtypes = ["float32", "float64", "bfloat16", "int32", "int64", "uint8"]
    assert pool.check(reduce_sparse, world, backend, (dtypes, world, asynchronous)) == [[]] * world


@pytest.mark.parametrize("world", [1, 2, 5])
def test_sparse_all_reduce_of_complex_numbers(pool: Pool, world: int) -> None:
    """Gloo loses the sum without an error if there is more than one rank: it reduces a copy."""
    dtypes = ["complex64", "complex128"]
    assert pool.check(reduce_sparse, world, "ringfence", (dtypes, world, False)) == [[]] * world


def floats_of_all_reduce(size: int) -> list[bytes]:
    results = []
    for _ in range(3):
        values = torch.randn(size, generator=torch.Generator().manual_seed(dist.get_rank()))
        dist.all_reduce(values)
        results.append(values.numpy().tobytes())
    return results


@pytest.mark.parametrize(("world", "size"), [(3, 5), (3, 70_001), (8, 1237), (8, 1_000_003)])
def test_all_reduce_is_bitwise_equal_on_all_ranks_and_repeats(pool: Pool, backend: str, world: int, size: int) -> None:
    results: list[Any] = pool.check(floats_of_all_reduce, world, backend, (size,))
    assert len({bits for rank in results for bits in rank}) == 1


def splits_on_one_rank() -> list[int]:
    """Rank 0 passes explicitly the equal splits that the others omit."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.zeros(2 * world, dtype=torch.int64)
    splits = ([2] * world, [2] * world) if rank == 0 else ()
    dist.all_to_all_single(out, torch.arange(2 * world) + 100 * rank, *splits)
    return out.tolist()


def test_some_ranks_may_pass_equal_splits_explicitly(pool: Pool, backend: str) -> None:
    expected = [[100 * sender + 2 * rank + half for sender in range(3) for half in range(2)] for rank in range(3)]
    assert pool.check(splits_on_one_rank, 3, backend) == expected
