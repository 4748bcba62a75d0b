"""Situations in which a staged collective must wait for the device or keep a reference, each with its right result.

Each scenario runs on two workers and returns whether the numbers are right. Slots are small, so that a call takes many
passes. FAULTS names every wait and reference of the staging, with a way to leave it out.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.futures import Future

from ringfence.backend import base
from ringfence.backend import work as work_module
from ringfence.backend.work import RingfenceWork
from ringfence.collectives import Collective, Passes, Thresholds, passes, selection
from ringfence.device import collective, slots, transfer
from ringfence.device.call import StagedCall
from ringfence.device.collective import StagedCollective
from ringfence.device.device_thread import thread_of
from ringfence.machines import Machines
from ringfence_lab import accelerator
from tests import device

COUNT = 400_000  # float32: ten passes of small slots
KERNEL = 0.03  # seconds
SLOWER = 1.0  # times: kernels and copies that scenarios delay. `run` sets it

Scenario = Callable[[torch.device, int], bool]


def full(value: float, where: torch.device, count: int = COUNT) -> torch.Tensor:
    return torch.full((count,), value, device=where)


def producer(where: torch.device, rank: int) -> bool:
    """The kernel that produces the input still runs when the collective is called."""
    tensor = full(0.0, where)
    torch.accelerator.synchronize()
    accelerator.sleep(KERNEL * SLOWER)
    tensor.add_(rank + 1)
    dist.all_reduce(tensor)
    return holds(tensor, 3.0)


def own_stream(where: torch.device, rank: int) -> bool:
    """The same on a stream of the caller, while the default stream is idle."""
    mine, tensor = torch.Stream(where), full(0.0, where)
    mine.wait_stream(torch.accelerator.current_stream())
    with mine:
        accelerator.sleep(KERNEL * SLOWER)
        tensor.add_(rank + 1)
        pending = dist.all_reduce(tensor, async_op=True)
        pending.wait()
        tensor.mul_(2)
    return holds(tensor, 6.0)


def slow_copies_to_the_host(where: torch.device, rank: int) -> bool:
    tensor = full(rank + 1.0, where)
    with device.behaviour(down=3e-3 * SLOWER):
        dist.all_reduce(tensor)
    return holds(tensor, 3.0)


def consumer(where: torch.device, rank: int) -> bool:
    """The copies to the device are slow, and the caller's next kernel follows wait() at once."""
    tensor, copy = full(rank + 1.0, where), full(0.0, where)
    with device.behaviour(up=3e-3 * SLOWER):
        dist.all_reduce(tensor, async_op=True).wait()
        copy.add_(tensor)
    return holds(copy, 3.0)


def output_of_recv_in_use(where: torch.device, rank: int) -> bool:
    """An earlier kernel of the caller still reads the tensor that a recv writes."""
    return _output_in_use(where, rank, lambda: dist.send(full(1.0, where), 0), lambda out: dist.recv(out, 1))


def output_of_broadcast_in_use(where: torch.device, rank: int) -> bool:
    """The same for a broadcast."""
    return _output_in_use(where, rank, lambda: dist.broadcast(full(1.0, where), 1), lambda out: dist.broadcast(out, 1))


def _output_in_use(
    where: torch.device, rank: int, send: Callable[[], Any], receive: Callable[[torch.Tensor], Any]
) -> bool:
    if rank:
        send()
        return True
    out, copy = full(7.0, where), full(0.0, where)
    torch.accelerator.synchronize()
    accelerator.sleep(KERNEL * SLOWER)
    copy.add_(out)
    receive(out)
    return holds(copy, 7.0) and holds(out, 1.0)


def empty_send(where: torch.device, rank: int) -> bool:
    """An empty tensor is sent while a kernel of the caller runs: the transfer ends before the kernel."""
    accelerator.sleep(KERNEL * SLOWER)
    if rank:
        dist.send(full(1.0, where, 0), 0)
    else:
        dist.recv(full(1.0, where, 0), 1)
    return holds(full(1.0, where), 1.0)


def reused_slots(where: torch.device, rank: int) -> bool:
    """Every element differs: a slot that is used again too early shows."""
    values = torch.arange(COUNT, dtype=torch.float32)
    tensor = (values * (rank + 1)).to(where)
    with device.behaviour(up=5e-3 * SLOWER):
        dist.all_reduce(tensor)
    return holds(tensor, values * 3)


