"""Groups: subgroups, meshes and barriers; none of them uses plaintext."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from tests.limits import FAR, HANG
from tests.pool import Failure, Pool


def total(group: object = None) -> int:
    """The sum of the members' global ranks, computed over the group."""
    tensor = torch.tensor([dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    return int(tensor.item())


def subgroups() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    low, high = range(world // 2), range(world // 2, world)
    halves = [dist.new_group(list(low)), dist.new_group(list(high))]
    mine, ranks = (halves[0], low) if rank in low else (halves[1], high)
    assert total(mine) == sum(ranks)
    assert dist.get_process_group_ranks(mine) == list(ranks)
    assert dist.get_group_rank(mine, rank) == ranks.index(rank)
    pair, pairs = dist.new_subgroups(2)
    assert total(pair) == rank // 2 * 4 + 1
    assert len(pairs) == world // 2
    named, _ = dist.new_subgroups_by_enumeration([[3, 0], [1, 2]])
    assert total(named) == 3
    for group in (mine, pair, named):
        dist.destroy_process_group(group)
    assert total() == sum(range(world))


def test_subgroups(pool: Pool, backend: str) -> None:
    pool.check(subgroups, 4, backend)


def only_members_take_part() -> None:
    if dist.get_rank() in (1, 3):
        group = dist.new_group([1, 3], use_local_synchronization=True)
        assert total(group) == 4
        dist.destroy_process_group(group)


def test_group_that_other_ranks_do_not_create(pool: Pool, backend: str) -> None:
    pool.check(only_members_take_part, 4, backend)


def gloo_by_name() -> tuple[int, str]:
    group = dist.new_group(backend="gloo")
    return total(group), str(group.name())


@pytest.mark.promise("Beside a ringfence default group, a script that asks for a Gloo group gets a ringfence group.")
def test_group_of_backend_gloo_uses_the_default_backend(pool: Pool, backend: str) -> None:
    results = pool.check(gloo_by_name, 2, backend)
    assert results == [(1, "gloo" if backend == "gloo" else "ringfence")] * 2


def mesh() -> None:
    rank = dist.get_rank()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    assert total(grid.get_group("columns")) == (1 if rank < 2 else 5)
    assert total(grid.get_group("rows")) == (2 if rank % 2 == 0 else 4)
    assert total(grid["rows", "columns"]._flatten("all").get_group()) == 6


def test_mesh_of_two_dimensions(pool: Pool, backend: str) -> None:
    pool.check(mesh, 4, backend, renew=True)


def many_groups(count: int) -> None:
    groups = [dist.new_group() for _ in range(count)]
    works = []
    tensors = [torch.tensor([index]) for index in range(count)]
    for tensor, group in zip(tensors, groups, strict=True):
        works.append(dist.all_reduce(tensor, group=group, async_op=True))
    for work in reversed(works):
        work.wait()
    assert [tensor.item() for tensor in tensors] == [index * dist.get_world_size() for index in range(count)]
    for group in groups:
        dist.destroy_process_group(group)


def test_dozens_of_groups_at_once(pool: Pool, backend: str) -> None:
    pool.check(many_groups, 4, backend, (32,))


def split() -> int:
    rank = dist.get_rank()
    group = dist.group.WORLD.split_group([0, 1] if rank < 2 else [2, 3])
    tensor = torch.tensor([rank])
    group.allreduce([tensor]).wait()
    return int(tensor.item())


def test_split_group(pool: Pool) -> None:
    # Not on Gloo: torch 2.13 crashes there when the ranks split into different groups.
    assert pool.check(split, 4, "ringfence") == [1, 1, 5, 5]


def barrier_holds(rounds: int) -> None:
    """No rank passes a barrier before all reach it: each rank records its arrival in the store first."""
    store, world = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    for number in range(rounds):
        store.set(f"barrier {number} {dist.get_rank()}", "here")
        if number % 2:
            dist.barrier()
        else:
            dist.barrier(async_op=True).wait()
        assert store.check([f"barrier {number} {rank}" for rank in range(world)])


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_no_rank_passes_a_barrier_before_all_reach_it(pool: Pool, backend: str, world: int) -> None:
    pool.check(barrier_holds, world, backend, (20,), renew=True)


def monitored(seconds: float, absent: int) -> None:
    if dist.get_rank() != absent:
        dist.group.WORLD.monitored_barrier(timedelta(seconds=seconds), wait_all_ranks=True)


def test_monitored_barrier_passes_and_names_missing_ranks(pool: Pool, backend: str) -> None:
    pool.check(monitored, 3, backend, (20, -1))
    results = pool.run(monitored, 3, backend, (1, 2))
    assert results[2] is None
    assert isinstance(results[0], Failure)
    assert "2" in results[0].message


def functions_that_name_backends() -> tuple[str, float]:
    """Return the error of `dist.monitored_barrier`, and the timeout after `_set_pg_timeout`."""
    refused, usual = "", dist.group.WORLD._timeout
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=20))
    except ValueError as error:
        refused = str(error)
    dist.monitored_barrier(dist.new_group(backend="gloo"), timedelta(seconds=20))
    with pytest.warns(Warning, match="timeout"):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=8))
    set_by_torch = dist.group.WORLD._timeout.total_seconds()
    dist.group.WORLD.set_timeout(timedelta(seconds=7))
    assert dist.group.WORLD._timeout == timedelta(seconds=7)
    dist.group.WORLD.set_timeout(usual)
    return refused, set_by_torch


