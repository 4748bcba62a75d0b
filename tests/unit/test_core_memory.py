"""Memory that is freed or replaced: tensors that are resized during a call, and views that outlive their segment.

Under scripts/sanitize, the address sanitizer fails every test that reads or writes freed memory.
"""

from __future__ import annotations

import gc
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.two_tensor import TwoTensor

from ringfence.backend.binding import CallMemory
from ringfence.collectives import Collective
from ringfence.dataplane import _core, buffers, native
from ringfence.dataplane.request import Request
from ringfence.errors import AbortedError, RingfenceError, TensorChangedError
from ringfence.link import seal
from ringfence.link.frames import Call
from tests.memory_cluster import World, all_reduce, broadcast
from tests.unit.runtime_calls import KINDS, TABLES, Bound, bind, transfer

COUNT = 300_000  # several segments on each of three workers

CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "emptied": lambda tensor: tensor.untyped_storage().resize_(0),
    "made larger": lambda tensor: tensor.untyped_storage().resize_(2 * tensor.untyped_storage().nbytes()),
    "made larger as a tensor": lambda tensor: tensor.resize_(2 * tensor.numel()),
    "moved to shared memory": lambda tensor: tensor.share_memory_(),
}


def settle(world: World) -> None:
    world.run([Request(Call(0), float("inf"))])


def step(world: World, rounds: int) -> None:
    for _ in range(rounds):
        for engine in world.engines:
            engine.run_ready()
        world.wires.deliver(None)


def warm_world(size: int, **options: Any) -> World:
    """Return a memory cluster whose links are open."""
    world = World(size, **options)
    world.run(
        [
            world.submit(world.communicators[rank], all_reduce(world.communicators[rank], torch.ones(4)))
            for rank in range(size)
        ]
    )
    return world


def assert_blamed(world: World, requests: list[Any], culprit: int, what: str, only_sends: int = -1) -> None:
    """Check that the culprit's error says what its program did, that the others name the culprit, and that all fail.

    Except a rank that only sends: it may have completed before.
    """
    settle(world)
    for rank, request in enumerate(requests):
        assert request.done, f"rank {rank} hangs"
        if rank == only_sends != culprit and request.error is None:
            continue
        if rank == culprit:
            assert isinstance(request.error, TensorChangedError), request.error
            assert str(request.error).startswith(f"worker {culprit}: {what} #")
            assert "the storage of one of its tensors was" in str(request.error)
            assert "Wait for the call to end (work.wait())" in str(request.error)
        else:
            assert isinstance(request.error, AbortedError), request.error
            assert f"worker {culprit} reported RingfenceError: worker {culprit}: {what} #" in str(request.error)


# -- tensors that change under a call ------------------------------------------------------------------------------------


@pytest.mark.promise("A tensor that is resized or moved during a call fails the call on every worker.")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rounds", [0, 3, 5, 7])
def test_a_tensor_resized_during_an_all_reduce_fails_it(change: str, rounds: int) -> None:
    world = warm_world(3, capacity=1 << 16)
    tensors = [torch.ones(COUNT) for _ in range(3)]
    requests = [
        world.submit(world.communicators[rank], all_reduce(world.communicators[rank], tensors[rank]))
        for rank in range(3)
    ]
    step(world, rounds)
    assert not requests[1].done
    CHANGES[change](tensors[1])
    assert_blamed(world, requests, 1, "all_reduce")


def buffers_of(bound: Bound) -> list[torch.Tensor]:
    return [tensor for tensors in bound.request.keep.values() for tensor in tensors]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not Collective.BARRIER], ids=lambda kind: kind.name)
