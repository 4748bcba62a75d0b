"""Faults with tensors on the simulated device: every rank raises by name, and the device stays usable."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringfence.device.device_thread import thread_of
from ringfence.errors import RingfenceError, UnsupportedError
from ringfence_lab import accelerator
from tests import device
from tests.device import FAR
from tests.integration.process_signal import ProcessSignal
from tests.integration.strategies import FEATURES, Model, on_device, sgd
from tests.integration.test_faults import CHANGES
from tests.pool import Failure, Pool

WORLD = 3
SMALL, LARGE = 1000, 1 << 22  # elements: one pass, several passes


def all_reduce(elements: int = SMALL, on: torch.device | None = None) -> float:
    tensor = torch.ones(elements, device=on or device.load())
    dist.all_reduce(tensor)
    return float(tensor.sum().item()) / elements


# -- a killed worker ------------------------------------------------------------------------------------------------


def by_wait(mine: torch.device) -> None:
    dist.all_reduce(torch.ones(LARGE, device=mine), async_op=True).wait()


def by_future(mine: torch.device) -> None:
    dist.all_reduce(torch.ones(SMALL, device=mine), async_op=True).get_future().wait()


def by_callback(mine: torch.device) -> None:
    future = dist.all_reduce(torch.ones(SMALL, device=mine), async_op=True).get_future()
    future.then(lambda done: done.value()[0] * 2).wait()


def by_ring_of_transfers(mine: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(torch.ones(LARGE, device=mine), (rank + 1) % world)
    dist.recv(torch.ones(LARGE, device=mine), (rank - 1) % world)
    assert sent is not None
    sent.wait()


def by_ddp(mine: torch.device) -> None:
    with on_device(mine):
        module = DistributedDataParallel(Model())
    optimizer = sgd(module)
    while True:
        module(torch.ones(4, FEATURES, device=mine)).sum().backward()
        optimizer.step()


WAYS = {way.__name__: way for way in (by_wait, by_future, by_callback, by_ring_of_transfers, by_ddp)}


def die(way: str, victim: int) -> str:
    """Survivors raise from calls that the victim never makes; return the error."""
    mine = device.load()
    with device.behaviour(jitter=1e-4):
        try:
            for _ in range(3):
                all_reduce(LARGE)
            if way == "by_ddp" and dist.get_rank() == victim:  # the others are in their first step or after it
                with on_device(mine):
                    DistributedDataParallel(Model())
            if dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            while True:  # a survivor may hear of it before it has its last result
                WAYS[way](mine)
        except RuntimeError as error:
            assert torch.ones(10, device=mine).sum().item() == 10  # the device computes
            return f"{type(error).__name__}: {error}"


@pytest.mark.promise("A killed worker makes every other worker raise, and the error names it.")
@pytest.mark.parametrize("way", WAYS)
def test_every_survivor_names_a_killed_worker_and_its_device_stays_usable(devices: Pool, way: str) -> None:
    victim = 1
    results = devices.run(die, WORLD, args=(way, victim), renew=True, **FAR)
    assert results[victim].message == "killed by SIGKILL", results[victim]
    for rank, result in enumerate(results):
        if rank != victim:
            assert not isinstance(result, Failure), result
            assert "PeerLostError" in result or "AbortedError" in result
            assert f"worker {victim}" in result
    assert devices.check(all_reduce, WORLD, args=(LARGE,)) == [WORLD] * WORLD  # the survivors, in a new group


# -- tensors that change --------------------------------------------------------------------------------------------


def resize_under_way(change: str, path: str) -> tuple[str, str]:
    """Rank 0 resizes the tensor during its call, before rank 1 has called.

    What was copied before is right: rank 1 may get its result, and the error from its next call.
    """
    mine = device.load()
    tensor = torch.ones(1 << 20, device=mine)
    with ProcessSignal(path) as ready:
        try:
            all_reduce()
            if dist.get_rank():
                ready.wait(seconds=FAR["timeout"])
                dist.all_reduce(tensor)
                assert tensor.min().item() == tensor.max().item() == 2
                dist.barrier()
            else:
                work = dist.all_reduce(tensor, async_op=True)
                CHANGES[change](tensor)
                ready.notify()
                work.wait()
        except RingfenceError as error:
            assert torch.ones(10, device=mine).sum().item() == 10
            return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_resized_during_a_collective_fails_all_ranks(devices: Pool, tmp_path: Path, change: str) -> None:
    with ProcessSignal(tmp_path / "signal") as ready:
        culprit, other = devices.check(resize_under_way, 2, args=(change, ready.path), renew=True, **FAR)
    assert culprit[0] == "TensorChangedError" and other[0] == "AbortedError"
    assert "worker 0: all_reduce #2 (1048576 x float32, sum)" in culprit[1]
    assert "the storage of one of its tensors was resized" in culprit[1]
    assert "worker 0 reported RingfenceError: worker 0: all_reduce #2" in other[1]


# -- refusals -------------------------------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    """What is refused before anything is sent, and why."""
    mine = device.load()
    other = torch.device("sim", 1 - mine.index)
    here, there, host = torch.ones(4, device=mine), torch.ones(4, device=other), torch.ones(4)
    sparse = torch.sparse_coo_tensor(
        torch.zeros(1, 1, dtype=torch.int64, device=mine), torch.ones(1, device=mine), (4,), check_invariants=False
    )

    def captured() -> None:
        with accelerator.capturing(torch.accelerator.current_stream()):
            dist.all_reduce(here)

    def captured_send() -> None:
        with accelerator.capturing(torch.accelerator.current_stream()):
            dist.send(here, 1 - dist.get_rank())

    calls: dict[str, Callable[[], Any]] = {
        "captured": captured,
        "captured send": captured_send,
        "two devices": lambda: dist.all_gather([here.clone(), there], here),
        "device and host": lambda: dist.all_gather([here.clone(), host], here),
        "host and device": lambda: dist.all_gather([here.clone(), here.clone()], host),
        "host and device, in one tensor": lambda: dist.reduce_scatter_tensor(torch.ones(2), here),
        "sparse": lambda: dist.all_reduce(sparse),
        "sparse broadcast": lambda: dist.broadcast(sparse, 0),
        "meta": lambda: dist.all_reduce(torch.ones(4, device="meta")),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except UnsupportedError as error:
            found[name] = str(error)
        else:
            found[name] = "not refused"
    assert all_reduce() == 2
    return found


def test_unsupported_calls_are_refused_by_name(devices: Pool) -> None:
    for found in devices.check(refusals, 2, renew=True):
        for name in ("captured", "captured send"):
            assert "cannot be captured into a graph" in found[name]
        for name in ("two devices", "device and host", "host and device", "host and device, in one tensor"):
            assert "the tensors of one call are on several devices (" in found[name]
        assert "sparse tensors can only be reduced on the CPU" in found["sparse"]
        assert "only all_reduce supports sparse tensors" in found["sparse broadcast"]
        assert "this one is on meta" in found["meta"]


# -- host and device ------------------------------------------------------------------------------------------------


def on_different_devices(operation: str, elements: int) -> Any:
    """Rank 0 passes device tensors, the others host tensors: return the sum of the result, or the error."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = device.load() if rank == 0 else torch.device("cpu")
    tensor = torch.ones(elements * world, device=mine) * (rank + 1)
    results = torch.zeros(elements * world, device=mine)
    try:
        match operation:
            case "all_reduce":
                dist.all_reduce(tensor)
                results = tensor
            case "broadcast":
                dist.broadcast(tensor, 1)
                results = tensor
            case "all_gather":
                dist.all_gather_into_tensor(results, tensor[:elements].clone())
            case "reduce_scatter":
                results = results[:elements].clone()
                dist.reduce_scatter_tensor(results, tensor)
            case "all_to_all":
                dist.all_to_all_single(results, tensor)
            case "send":
                if rank == 0:
                    dist.send(tensor, 1)
                    results = tensor
                elif rank == 1:
                    dist.recv(results, 0)
        dist.barrier()  # a rank that only sends learns of a mismatch at its next call
        return float(results.double().mean().item())
    except RingfenceError as error:
        return type(error).__name__, str(error)


