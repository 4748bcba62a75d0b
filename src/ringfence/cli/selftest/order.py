"""The order of streams: situations in which a collective must wait for the device, made visible by long kernels.

Long kernels on the caller's stream, or on the streams that copy, hold back what must be waited for. So a wait that is
missing gives wrong numbers. Every check returns whether this worker's numbers are right.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ringfence.cli.selftest.device import KERNEL_SECONDS, Setting
from ringfence.cli.selftest.report import Outcome, right, wrong
from ringfence.device.device_thread import thread_of
from ringfence.device.slots import SLOT_BYTES, SLOTS

COUNT: Final = 400_000
PATTERN: Final = 99_991  # a prime: no two slots have the same content
REPEATS: Final = 5
WAITING_SECONDS: Final = 30.0
RETURN_KERNEL: Final = 0.1  # seconds
ISSUE_SECONDS: Final = 0.25  # how long copies of a call that takes many passes are held back


def full(at: Setting, value: float, count: int = COUNT) -> Tensor:
    return torch.full((count,), float(value), device=at.device)


def holds(tensor: Tensor, expected: float | Tensor) -> bool:
    """Return whether all elements have the expected values, once the device is idle."""
    torch.accelerator.synchronize()
    return bool((tensor.cpu() == expected).all())


def total(at: Setting) -> float:
    """Return the sum of rank + 1 over all ranks."""
    return at.size * (at.size + 1) / 2


def hold_uploads(at: Setting, seconds: float = KERNEL_SECONDS) -> None:
    """Keep the stream busy that copies to the device."""
    torch.accelerator.synchronize()
    with thread_of(at.device).up:
        at.busy(seconds)


def hold_downloads(at: Setting, seconds: float = KERNEL_SECONDS) -> None:
    """Keep the stream busy that copies to the host."""
    torch.accelerator.synchronize()
    with thread_of(at.device).down:
        at.busy(seconds)


def producer(at: Setting) -> bool:
    tensor = full(at, 0)
    torch.accelerator.synchronize()
    at.busy(KERNEL_SECONDS)
    tensor.fill_(at.rank + 1)
    dist.all_reduce(tensor)
    return holds(tensor, total(at))


def own_stream(at: Setting) -> bool:
    mine, tensor, copy = torch.Stream(at.device), full(at, 0), full(at, 0)
    torch.accelerator.synchronize()
    with mine:
        at.busy(KERNEL_SECONDS)
        tensor.fill_(at.rank + 1)
        dist.all_reduce(tensor, async_op=True).wait()
        copy.copy_(tensor)
    return holds(copy, total(at))


def slow_download(at: Setting) -> bool:
    tensor = full(at, at.rank + 1)
    hold_downloads(at)
    dist.all_reduce(tensor)
    return holds(tensor, total(at))


def consumer(at: Setting) -> bool:
    tensor, copy = full(at, at.rank + 1), full(at, 0)
    hold_uploads(at)
    dist.all_reduce(tensor, async_op=True).wait()
    copy.copy_(tensor)
    return holds(copy, total(at))


def receive_in_use(at: Setting) -> bool:
    return at.rank > 1 or _in_use(at, lambda: dist.send(full(at, 1), 0), lambda out: dist.recv(out, 1))


def broadcast_in_use(at: Setting) -> bool:
    source = at.size - 1
    if at.rank not in (0, source):
        dist.broadcast(full(at, 0), source)
        return True
    return _in_use(at, lambda: dist.broadcast(full(at, 1), source), lambda out: dist.broadcast(out, source))


def _in_use(at: Setting, send: Callable[[], Any], receive: Callable[[Tensor], Any]) -> bool:
    if at.rank:
        send()
        return True
    out, copy = full(at, 7), full(at, 0)
    torch.accelerator.synchronize()
    at.busy(KERNEL_SECONDS)
    copy.copy_(out)
    receive(out)
    return holds(copy, 7) and holds(out, 1)


def reused_slots(at: Setting) -> bool:
    """Every element differs from those that shared its slot, in a tensor larger than all slots."""
    count = SLOTS * SLOT_BYTES * 5 // 16  # of float32: a quarter more than the slots hold
    values = torch.arange(PATTERN, dtype=torch.float32).repeat(count // PATTERN + 1)
    tensor = (values * (at.rank + 1)).to(at.device)
    hold_uploads(at, ISSUE_SECONDS)
    dist.all_reduce(tensor)
    return holds(tensor, values * total(at))


def chained(at: Setting) -> bool:
    tensor = full(at, at.rank + 1, COUNT // 20)
    hold_uploads(at)
    first = dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(tensor, async_op=True).wait()
    del first
    return holds(tensor, at.size * total(at))


def callback(at: Setting) -> bool:
    tensor, copy, result = full(at, at.rank + 1), full(at, 0), full(at, 0)
    hold_uploads(at)

    def use(_: Any) -> list[Tensor]:
        at.busy(KERNEL_SECONDS / 2)
        return [copy.copy_(tensor)]

    dist.all_reduce(tensor, async_op=True).get_future().then(use).wait()
    result.copy_(copy)
    return holds(result, total(at))


def strided(at: Setting) -> bool:
    """The temporary copy is allocated on the stream that is held back, while results of the first passes already arrive."""
    source, count = at.size - 1, 25 * COUNT
    if at.rank == source:
        dist.broadcast(full(at, 4, count), source)
        return True
    column = torch.zeros(count, 2, device=at.device)[:, 0]
    hold_downloads(at, KERNEL_SECONDS / 3)
    dist.broadcast(column, source)
    return holds(column, 4)


def lifetime(at: Setting) -> bool:
    tensor = full(at, at.rank + 1)
    hold_uploads(at)
    pending: Any = dist.all_reduce(tensor, async_op=True)
    limit = time.monotonic() + WAITING_SECONDS
    while not pending.is_success():  # the last copy has been issued; wait() would order the stream after it
        if time.monotonic() > limit:
            raise TimeoutError(f"an all-reduce did not end within {WAITING_SECONDS:g} s")
        time.sleep(1e-3)
    del tensor, pending
    other = full(at, 5)
    return holds(other, 5)


def mixed(at: Setting) -> bool:
    on_device = [full(at, at.rank + 1, 10_000) for _ in range(4)]
    on_host = [torch.full((10_000,), at.rank + 1.0) for _ in on_device]
    at.busy(KERNEL_SECONDS)
    works = [dist.all_reduce(tensor, async_op=True) for pair in zip(on_device, on_host, strict=True) for tensor in pair]
    for work in works:
        work.wait()
    return all(holds(tensor, total(at)) for tensor in (*on_device, *on_host))


SITUATIONS: Final[dict[str, Callable[[Setting], bool]]] = {
    each.__name__: each
    for each in (
        producer,
        own_stream,
        slow_download,
        consumer,
        receive_in_use,
        broadcast_in_use,
        reused_slots,
        chained,
        callback,
        strided,
        lifetime,
        mixed,
    )
}


def check(name: str, at: Setting) -> Outcome:
    """Run one situation several times. A worker with wrong numbers goes on, so that no other waits for it."""
    runs = 1 if at.quick else REPEATS
    wrongs = 0
    for _ in range(runs):
        wrongs += not SITUATIONS[name](at)
        dist.barrier()
    return wrong(f"wrong numbers in {wrongs} of {runs} runs") if wrongs else right()


def returns_early(at: Setting) -> Outcome:
    """Measure how long an asynchronous call takes behind a long kernel."""
    tensor = full(at, 1, 1 << 18)
    dist.all_reduce(tensor)
    times = []
    for _ in range(3 if at.quick else 9):
        dist.barrier()
        torch.accelerator.synchronize()
        at.busy(RETURN_KERNEL)
        began = time.perf_counter()
        pending = dist.all_reduce(tensor, async_op=True)
        times.append(time.perf_counter() - began)
        pending.wait()
    median = sorted(times)[len(times) // 2]
    text = f"{median * 1e3:.2f} ms behind a kernel of {RETURN_KERNEL * 1e3:.0f} ms"
    return (wrong if median > RETURN_KERNEL / 2 else right)(text, seconds=median)
