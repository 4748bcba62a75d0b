"""What makes staging fast, counted: no byte is copied twice, nothing waits for the device, copies hide behind passes.

`python -m tests.integration.device_measure` measures the speed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringfence.device.call import StagedCall
from ringfence.device.device_thread import thread_of
from ringfence.device.slots import SLOT_BYTES, SLOTS
from ringfence_lab import accelerator
from ringfence_lab.accelerator import HeldKernel
from tests import device
from tests.device import FAR
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
