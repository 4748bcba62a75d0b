"""Point-to-point and asynchronous operations complete correctly in any order, without a deadlock."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.limits import HANG
from tests.pool import Pool

MEBI = 1 << 18  # float32 elements in a MiB


def filled(value: float, count: int = MEBI) -> torch.Tensor:
    return torch.full((count,), float(value))


def tags_in_the_other_order(size: int) -> None:
    if dist.get_rank() == 0:
        for work in [dist.isend(filled(tag, size), 1, tag=tag) for tag in (1, 2, 3)]:
            work.wait()
    else:
        for tag in (3, 1, 2):
            incoming = filled(0, size)
            dist.recv(incoming, 0, tag=tag)
            assert torch.equal(incoming, filled(tag, size))


@pytest.mark.parametrize("size", [1, MEBI])
def test_tags_are_received_in_another_order_than_sent(pool: Pool, backend: str, size: int) -> None:
    pool.check(tags_in_the_other_order, 2, backend, (size,))


def same_tag_keeps_order(count: int) -> list[float]:
    if dist.get_rank() == 0:
        for work in [dist.isend(filled(number, 10), 1) for number in range(count)]:
            work.wait()
        return []
    buffers = [filled(-1, 10) for _ in range(count)]
    works = [dist.irecv(buffer, 0) for buffer in buffers]
    for work in reversed(works):
        work.wait()
    return [buffer[0].item() for buffer in buffers]


def test_messages_of_one_tag_arrive_in_the_order_sent(pool: Pool, backend: str) -> None:
    assert pool.check(same_tag_keeps_order, 2, backend, (200,))[1] == list(range(200))


def late_recv_behind_collectives() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    work = dist.isend(filled(7), 1) if rank == 0 else None
    for _ in range(5):
        total = filled(rank)
        dist.all_reduce(total)
        assert torch.equal(total, filled(sum(range(world))))
    if rank == 1:
        incoming = filled(0)
        dist.recv(incoming, 0)
        assert torch.equal(incoming, filled(7))
    if work is not None:
        work.wait()


def test_a_late_recv_waits_behind_collectives(pool: Pool, backend: str) -> None:
    pool.check(late_recv_behind_collectives, 3, backend)


def early_recv_before_collectives() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    incoming = filled(0)
    work = dist.irecv(incoming, 0) if rank == 1 else None
    total = filled(rank)
    dist.all_reduce(total)
    assert torch.equal(total, filled(sum(range(world))))
    if rank == 0:
        dist.send(filled(9), 1)
    if work is not None:
        work.wait()
        assert torch.equal(incoming, filled(9))


def test_early_recv_does_not_block_collectives(pool: Pool, backend: str) -> None:
    pool.check(early_recv_before_collectives, 3, backend)


def both_send_first() -> None:
    rank = dist.get_rank()
    incoming = filled(0, 8 * MEBI)
    work = dist.isend(filled(rank, 8 * MEBI), 1 - rank)
    dist.recv(incoming, 1 - rank)
    work.wait()
    assert torch.equal(incoming, filled(1 - rank, 8 * MEBI))


def test_two_ranks_send_to_each_other_at_once(pool: Pool, backend: str) -> None:
    pool.check(both_send_first, 2, backend)


def groups_in_opposite_order() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(2)]
    for count in (1, MEBI):
        tensors = [filled(rank + 10 * index, count) for index in range(2)]
        order = (0, 1) if rank % 2 == 0 else (1, 0)
        works = [dist.all_reduce(tensors[index], group=groups[index], async_op=True) for index in order]
        for work in works:
            work.wait()
        for index, tensor in enumerate(tensors):
            assert torch.equal(tensor, filled(sum(range(world)) + 10 * index * world, count))
    for group in groups:
        dist.destroy_process_group(group)


def test_two_groups_are_used_in_opposite_order(pool: Pool, backend: str) -> None:
    pool.check(groups_in_opposite_order, 4, backend)


def many_outstanding(count: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [torch.tensor([number, rank, 1]) for number in range(count)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    ranks = sum(range(world))
    for number, tensor in enumerate(tensors):
        assert tensor.tolist() == [number * world, ranks, world]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_ten_thousand_operations_are_outstanding(pool: Pool, backend: str, world: int) -> None:
    count = 10_000 if backend == "ringfence" else 1_000  # Gloo, the reference, takes ten times as long
    pool.check(many_outstanding, world, backend, (count,), timeout=HANG)


def many_messages_outstanding(count: int) -> None:
    other = 1 - dist.get_rank()
    outgoing = [torch.tensor([number]) for number in range(count)]
    incoming = [torch.tensor([-1]) for _ in range(count)]
    works = [dist.isend(tensor, other, tag=number % 7) for number, tensor in enumerate(outgoing)]
    works += [dist.irecv(tensor, other, tag=number % 7) for number, tensor in enumerate(incoming)]
    for work in works:
        work.wait()
    assert [tensor.item() for tensor in incoming] == list(range(count))


def test_thousands_of_messages_are_outstanding(pool: Pool, backend: str) -> None:
    pool.check(many_messages_outstanding, 2, backend, (2_000,))


def from_any_source() -> list[int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(filled(rank, 1000), 0, tag=3)
        return []
    seen: list[int] = []
    for _ in range(world - 1):
        incoming = filled(0, 1000)
        source = dist.recv(incoming, tag=3)
        assert torch.equal(incoming, filled(source, 1000))
        seen.append(source)
    return sorted(seen)


def test_recv_from_any_source_returns_the_source(pool: Pool, backend: str) -> None:
    assert pool.check(from_any_source, 5, backend)[0] == [1, 2, 3, 4]


def on_one_tensor() -> None:
    """A chain of dependent collectives, each started before waiting for the previous one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = torch.tensor([rank + 1])
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(10)]
    works[-1].wait()
    assert tensor.item() == sum(range(1, world + 1)) * world**9
    for work in works:
        work.wait()
        assert work.is_completed()


