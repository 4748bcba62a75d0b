"""Collects the signs of confidential mode in a worker."""

from __future__ import annotations

import contextlib
import time
from typing import Final

import torch

from ringfence.cli.selftest.confidential_mode import KERNEL_SECONDS, Signs, driver_says
from ringfence.cli.selftest.device import LongKernel

COPY_BYTES: Final = 1 << 20


def memory_is_pinned() -> bool | None:
    """Return whether torch reports pinned memory as pinned, or None if memory cannot be pinned."""
    try:
        return bool(torch.empty(1, pin_memory=True).is_pinned())
    except RuntimeError:
        return None


def seconds_blocked(device: torch.device, busy: LongKernel) -> float | None:
    """Return how long a thread that copies to the device from pinned memory, behind a long kernel, is blocked."""
    try:
        host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return None
    stream, target = torch.Stream(device), torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    torch.accelerator.synchronize()
    times = []
    with stream:
        target.copy_(host, non_blocking=True)
        for _ in range(3):
            stream.synchronize()
            busy(KERNEL_SECONDS)
            began = time.perf_counter()
            target.copy_(host, non_blocking=True)
            times.append(time.perf_counter() - began)
    stream.synchronize()
    return min(times)


def signs(device: torch.device, busy: LongKernel | None = None) -> Signs:
    """Collect the signs; without a long kernel, all but the behaviour of copies."""
    driver = driver_says() if device.type == "cuda" else None
    pinned, blocks = memory_is_pinned(), None
    if busy is not None:
        with contextlib.suppress(RuntimeError):
            blocks = seconds_blocked(device, busy)
    return Signs(driver, pinned, blocks)
