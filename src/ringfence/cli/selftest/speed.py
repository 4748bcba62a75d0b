"""Speed: copies between host and device, and an all-reduce on the device beside the same one on host tensors."""

from __future__ import annotations

import time
from typing import Final

import torch
import torch.distributed as dist

from ringfence.cli.selftest.device import Setting
from ringfence.cli.selftest.outcome import Outcome, right

COPY_BYTES: Final = 64 << 20
SIZES: Final = {"4 KiB": 4 << 10, "1 MiB": 1 << 20, "25 MiB": 25 << 20, "100 MiB": 100 << 20}
QUICK_SIZES: Final = ("4 KiB", "1 MiB", "25 MiB")
ROUNDS: Final = 11
QUICK_ROUNDS: Final = 5


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


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
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


def _all_reduce(tensor: torch.Tensor) -> float:
    tensor.fill_(1)
    torch.accelerator.synchronize()
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    return time.perf_counter() - began