def test_collectives_of_a_group_keep_their_order(pool: Pool) -> None:
    # Not on Gloo: its threads execute the calls of one group concurrently.
    pool.check(on_one_tensor, 3, "ringfence")


def calls_on_one_strided_tensor() -> None:
    world = dist.get_world_size()
    view = torch.arange(24.0).view(6, 4).t() + dist.get_rank()
    assert not view.is_contiguous()
    for work in [dist.all_reduce(view, async_op=True) for _ in range(4)]:
        work.wait()
    total = torch.arange(24.0).view(6, 4).t() * world + sum(range(world))
    assert torch.equal(view, total * world**3)


def test_calls_on_one_strided_tensor_follow_each_other(pool: Pool) -> None:
    pool.check(calls_on_one_strided_tensor, 3, "ringfence")


def tensors_of_inference_mode() -> None:
    world = dist.get_world_size()
    with torch.inference_mode():
        plain, strided = torch.ones(5), torch.ones(3, 4).t()
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in (plain, strided)]:
            work.wait()
        assert (plain == world).all() and (strided == world).all()


def test_tensors_of_inference_mode_are_reduced(pool: Pool, backend: str) -> None:
    pool.check(tensors_of_inference_mode, 2, backend)


def inference_under_two_drivers() -> None:
    """An operation that starts in a waiting caller in inference mode and ends in the background thread."""
    world, group = dist.get_world_size(), dist.new_group()
    with torch.inference_mode():
        for _ in range(20):
            long, short = torch.ones(MEBI), torch.ones(5)
            work = dist.all_reduce(long, group=group, async_op=True)
            dist.all_reduce(short)
            work.wait()
            assert (long == world).all() and (short == world).all()


def test_inference_mode_ends_with_its_own_thread(pool: Pool, backend: str) -> None:
    pool.check(inference_under_two_drivers, 2, backend)
