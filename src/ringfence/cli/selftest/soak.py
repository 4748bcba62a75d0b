"""Many random collectives on random streams: right results, and no growth of memory."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ringfence.cli.selftest.device import Setting
from ringfence.cli.selftest.outcome import Outcome, right, wrong
from ringfence.device.device_thread import thread_of
from ringfence.device.slots import SLOT_BYTES, SLOTS

CALLS: Final = 2000
QUICK_CALLS: Final = 200
IN_FLIGHT: Final = 8
LARGEST: Final = 500_000
STREAMS: Final = 3
RSS_GROWTH: Final = 48 << 20  # of allocators, caches and lazily loaded kernels
DEVICE_GROWTH: Final = 1 << 20


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