def lifetime(where: torch.device, rank: int) -> bool:
    """The caller drops the tensor and the Work; its memory is allocated again while the copies to the device run."""
    tensor = full(rank + 1.0, where)
    with device.behaviour(up=3e-3 * SLOWER):
        pending = dist.all_reduce(tensor, async_op=True)
        (request,) = pending.requests
        request.block(240.0)  # until the last copy has been issued; `pending.wait()` would order the stream after it
        del tensor, pending, request
        finish_task(where)  # in which the last copy was issued: it holds references too
        other = full(5.0, where)
    return holds(other, 5.0)


class Raises:
    """The owner of a task of a device's thread that does not fail."""

    def fail(self, error: BaseException) -> None:
        raise error


def finish_task(where: torch.device) -> None:
    """Wait until the device's thread has finished its current task."""
    finished = threading.Event()
    thread_of(where).submit(Raises(), finished.set)
    finished.wait()


def chained(where: torch.device, rank: int) -> bool:
    """Two calls on one tensor, without a wait between them. The first one leaves a slot free."""
    tensor = full(rank + 1.0, where, COUNT // 20)
    with device.behaviour(up=5e-3 * SLOWER):
        first = dist.all_reduce(tensor, async_op=True)
        dist.all_reduce(tensor, async_op=True).wait()
    del first
    return holds(tensor, 6.0)


def callback(where: torch.device, rank: int) -> bool:
    """A callback of the future uses the result, and the caller uses what the callback computes."""
    tensor, copy, result = full(rank + 1.0, where), full(0.0, where), full(0.0, where)
    with device.behaviour(up=5e-3 * SLOWER, kernel=1e-3 * SLOWER):
        future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda _: [copy.add_(tensor)])
        future.wait()
        result.add_(copy)
    return holds(result, 3.0)


def strided_output(where: torch.device, rank: int) -> bool:
    """A tensor that is not contiguous is staged through a temporary copy. Its allocator overwrites it in stream order."""
    if rank:
        dist.broadcast(full(4.0, where), 1)
        return True
    column = torch.zeros(COUNT, 2, device=where)[:, 0]
    with device.behaviour(up=3e-3 * SLOWER):
        with thread_of(where).down:
            accelerator.sleep(KERNEL * SLOWER / 2)
        dist.broadcast(column, 1)
    return holds(column, 4.0)


def empty_transfer(where: torch.device, rank: int) -> bool:
    """A transfer without elements completes before the caller's stream has reached it."""
    accelerator.sleep(KERNEL * SLOWER)
    empty = torch.empty(0, device=where)
    if rank:
        dist.send(empty, 0)
    else:
        dist.recv(empty, 1)
    tensor = full(rank + 1.0, where)
    dist.all_reduce(tensor)  # after the stream has reached the transfer, which must not fail then
    return holds(tensor, 3.0)


def holds(tensor: torch.Tensor, expected: float | torch.Tensor) -> bool:
    """Return whether all elements have the expected values, once the device is idle."""
    torch.accelerator.synchronize()
    return bool((tensor.cpu() == expected).all())


SCENARIOS: tuple[Scenario, ...] = (
    producer,
    own_stream,
    slow_copies_to_the_host,
    consumer,
    output_of_recv_in_use,
    output_of_broadcast_in_use,
    empty_send,
    reused_slots,
    lifetime,
    chained,
    callback,
    strided_output,
    empty_transfer,
)


# -- what can be left out --------------------------------------------------------------------------------------------

_DOWN = ("_advance_queue", "fetch")  # continuations of `caller_reached` before copies to the host
_caller_reached = StagedCall.caller_reached
_copy_down, _copy_up, _end = StagedCall.copy_down, StagedCall.copy_up, StagedCall.end


def _without_waiting_for_the_caller(down: bool) -> Callable[[StagedCall, Callable[[], None]], bool]:
    def reached(self: StagedCall, continuation: Callable[[], None]) -> bool:
        return ((continuation.__name__ in _DOWN) == down) or _caller_reached(self, continuation)

    return reached


def _continue_at_once(copy: Callable[..., None]) -> Callable[..., None]:
    """The continuation of a copy runs before the copy has ended, with a reference as long as the device needs one."""

    def copied(self: StagedCall, copies: Sequence[Any], then: Callable[[], None]) -> None:
        copy(self, copies, lambda: None)
        then()

    return copied


