"""What makes staging fast, counted: no byte is copied twice, nothing waits for the device, copies hide behind passes.

`python -m tests.integration.device_measure` measures the speed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringfence.collectives import Buffer, Collective, Thresholds, choose, divide
from ringfence.collectives.counts import count
from ringfence.device.call import Reports, StagedCall, caller_event
from ringfence.device.collective import CallQueue, StagedCollective
from ringfence.device.device_thread import thread_of
from ringfence.device.slots import SLOT_BYTES, SLOTS
from ringfence.device.tensors import DeviceTensor, Slice
from ringfence_lab import accelerator
from ringfence_lab.accelerator import HeldKernel
from tests import device
from tests.device import FAR
from tests.limits import HANG
from tests.pool import Pool

PASSES = 2 * SLOTS
SIZE = PASSES * SLOT_BYTES  # bytes


def ready() -> tuple[torch.device, torch.Tensor]:
    """Return this rank's device and a tensor of many passes, once the device is idle and the group is connected."""
    where = device.load()
    tensor = torch.ones(SIZE // 4, device=where)
    dist.all_reduce(tensor)
    tensor.fill_(1.0)
    torch.accelerator.synchronize()
    dist.barrier()
    return where, tensor


def is_sum(tensor: torch.Tensor) -> bool:
    return bool((tensor == 2.0).all().item())


def call_behind_a_kernel() -> tuple[bool, bool]:
    """Return whether the call had completed when it returned, and whether its result is right."""
    _, tensor = ready()
    with accelerator.hold():
        tensor.fill_(1.0)
        work = dist.all_reduce(tensor, async_op=True)
        completed = work.is_completed()  # a call that waits for the kernel does not get here
    work.wait()
    return completed, is_sum(tensor)


def test_a_call_returns_while_its_input_is_computed(devices: Pool) -> None:
    assert devices.check(call_behind_a_kernel, 2, **FAR) == [(False, True)] * 2


def count_of_a_call(confidential: bool) -> dict[str, int]:
    """Return what one all-reduce adds to the device's counts."""
    _, tensor = ready()
    accelerator.confidential(confidential)
    before = accelerator.stats()
    dist.all_reduce(tensor)
    after = accelerator.stats()
    accelerator.confidential(False)
    assert is_sum(tensor)
    names = ("bytes_down", "bytes_up", "copies_down", "copies_up", "host_waits")
    return {name: getattr(after, name) - getattr(before, name) for name in names}


@pytest.mark.parametrize("confidential", [False, True], ids=["normal", "confidential"])
def test_every_byte_is_copied_once_in_each_direction(devices: Pool, confidential: bool) -> None:
    """The host waits for no copy, except in confidential mode, in which every copy blocks the thread that issues it."""
    copied = {"bytes_down": SIZE, "bytes_up": SIZE, "copies_down": PASSES, "copies_up": PASSES}
    for found in devices.check(count_of_a_call, 2, args=(confidential,), **FAR):
        assert found == {**copied, "host_waits": 2 * PASSES if confidential else 0}


# -- copies hide behind passes ---------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # the pool ends a worker in which it never is
        os.sched_yield()


def copies_while_uploads_are_held() -> tuple[int, int]:
    """Return the passes that are copied to the host and sent while no copy to the device ends."""
    where, tensor = ready()
    with thread_of(where).up:
        kernel = accelerator.hold()
    with kernel:
        before = accelerator.stats()
        work = dist.all_reduce(tensor, async_op=True)
        wait_until(lambda: accelerator.stats().copies_up > before.copies_up)
        down = accelerator.stats().copies_down - before.copies_down
        if down == SLOTS:
            wait_until(lambda: accelerator.stats().copies_up == before.copies_up + down)
        up = accelerator.stats().copies_up - before.copies_up
    work.wait()
    assert is_sum(tensor)
    return down, up


def test_later_passes_are_copied_and_sent_while_uploads_run(devices: Pool) -> None:
    """As many as there are slots. With one slot, the second pass would wait for the upload of the first."""
    assert devices.check(copies_while_uploads_are_held, 2, **FAR) == [(SLOTS, SLOTS)] * 2


def passes_sent_while_downloads_are_held(sent: int) -> bool:
    """Hold the copies to the host after some passes; return whether the result is right after these have been sent."""
    where, tensor = ready()
    kernels: list[HeldKernel] = []
    issued, copy_down = 0, StagedCall.copy_down

    def held_after(self: StagedCall, copies: Sequence[Any], then: Callable[[], None]) -> None:
        nonlocal issued
        if issued == sent:
            with thread_of(where).down:
                kernels.append(accelerator.hold())
        issued += 1
        copy_down(self, copies, then)

    with mock.patch.object(StagedCall, "copy_down", held_after):
        before = accelerator.stats().copies_up
        work = dist.all_reduce(tensor, async_op=True)
        wait_until(lambda: accelerator.stats().copies_up >= before + sent)
        assert not work.is_completed()
        (kernel,) = kernels
        kernel.release()
        work.wait()
    return is_sum(tensor)


@pytest.mark.parametrize("sent", [1, 3])
def test_a_pass_is_sent_while_later_ones_are_copied(devices: Pool, sent: int) -> None:
    assert devices.check(passes_sent_while_downloads_are_held, 2, args=(sent,), **FAR) == [True, True]


# -- as many copies as the model counts, whatever the group's size -----------------------------------------------------


def copies_of(kind: Collective, size: int, nbytes: int) -> tuple[int, int]:
    """Stage one rank of a large group, without its peers; return the copies that the device made, and those counted."""
    where, table = device.load(), Thresholds()
    whole = torch.ones(nbytes // 4, device=where)
    part = torch.ones(nbytes // 4 // size, device=where)
    given = {
        Collective.ALL_REDUCE: {Buffer.DATA: (whole, True, True)},
        Collective.ALL_GATHER: {Buffer.INPUT: (part, True, False), Buffer.OUTPUT: (whole, False, True)},
        Collective.REDUCE_SCATTER: {Buffer.INPUT: (whole, True, False), Buffer.OUTPUT: (part, False, True)},
    }[kind]
    tensors = {
        buffer: DeviceTensor(plain, reads, writes, plain.dtype, 1) for buffer, (plain, reads, writes) in given.items()
    }
    slices = {buffer: [Slice(tensor, 0, tensor.outline.numel())] for buffer, tensor in tensors.items()}
    longest = nbytes if kind is Collective.ALL_REDUCE else nbytes // size
    passes = divide(kind, size, longest, table)
    schedule = choose(kind, size, 0, 0, nbytes, table)
    available, complete, failed = threading.Semaphore(0), threading.Event(), []

    def fail(error: Callable[[], Exception]) -> None:
        failed.append(error())
        complete.set()

    reports = Reports(lambda: "", lambda: None, available.release, complete.set, fail)
    thread, ready_event = thread_of(where), caller_event(where)
    before = accelerator.stats()
    staged = StagedCollective(thread, list(tensors.values()), reports, ready_event, kind, schedule, passes, slices)
    staged.submit(CallQueue())
    for index in range(passes.number):
        while staged.views(index) is None:
            assert available.acquire(timeout=HANG)
        staged.pass_done(index)
    assert complete.wait(HANG) and not failed, failed
    torch.accelerator.synchronize()
    after = accelerator.stats()
    made = after.copies_down - before.copies_down + after.copies_up - before.copies_up
    return made, count(kind, size, nbytes, table, device=True).device_copies


@pytest.mark.parametrize("size", [2, 3, 7, 8, 33, 64])
@pytest.mark.parametrize(
    "kind",
    [Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER],
    ids=lambda kind: kind.name.lower(),
)
def test_the_device_copies_as_often_as_the_model_counts(devices: Pool, kind: Collective, size: int) -> None:
    for nbytes in (size << 20, 64 * (1 << 20) // size * size):
        ((made, counted),) = devices.check(copies_of, 1, backend=None, args=(kind, size, nbytes))
        assert made == counted
