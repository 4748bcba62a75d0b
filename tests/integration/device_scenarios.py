"""The situations of `ringfence selftest` in which a staged collective must wait for the device, and two more.

Each runs on two workers and returns whether the numbers are right. Slots are small, so that a call takes many passes.
FAULTS names every wait and reference of the staging, with a way to leave it out.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.futures import Future

from ringfence.backend import work as work_module
from ringfence.backend.work import RingfenceWork
from ringfence.cli.selftest import order
from ringfence.cli.selftest.device import KERNEL_SECONDS, Setting
from ringfence.cli.selftest.order import full, holds, total
from ringfence.collectives import chooser, passes
from ringfence.device import collective, slots, transfer
from ringfence.device.call import StagedCall
from ringfence.device.collective import StagedCollective
from ringfence.device.device_thread import thread_of
from ringfence.machines import within
from ringfence_lab import accelerator
from tests import device

SCENARIOS = ("empty_send", "empty_transfer", *order.SITUATIONS)


def empty_send(at: Setting) -> bool:
    """An empty tensor is sent while a kernel of the caller runs: the transfer ends before the kernel."""
    at.busy(KERNEL_SECONDS)
    _send_nothing(at)
    return holds(full(at, 1), 1)


def empty_transfer(at: Setting) -> bool:
    """A transfer without elements completes before the caller's stream has reached it."""
    at.busy(KERNEL_SECONDS)
    _send_nothing(at)
    tensor = full(at, at.rank + 1)
    dist.all_reduce(tensor)  # after the stream has reached the transfer, which must not fail then
    return holds(tensor, total(at))


def _send_nothing(at: Setting) -> None:
    if at.rank:
        dist.send(torch.empty(0, device=at.device), 0)
    else:
        dist.recv(torch.empty(0, device=at.device), 1)


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
    base.set_result(self.outputs)


FAULTS: dict[str, tuple[Any, str, Any, tuple[str, ...]]] = {  # where it is left out, and what must notice
    "copies to the host wait for the caller's stream": (
        StagedCall, "caller_reached", _without_waiting_for_the_caller(down=True), ("producer", "own_stream")),
    "copies to the device wait for the caller's stream": (
        StagedCall, "caller_reached", _without_waiting_for_the_caller(down=False),
        ("receive_in_use", "broadcast_in_use")),
    "the host waits for copies to the host": (
        StagedCall, "copy_down", _continue_at_once(_copy_down), ("slow_download",)),
    "wait() orders the current stream after the results": (
        StagedCall, "order_current_stream", lambda self: None, ("consumer",)),
    "a slot is reused only after it was copied to the device": (
        StagedCall, "copy_up", _continue_at_once(_copy_up), ("reused_slots",)),
    "tensors are referenced until the results are in them": (
        StagedCall, "end", _end_without_references, ("lifetime",)),
    "a call waits for earlier ones on the same memory": (
        StagedCollective, "_follows_earlier", lambda self: False, ("chained",)),
    "the value of a future holds the tensors": (
        RingfenceWork, "_complete", _complete_without_value, ("callback",)),
    "a future knows its devices": (
        work_module, "Future", lambda devices=None: Future(), ("callback",)),
    "a future completes on a stream that follows the results": (
        RingfenceWork, "_complete", _complete_on_any_stream, ("callback",)),
    "copies to the device follow the allocation of a temporary copy": (
        StagedCall, "order_up_after_down", lambda self: None, ("strided",)),
}  # fmt: skip


@contextlib.contextmanager
def small_slots() -> Iterator[None]:
    """Three slots of 256 KiB, so that calls take many passes, which channels share. For a device without used slots."""

    group = dist.group.WORLD
    context, table = group._session.engine.context, group._session.engine.table
    table = replace(table, channel_bytes=256 << 10)
    choice = chooser(group.size(), group.rank(), table, within(context.machines, group._ranks))
    with (
        mock.patch.object(slots, "SLOT_BYTES", 256 << 10),
        mock.patch.object(slots, "SLOTS", 3),
        mock.patch.object(collective, "SLOT_BYTES", 256 << 10),
        mock.patch.object(transfer, "_SEGMENTS_PER_PIECE", 1),
        mock.patch.object(passes, "PASS_BYTES", 256 << 10),
        mock.patch.object(group, "_choice", choice),
    ):
        yield


def run(
    names: Sequence[str], fault: str | None, confidential: bool, slower: float = 1.0, jitter: float = 0.0
) -> list[str]:
    """Run scenarios, with or without a fault; return the names of those whose numbers are wrong on this rank."""
    where, wrong = device.load(), []

    def late_uploads(at: Setting, seconds: float = 0.0) -> None:
        """A call takes many passes: every copy to the device is late, not only the first one."""
        accelerator.configure(jitter=jitter, up=5e-3 * slower)

    at = Setting(where, dist.get_rank(), 2, True, lambda seconds: accelerator.sleep(seconds * slower))
    thread_of(where).slots = slots.SlotRing()
    with contextlib.ExitStack() as changes:
        changes.enter_context(small_slots())
        changes.enter_context(mock.patch.object(order, "hold_uploads", late_uploads))
        accelerator.confidential(confidential)
        if fault is not None:
            target, name, without, _ = FAULTS[fault]
            changes.enter_context(mock.patch.object(target, name, without))
        for name, scenario in {**order.SITUATIONS, "empty_send": empty_send, "empty_transfer": empty_transfer}.items():
            with device.behaviour(jitter=jitter):
                if name in names and not scenario(at):
                    wrong.append(name)
            dist.barrier()
    thread_of(where).slots = slots.SlotRing()
    return wrong


def run_at_random(seed: int, count: int, confidential: bool) -> list[str]:
    """Run random scenarios with random delays; return those whose numbers are wrong on this rank."""
    choice = random.Random(seed)
    wrong = []
    for number in range(count):
        jitter, name = choice.choice((0.0, 1e-4, 1e-3)), choice.choice(SCENARIOS)
        wrong += [f"{name} in run {number}" for name in run([name], None, confidential, jitter=jitter)]
    return wrong