def _end_without_references(self: StagedCall) -> None:
    _end(self)
    self.release()


def _complete_without_value(self: RingfenceWork, base: Any, devices: Sequence[torch.device]) -> None:
    base.set_result(None)


def _complete_on_any_stream(self: RingfenceWork, base: Any, devices: Sequence[torch.device]) -> None:
    base.set_result(self._outputs)


FAULTS: dict[str, tuple[Any, str, Any, tuple[Scenario, ...]]] = {  # where it is left out, and what must notice
    "copies to the host wait for the caller's stream": (
        StagedCall, "caller_reached", _without_waiting_for_the_caller(down=True), (producer, own_stream)),
    "copies to the device wait for the caller's stream": (
        StagedCall, "caller_reached", _without_waiting_for_the_caller(down=False),
        (output_of_recv_in_use, output_of_broadcast_in_use)),
    "the host waits for copies to the host": (
        StagedCall, "copy_down", _continue_at_once(_copy_down), (slow_copies_to_the_host,)),
    "wait() orders the current stream after the results": (
        StagedCall, "order_current_stream", lambda self: None, (consumer,)),
    "a slot is reused only after it was copied to the device": (
        StagedCall, "copy_up", _continue_at_once(_copy_up), (reused_slots,)),
    "tensors are referenced until the results are in them": (
        StagedCall, "end", _end_without_references, (lifetime,)),
    "a call waits for earlier ones on the same memory": (
        StagedCollective, "_follows_earlier", lambda self: False, (chained,)),
    "the value of a future holds the tensors": (
        RingfenceWork, "_complete", _complete_without_value, (callback,)),
    "a future knows its devices": (
        work_module, "Future", lambda devices=None: Future(), (callback,)),
    "a future completes on a stream that follows the results": (
        RingfenceWork, "_complete", _complete_on_any_stream, (callback,)),
    "copies to the device follow the allocation of a temporary copy": (
        StagedCall, "order_up_after_down", lambda self: None, (strided_output,)),
}  # fmt: skip


@contextlib.contextmanager
def small_slots() -> Iterator[None]:
    """Three slots of 256 KiB, so that calls take many passes, which channels share. For a device without used slots."""

    real = selection.divide

    def divide(kind: Collective, size: int, longest: int, table: Thresholds, machines: Machines) -> Passes:
        return real(kind, size, longest, replace(table, channel_bytes=256 << 10), machines)

    with (
        mock.patch.object(slots, "SLOT_BYTES", 256 << 10),
        mock.patch.object(slots, "SLOTS", 3),
        mock.patch.object(collective, "SLOT_BYTES", 256 << 10),
        mock.patch.object(transfer, "_SEGMENTS_PER_PIECE", 1),
        mock.patch.object(passes, "PASS_BYTES", 256 << 10),
        mock.patch.object(base, "divide", divide),
    ):
        yield


def run(names: Sequence[str], fault: str | None, confidential: bool, slower: float = 1.0) -> list[str]:
    """Run scenarios, with or without a fault; return the names of those whose numbers are wrong on this rank."""
    where, wrong = device.load(), []
    thread_of(where).slots = slots.SlotRing()
    with contextlib.ExitStack() as changes:
        changes.enter_context(small_slots())
        changes.enter_context(mock.patch(f"{__name__}.SLOWER", slower))
        accelerator.confidential(confidential)
        if fault is not None:
            target, name, without, _ = FAULTS[fault]
            changes.enter_context(mock.patch.object(target, name, without))
        for scenario in SCENARIOS:
            if scenario.__name__ in names and not scenario(where, dist.get_rank()):
                wrong.append(scenario.__name__)
            dist.barrier()
    thread_of(where).slots = slots.SlotRing()
    return wrong


def run_at_random(seed: int, count: int, confidential: bool) -> list[str]:
    """Run random scenarios with random delays; return those whose numbers are wrong on this rank."""
    choice, names = random.Random(seed), [scenario.__name__ for scenario in SCENARIOS]
    wrong = []
    for number in range(count):
        with mock.patch.object(device, "JITTER", choice.choice((0.0, 1e-4, 1e-3))):
            wrong += [f"{name} in run {number}" for name in run([choice.choice(names)], None, confidential)]
    return wrong