def test_no_collective_starts_on_freed_memory(kind: Collective, table: str) -> None:
    world = World(3, table=TABLES[table])
    bound = [bind(kind, world.communicators[rank], 5000) for rank in range(3)]
    for rank, each in enumerate(bound):
        world.submit(world.communicators[rank], each.request)
    for tensor in buffers_of(bound[1]):
        tensor.untyped_storage().resize_(0)
    settle(world)
    assert isinstance(bound[1].request.error, TensorChangedError)
    assert f"worker 1: {kind.name.lower()} #1" in str(bound[1].request.error)
    assert all(isinstance(each.request.error, RingfenceError | None) for each in bound)


@pytest.mark.parametrize(
    ("reduction", "dtype"), [(dist.ReduceOp.AVG, torch.float32), (dist.ReduceOp.MAX, torch.int16)], ids=["avg", "max"]
)
@pytest.mark.parametrize("rounds", [0, 2, 4])
def test_a_reduction_by_torch_does_not_use_freed_memory(reduction: Any, dtype: torch.dtype, rounds: int) -> None:
    world = World(2, capacity=1 << 16)
    tensors = [torch.ones(COUNT, dtype=dtype) for _ in range(2)]
    requests = [
        world.submit(
            world.communicators[rank], all_reduce(world.communicators[rank], tensors[rank], reduction=reduction)
        )
        for rank in range(2)
    ]
    step(world, rounds)
    tensors[0].untyped_storage().resize_(0)
    assert_blamed(world, requests, 0, "all_reduce")


