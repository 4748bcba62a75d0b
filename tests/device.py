"""The simulated device in worker processes. Only pools of their own load it: it changes what torch's accelerator is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ringfence_lab import accelerator

FAR: dict[str, Any] = {"seconds": 600, "timeout": 240}  # for `Pool.run`: a call that ends only by its timeout is a hang


def load() -> torch.device:
    """Load the device, make this rank's one the current device and return it."""
    accelerator.load(devices=2)
    accelerator.reset()
    index = dist.get_rank() % 2 if dist.is_initialized() else 0
    torch.accelerator.set_device_index(index)
    return torch.device("sim", index)


@contextlib.contextmanager
def behaviour(*, confidential: bool | None = None, **settings: float) -> Iterator[None]:
    """The device with delays and rates (see `accelerator.configure`); all work on it is done before and after."""
    torch.accelerator.synchronize()
    accelerator.configure(**settings)  # type: ignore[arg-type]
    if confidential is not None:
        accelerator.confidential(confidential)
    try:
        yield
        torch.accelerator.synchronize()
    finally:
        accelerator.configure()
        if confidential is not None:
            accelerator.confidential(False)
