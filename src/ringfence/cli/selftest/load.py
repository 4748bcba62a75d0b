"""Collectives under load: many random ones without growth of memory, their speed, and the loss of a worker during one."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ringfence.cli.selftest.device import Setting
from ringfence.cli.selftest.report import Outcome, right, wrong
from ringfence.device.device_thread import thread_of
from ringfence.device.slots import SLOT_BYTES, SLOTS
from ringfence.errors import RingfenceError

CALLS: Final = 2000
QUICK_CALLS: Final = 200
IN_FLIGHT: Final = 8
LARGEST: Final = 500_000
STREAMS: Final = 3
RSS_GROWTH: Final = 48 << 20  # of allocators, caches and lazily loaded kernels
DEVICE_GROWTH: Final = 1 << 20

COPY_BYTES: Final = 64 << 20
SIZES: Final = {"4 KiB": 4 << 10, "1 MiB": 1 << 20, "25 MiB": 25 << 20, "100 MiB": 100 << 20}
QUICK_SIZES: Final = ("4 KiB", "1 MiB", "25 MiB")
ROUNDS: Final = 11
QUICK_ROUNDS: Final = 5

RAISE_SECONDS: Final = 5.0  # after a worker has been killed
KILLED_COUNT: Final = 25 << 18  # 25 MiB of float32


def soak(at: Setting) -> Outcome:
    """Run the calls, the first half to reach a steady state; compare memory after both halves."""
    choice = random.Random(17)  # noqa: S311 - the same calls on every worker
    streams = [torch.Stream(at.device) for _ in range(STREAMS)]
    half = (QUICK_CALLS if at.quick else CALLS) // 2
    wrongs = _run(at, choice, streams, half)
    before = _memory(at)
    wrongs += _run(at, choice, streams, half)
    device, host, pinned = _memory(at)
    values = {
        "calls": 2 * half,
        "device growth": device - before[0],
        "host growth": host - before[1],
        "pinned": pinned,
    }
    text = (
        f"{2 * half} calls; device {_mib(device - before[0])}, host {_mib(host - before[1])}, pinned {pinned >> 20} MiB"
    )
    grown = device - before[0] > DEVICE_GROWTH or host - before[1] > RSS_GROWTH or pinned > SLOTS * SLOT_BYTES
    return (wrong if grown else right)(text, **values)


def _run(at: Setting, choice: random.Random, streams: list[torch.Stream], count: int) -> int:
    """Run collectives, some of them in flight; return how many have wrong results."""
    wrongs = 0
    flying: list[tuple[torch.Stream, dist.Work, Tensor, float]] = []
    for number in range(count):
        stream = choice.choice(streams)
        size = choice.choice((1, 700, 20_000, choice.randrange(1, LARGEST)))
        kind = choice.randrange(3)
        with stream:
            tensor = torch.full((size,), float(at.rank + 1), device=at.device)
            if kind == 0:
                work = dist.all_reduce(tensor, async_op=True)
                expected = at.size * (at.size + 1) / 2
            elif kind == 1:
                root = choice.randrange(at.size)
                work = dist.broadcast(tensor, root, async_op=True)
                expected = root + 1.0
            else:
                whole = torch.empty(size * at.size, device=at.device)
                work = dist.all_gather_into_tensor(whole, tensor, async_op=True)
                tensor, expected = whole[size * (at.size - 1) :], float(at.size)
        flying.append((stream, work, tensor, expected))
        if len(flying) == IN_FLIGHT or number == count - 1:
            choice.shuffle(flying)
            while flying:
                wrongs += not _is_right(*flying.pop())
    torch.accelerator.synchronize()
    dist.barrier()
    return wrongs


def _is_right(stream: torch.Stream, work: dist.Work, tensor: Tensor, expected: float) -> bool:
    with stream:
        work.wait()
        smallest, largest = tensor.min(), tensor.max()
    stream.synchronize()
    return bool(smallest.item() == largest.item() == expected)


def _memory(at: Setting) -> tuple[int, int, int]:
    """Return the bytes of device memory in use, of host memory that is resident, and of pinned slots."""
    torch.accelerator.synchronize()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    device = torch.accelerator.memory_allocated(at.device.index)
    return int(device), pages * os.sysconf("SC_PAGE_SIZE"), thread_of(at.device).slots.allocated_bytes


def _mib(count: int) -> str:
    return f"{count / (1 << 20):+.1f} MiB"


def copies(at: Setting) -> Outcome:
    """Measure copies of rank 0 alone, in bytes per second, best of several."""
    dist.barrier()
    rates = {}
    if at.rank == 0:
        size = COPY_BYTES // (4 if at.quick else 1)
        on_device = torch.empty(size, dtype=torch.uint8, device=at.device)
        for name, pinned in (("pinned", True), ("pageable", False)):
            host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            host.fill_(1)
            rates[f"device to host, {name}"] = _rate(host, on_device)
            rates[f"host to device, {name}"] = _rate(on_device, host)
    dist.barrier()
    return right(rates=rates)


def _rate(target: Tensor, source: Tensor) -> float:
    best = float("inf")
    for _ in range(5):
        torch.accelerator.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - began)
    return int(source.nbytes) / best


def staged(at: Setting) -> Outcome:
    """Measure all-reduces in turn; the parent takes the slowest worker of each round."""
    times: dict[str, dict[str, list[float]]] = {}
    for name in QUICK_SIZES if at.quick else SIZES:
        count = SIZES[name] // 4
        on_device, on_host = torch.ones(count, device=at.device), torch.ones(count)
        found: dict[str, list[float]] = {"device": [], "host": []}
        for number in range((QUICK_ROUNDS if at.quick else ROUNDS) + 1):
            for kind, tensor in (("device", on_device), ("host", on_host)):
                seconds = _all_reduce(tensor)
                if number:  # the first round allocates
                    found[kind].append(seconds)
        times[name] = found
    return right(times=times)


def _all_reduce(tensor: Tensor) -> float:
    tensor.fill_(1)
    torch.accelerator.synchronize()
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    return time.perf_counter() - began


def killed_worker(at: Setting) -> Outcome:
    """Start two collectives; the last rank ends without a word. The others wait for one, and for the other's future."""
    first, second = torch.ones(KILLED_COUNT, device=at.device), torch.ones(KILLED_COUNT, device=at.device)
    dist.all_reduce(first)
    dist.barrier()
    began = time.perf_counter()
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
    if at.rank == at.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    future = works[1].get_future()
    said = []
    for name, wait in (("wait()", works[0].wait), ("the future", future.wait)):
        if (error := _raised(wait)) is None:
            return wrong(f"{name} of a collective without the killed worker did not raise")
        said.append(error)
    seconds = time.perf_counter() - began
    if seconds > RAISE_SECONDS:
        return wrong(f"raised after {seconds:.1f} s", seconds=seconds)
    usable = torch.arange(1000, device=at.device).sum()
    if usable.item() != 499_500 or torch.ones(10).to(at.device).cpu().sum() != 10:
        return wrong("the device computes wrong numbers afterwards")
    return right(f"raised after {seconds:.2f} s", seconds=seconds, error=said[0])


def _raised(wait: Callable[[], Any]) -> str | None:
    """Return the name of the error that a wait raises; the future's callbacks wrap it in their own."""
    try:
        wait()
    except RingfenceError as error:
        return type(error).__name__
    except RuntimeError as error:
        return str(error).splitlines()[-1]
    return None