@pytest.mark.parametrize("culprit", [0, 1], ids=["sender", "receiver"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_resized_during_a_transfer_fails_both_sides(change: str, culprit: int) -> None:
    world = World(2, capacity=1 << 16)
    tensors = [torch.ones(COUNT) for _ in range(2)]
    requests = [transfer(tensor) for tensor in tensors]
    world.engines[0].send(world.communicators[0], requests[0], 1)
    world.engines[1].receive(world.communicators[1], requests[1], 0)
    while not all(each.position for each in requests):
        step(world, 1)
    assert all(each.position < each.segments for each in requests)
    CHANGES[change](tensors[culprit])
    assert_blamed(world, requests, culprit, "send/recv")


@pytest.mark.parametrize(
    ("owner", "half", "kind"),
    [
        (seal.Sealer, "seal_into", Collective.ALL_REDUCE),
        (seal.Opener, "open_into", Collective.ALL_TO_ALL),
        (seal.OriginKeys, "seal_into", Collective.BROADCAST),
        (seal.OriginKeys, "open_into", Collective.BROADCAST),
    ],
    ids=["sealer", "opener", "seal_as_origin", "open_from_origin"],
)
def test_memory_freed_during_a_cipher_call_yields_no_result(
    monkeypatch: pytest.MonkeyPatch, owner: Any, half: str, kind: Collective
) -> None:
    """Ciphers release the interpreter's lock, so the program can resize the tensor then: nothing is sent or returned."""
    world = warm_world(3)
    bound = [bind(kind, world.communicators[rank], COUNT) for rank in range(3)]
    tensors = [(rank, tensor) for rank, each in enumerate(bound) for tensor in buffers_of(each)]
    genuine = getattr(owner, half)
    changed: list[Any] = []

    def whose(view: memoryview) -> list[tuple[int, torch.Tensor]]:
        at = buffers.address_of(view) if len(view) else 0
        return [each for each in tensors if each[1].data_ptr() <= at < each[1].data_ptr() + each[1].nbytes]

    def changing(self: Any, *arguments: Any) -> None:
        genuine(self, *arguments)
        for rank, tensor in whose(arguments[-2 if half == "seal_into" else -1]):
            if not changed:
                changed.append(rank)
                tensor.untyped_storage().resize_(0)

    monkeypatch.setattr(owner, half, changing)
    requests = [world.submit(world.communicators[rank], each.request) for rank, each in enumerate(bound)]
    settle(world)
    (culprit,) = changed
    assert_blamed(world, requests, culprit, kind.name.lower(), only_sends=0 if kind is Collective.BROADCAST else -1)


def test_an_interrupted_open_does_not_wipe_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    world = warm_world(2)
    tensors = [torch.ones(COUNT) for _ in range(2)]

    def interrupted(self: Any, *arguments: Any) -> None:
        del arguments
        tensors[1].untyped_storage().resize_(0)
        raise KeyboardInterrupt

    for owner in (seal.Opener, seal.OriginKeys):
        monkeypatch.setattr(owner, "open_into", interrupted)
    requests = [
        world.submit(world.communicators[rank], broadcast(world.communicators[rank], tensors[rank]))
        for rank in range(2)
    ]
    with pytest.raises(KeyboardInterrupt):
        settle(world)
    assert not requests[1].done


@pytest.mark.parametrize("copied", ["before", "after"])
def test_a_copy_does_not_use_freed_memory(copied: str) -> None:
    """torch's copy_ does not check and would crash."""
    whole = torch.ones(1000, 2)
    stage = CallMemory()
    stage.in_place(whole[:, 0])
    copy = getattr(stage, copied)
    copy()
    whole.untyped_storage().resize_(0)
    with pytest.raises(TensorChangedError, match="resized from 8000 to 0 bytes"):
        copy()


def test_a_tensor_without_own_memory_is_copied_by_its_class() -> None:
    pair = TwoTensor(torch.ones(3, 4).t(), torch.ones(3, 4).t())
    stage = CallMemory()
    flat = stage.in_place(pair)
    for copy in (stage.before, stage.after):
        assert copy is not None
        copy()
    assert flat.tolist() == [1.0] * 12 and bool(pair.a.eq(1).all())


def test_a_tensor_may_be_resized_after_its_call() -> None:
    world = World(2)
    tensors = [torch.ones(COUNT) for _ in range(2)]
    world.run(
        [
            world.submit(world.communicators[rank], all_reduce(world.communicators[rank], tensors[rank]))
            for rank in range(2)
        ]
    )
    assert bool(tensors[0].eq(2).all())
    tensors[0].untyped_storage().resize_(0)
    others = [torch.ones(COUNT) for _ in range(2)]
    world.run(
        [
            world.submit(world.communicators[rank], all_reduce(world.communicators[rank], others[rank]))
            for rank in range(2)
        ]
    )
    assert bool(others[0].eq(2).all())


def test_set_data_does_not_affect_the_memory_of_a_call() -> None:
    world = World(2)
    tensors = [torch.ones(COUNT) for _ in range(2)]
    mine = tensors[0].view(-1)
    requests = [
        world.submit(world.communicators[rank], all_reduce(world.communicators[rank], tensors[rank]))
        for rank in range(2)
    ]
    tensors[0].set_(torch.zeros(3).untyped_storage(), 0, (3,))
    world.run(requests)
    assert [request.error for request in requests] == [None, None]
    assert bool(mine.eq(2).all()) and tensors[0].tolist() == [0.0] * 3


# -- views that are kept -------------------------------------------------------------------------------------------------

WATCHED = (
    "seal_into",
    "tag",
    "open_into",
    "check",
    "send",
    "recv_into",
    "combine_bytes",
    "divide_bytes",
    "as_tensor",
    "wipe",
)


class Profiler:
    """Keeps every local that the data plane passes to Python, and a view of each view, as a profiler may."""

    def __init__(self) -> None:
        self.views: list[memoryview] = []
        self.copies: list[memoryview] = []
        self.tensors: list[torch.Tensor] = []
        self.seen: set[str] = set()

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        name = frame.f_code.co_name
        if name not in WATCHED or event not in ("call", "return"):
            return
        self.seen.add(name)
        for each in (*frame.f_locals.values(), argument):
            if isinstance(each, memoryview):
                self.views.append(each)
                self.copies.append(each[:])
            elif isinstance(each, torch.Tensor):
                self.tensors.append(each)


@pytest.fixture
def profiler() -> Iterator[Profiler]:
    kept = Profiler()
    sys.setprofile(kept)
    try:
        yield kept
    finally:
        sys.setprofile(None)


def work_of_all_kinds() -> None:
    world = World(3)
    for dtype, reduction in ((torch.float32, dist.ReduceOp.AVG), (torch.int16, dist.ReduceOp.MAX)):
        tensors = [torch.ones(COUNT, dtype=dtype) for _ in range(3)]
        calls = [all_reduce(world.communicators[rank], tensors[rank], reduction=reduction) for rank in range(3)]
        world.run([world.submit(world.communicators[rank], each) for rank, each in enumerate(calls)])
    tensors = [torch.ones(COUNT) for _ in range(3)]
    world.run(
        [
            world.submit(world.communicators[rank], broadcast(world.communicators[rank], tensors[rank]))
            for rank in range(3)
        ]
    )
    sent, received = transfer(torch.ones(COUNT)), transfer(torch.ones(COUNT))
    world.engines[0].send(world.communicators[0], sent, 1)
    world.engines[1].receive(world.communicators[1], received, 0)
    world.run([sent, received])


@pytest.mark.promise("A view that the data plane handed out refers to live memory, or raises ValueError.")
def test_a_kept_view_keeps_its_memory_or_is_released(profiler: Profiler) -> None:
    work_of_all_kinds()
    sys.setprofile(None)
    gc.collect()
    assert {"seal_into", "tag", "open_into", "check", "send", "recv_into"} <= profiler.seen
    assert len(profiler.views) > 100 < len(profiler.copies)
    released = 0
    for view in (*profiler.views, *profiler.copies):
        try:
            owner = view.obj
        except ValueError:
            released += 1  # with the call that it was for
            continue
        assert owner is not None, "a view of memory without an owner"
        if len(view):
            assert view[0] == view[0] and view[-1] == view[-1]  # the address sanitizer looks at this
            if not view.readonly:
                view[0] = view[-1] = 0
    assert not native.COMPILED or released > len(profiler.views) / 2, "views for the ciphers end with the call"
    assert not any(len(tensor) and bool(tensor.ne(tensor).any()) for tensor in profiler.tensors)


def test_a_view_keeps_its_segment_alive() -> None:
    for pool in (_core.Pool(0), buffers.Pool(0)):
        segment = pool.take()
        view = segment.view[10:20]
        view[:] = b"0123456789"
        pool.give(segment)
        del segment, pool
        gc.collect()
        assert bytes(view) == b"0123456789"


def test_a_segment_with_a_view_is_not_reused() -> None:
    """The segment of a written frame returns to the pool, unless a view of it exists."""
    here, there = socket.socketpair()
    with here, there:
        pool = _core.Pool()
        end = _core.Endpoint(deque(), set(), pool)
        end.stream, end.writable = here, True
        made = []
        for kept in ([], [memoryview], []):
            segment = pool.take()
            views = [view(segment) for view in kept]
            end.put(b"frame", segment)
            del segment
            assert end.flush()
            made.append(pool.made)
            del views
        assert made == [1, 1, 2]


def test_a_view_of_a_tensor_keeps_its_memory() -> None:
    view = buffers.as_bytes(torch.full((COUNT,), 7, dtype=torch.uint8))[5:]
    gc.collect()
    assert bytes(view[:3]) == b"\7\7\7"
    assert buffers.lease_of(view) is not None
    assert buffers.lease_of(memoryview(bytearray(1))) is None


def test_an_execution_in_a_cycle_is_collected_with_its_views() -> None:
    """The collector must not clear a memoryview that is in use, even if all its users are garbage."""
    for _ in range(3):
        world = World(3)
        for rank in range(3):
            world.submit(world.communicators[rank], all_reduce(world.communicators[rank], torch.ones(COUNT)))
        step(world, 4)
        del world
        gc.collect()