RIGHT = {  # the mean of the results, by rank
    "all_reduce": [6.0, 6.0, 6.0],
    "broadcast": [2.0, 2.0, 2.0],
    "all_gather": [2.0, 2.0, 2.0],
    "reduce_scatter": [6.0, 6.0, 6.0],
    "all_to_all": [2.0, 2.0, 2.0],
    "send": [1.0, 1.0, 0.0],
}


@pytest.mark.parametrize("elements", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("operation", RIGHT)
def test_ranks_that_mix_host_and_device_get_the_result(devices: Pool, operation: str, elements: int) -> None:
    """Collectives are divided into passes alike, wherever the tensors of a rank are."""
    assert devices.check(on_different_devices, WORLD, args=(operation, elements), renew=True, **FAR) == RIGHT[operation]


def several_devices() -> list[float]:
    """One group, tensors of both devices and of the host in turn, without waiting between the calls."""
    device.load()
    rank = dist.get_rank()
    places = [torch.device("sim", 0), torch.device("cpu"), torch.device("sim", 1)]
    with device.behaviour(jitter=1e-3):
        tensors = [torch.full((LARGE // 8,), float(rank + n), device=places[n % 3]) for n in range(9)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            assert work is not None
            work.wait()
        first = torch.ones(SMALL, device="sim:0") * (rank + 1)
        second = torch.ones(SMALL, device="sim:1") * (rank + 1)
        for request in [dist.isend(first, 1 - rank), dist.irecv(second, 1 - rank)]:
            assert request is not None
            request.wait()
        return [tensor.double().mean().item() for tensor in (*tensors, second)]


def test_several_devices_and_the_host_in_one_group(devices: Pool) -> None:
    results = devices.check(several_devices, 2, renew=True)
    for rank, result in enumerate(results):
        assert result == [*(2.0 * n + 1 for n in range(9)), 2.0 - rank]


# -- the start and barriers -----------------------------------------------------------------------------------------


def start_with_device(folder: str) -> tuple[float, str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    mine = device.load()
    os.environ["RINGFENCE_GENERATION"] = str(int(os.environ["RINGFENCE_GENERATION"]) + 1000)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("ringfence", store=store, rank=rank, world_size=world, device_id=torch.device("sim", rank))
    group = dist.new_group(timeout=timedelta(seconds=FAR["seconds"]))
    tensor = torch.ones(SMALL, device=mine)
    dist.all_reduce(tensor, group=group)
    return all_reduce() + float(tensor[0].item()), dist.get_backend(group)


def test_init_process_group_takes_a_device(devices: Pool, tmp_path: Path) -> None:
    assert devices.check(start_with_device, 2, args=(str(tmp_path),), renew=True) == [(4.0, "ringfence")] * 2


def barrier_behind_a_kernel(other_stream: bool) -> bool:
    """Return whether the kernel before the barrier had ended when the barrier returned."""
    mine = device.load()
    stream = torch.Stream(mine) if other_stream else torch.accelerator.current_stream()
    with stream:
        if dist.get_rank() == 0:
            accelerator.sleep(0.3)
        done = torch.Event(mine)
        done.record(stream)
        dist.barrier(device_ids=[mine.index])
        return bool(done.query())


@pytest.mark.parametrize("other_stream", [False, True], ids=["default stream", "other stream"])
def test_a_barrier_with_a_device_waits_for_its_stream(devices: Pool, other_stream: bool) -> None:
    assert devices.check(barrier_behind_a_kernel, 2, args=(other_stream,), renew=True) == [True, True]


# -- memory ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def copies_to_the_host_held(mine: torch.device) -> Iterator[Callable[[], None]]:
    """On rank 0 no copy of a call to the host begins before the end. Yields a function that waits until one is issued."""
    copies = accelerator.stats().copies_down

    def issued() -> None:
        while accelerator.stats().copies_down == copies:
            os.sched_yield()

    with contextlib.ExitStack() as held:
        if dist.get_rank() == 0:
            with thread_of(mine).down:
                held.enter_context(accelerator.hold())
        yield issued


def free_during_the_copy() -> tuple[str, str]:
    """Rank 0 frees the tensor's memory while it is copied to the host, and another tensor gets it."""
    mine = device.load()
    tensor = torch.ones(SMALL, device=mine)
    try:
        all_reduce(on=mine)
        with copies_to_the_host_held(mine) as issued:
            work = dist.broadcast(tensor, 0, async_op=True)
            assert work is not None
            if dist.get_rank() == 0:
                issued()
                tensor.untyped_storage().resize_(0)
                tensor = torch.full((SMALL,), 7.0, device=mine)
        work.wait()
    except RingfenceError as error:
        return type(error).__name__, str(error)
    return "", str(tensor.tolist()[:3])


@pytest.mark.promise("A tensor that is resized or moved during a call fails the call on every worker.")
def test_a_tensor_freed_during_its_copy_fails_all_ranks(devices: Pool) -> None:
    culprit, other = devices.check(free_during_the_copy, 2, renew=True, **FAR)
    assert culprit[0] == "TensorChangedError", culprit
    assert other[0] == "AbortedError", other


def abort_during_copies(operation: str) -> None:
    """Abort while tensors are copied, and wait until all pinned slots are idle again."""
    mine = device.load()
    all_reduce(LARGE)
    rank = dist.get_rank()
    tensor = torch.ones(LARGE, device=mine)
    torch.accelerator.synchronize()
    with copies_to_the_host_held(mine) as issued:
        if operation == "all_reduce":
            work = dist.all_reduce(tensor, async_op=True)
        else:
            work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
        assert work is not None
        with contextlib.suppress(RingfenceError):
            if rank == 0:
                issued()
                dist.group.WORLD.abort()  # type: ignore[union-attr]
            work.wait()
    slots = thread_of(mine).slots
    while slots._made != len(slots._idle):  # the pool ends a worker that has lost one
        os.sched_yield()


@pytest.mark.parametrize("operation", ["all_reduce", "send"])
def test_no_pinned_slot_is_lost_with_an_aborted_call(devices: Pool, operation: str) -> None:
    devices.check(abort_during_copies, 2, args=(operation,), renew=True, **FAR)


def reduce_a_saved_tensor(kind: str) -> list[float]:
    """A collective writes a tensor that autograd has saved: as on the CPU, this is not an error."""
    mine = device.load() if kind == "device" else torch.device("cpu")
    weight = torch.ones(4, device=mine)
    inputs = torch.ones(4, device=mine, requires_grad=True)
    result = (inputs * weight).sum()
    dist.all_reduce(weight)
    result.backward()  # type: ignore[no-untyped-call]
    assert inputs.grad is not None
    return inputs.grad.tolist()


def test_a_result_in_a_saved_tensor_is_no_error_as_on_the_cpu(devices: Pool) -> None:
    expected = devices.check(reduce_a_saved_tensor, 2, args=("cpu",), renew=True)
    assert devices.check(reduce_a_saved_tensor, 2, args=("device",)) == expected == [[2.0] * 4] * 2


def collect_in_a_child() -> list[int]:
    """Fork during collectives on the device; the child drops all it inherited. Return the exit statuses."""
    mine = device.load()
    works = [dist.all_reduce(torch.ones(LARGE, device=mine), async_op=True) for _ in range(3)]
    statuses = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            dist.group.WORLD = None
            works.clear()
            gc.collect()
            os._exit(0)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    for work in works:
        assert work is not None
        work.wait()
    assert all_reduce() == dist.get_world_size()
    return statuses


def test_a_child_forked_during_collectives_ends(devices: Pool) -> None:
    assert devices.check(collect_in_a_child, 2, renew=True) == [[0] * 3] * 2