def test_functions_that_torch_2_13_reserves_for_its_own_backends(pool: Pool) -> None:
    """As docs/tutorials/getting-started.md says."""
    kept = torch.__version__.startswith("2.13.")
    for refused, set_by_torch in pool.check(functions_that_name_backends, 2, "ringfence", renew=True):
        assert ("only implemented for GLOO" in refused) == kept
        assert set_by_torch == (FAR if kept else 8)


def made_anew() -> None:
    """Groups of this kind are named after their ranks, so the name is reused."""
    ranks = list(range(dist.get_world_size()))
    for turn in range(5):
        group = dist.new_group(ranks, use_local_synchronization=True)
        tensor = torch.full((1000,), float(turn))
        dist.all_reduce(tensor, group=group)
        assert (tensor == turn * len(ranks)).all()
        dist.destroy_process_group(group)


def test_group_is_destroyed_and_recreated(pool: Pool) -> None:
    pool.check(made_anew, 3, "ringfence")


def destroyed_while_under_way() -> list[float]:
    """Rank 0 starts a collective and destroys the group before the others start."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    tensors = [torch.full((1000,), float(dist.get_rank() + 1)) for _ in range(3)]
    if dist.get_rank() == 0:
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        dist.destroy_process_group(group)
        dist.barrier()
    else:
        dist.barrier()
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    dist.barrier()
    return [tensor.mean().item() for tensor in tensors]


def test_destroying_a_group_finishes_collectives_in_progress(pool: Pool, backend: str) -> None:
    assert pool.check(destroyed_while_under_way, 3, backend) == [[6.0] * 3] * 3


def world_destroyed_while_under_way() -> float:
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.full((1000,), float(dist.get_rank() + 1))
    dist.barrier()
    if dist.get_rank() == 0:
        dist.all_reduce(tensor, async_op=True)
        store.set("under way", "yes")
    else:
        store.wait(["under way"])
        dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.mean().item()


def test_leaving_finishes_collectives_in_progress(pool: Pool, backend: str) -> None:
    assert pool.check(world_destroyed_while_under_way, 3, backend, renew=True) == [6.0] * 3


def beside_gloo() -> list[int]:
    """Two ringfence groups beside a default group of Gloo, destroyed one after the other, and then a third."""
    first, second = dist.new_group(backend="ringfence"), dist.new_group(backend="ringfence")
    found = [total(first), total(second)]
    dist.destroy_process_group(first)
    found.append(total(second))
    dist.destroy_process_group(second)
    third = dist.new_group(backend="ringfence")
    found.append(total(third))
    dist.destroy_process_group(third)
    return [*found, total()]


def test_groups_beside_a_default_group_of_another_backend(pool: Pool) -> None:
    assert pool.check(beside_gloo, 2, "gloo", renew=True) == [[1] * 5] * 2


def used_after_destruction(used_before: bool) -> list[str]:
    """Return the errors of operations on a destroyed group, called on the group: torch's functions no longer know it."""
    group = dist.new_group()
    if used_before:
        total(group)
    dist.barrier()
    dist.destroy_process_group(group)
    peer = 1 - dist.get_rank()
    tensor = torch.ones(1)
    found = []
    for operation in (lambda: group.allreduce([tensor]), lambda: group.recv([tensor], peer, 0)):
        with pytest.raises(RuntimeError) as caught:
            operation().wait()
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    assert total() == 1
    return found


@pytest.mark.parametrize("used_before", [True, False])
def test_destroyed_group_raises(pool: Pool, used_before: bool) -> None:
    # Not on Gloo, which continues. The group's timeout is far away, so nothing may wait for it.
    for messages in pool.check(used_after_destruction, 2, "ringfence", (used_before,), HANG, seconds=FAR):
        assert all(message.startswith("ProtocolError") and "was destroyed" in message for message in messages)


def results_of_functional_collectives() -> None:
    world = dist.get_world_size()
    result = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    dist.all_reduce(result)
    assert (result == world * world).all()


def test_result_of_a_functional_collective_can_be_reduced(pool: Pool, backend: str) -> None:
    pool.check(results_of_functional_collectives, 2, backend)
