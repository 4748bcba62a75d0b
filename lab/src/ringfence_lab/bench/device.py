"""The accelerator of a worker: its device, how fast the simulated one copies, and copies that run beside a collective."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ringfence.collectives.passes import PASS_BYTES
from ringfence.errors import ConfigurationError
from ringfence_lab import accelerator
from ringfence_lab.accelerator.tee import Tee
from ringfence_lab.bench import names
from ringfence_lab.bench.operations import Tensors


def open_device(kind: str, rank: int) -> torch.device:
    """Make a device the current one of this process, and return it. Workers of a machine share its devices in turn.

    Raises ConfigurationError if torch has no such device here.
    """
    if kind == names.SIMULATED:
        accelerator.load(devices=1)
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != kind:
        has = "no accelerator" if found is None else f"the accelerator {found.type}"
        raise ConfigurationError(f"--device {kind}: torch has {has} on this machine. --device sim needs none")
    index = rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def simulate(copy_rate: float, confidential: bool) -> None:
    """Set how the simulated device copies: bytes per second in each direction (0: as fast as it can), and its mode."""
    torch.accelerator.synchronize()
    accelerator.configure(down_rate=copy_rate, up_rate=copy_rate)
    accelerator.confidential(confidential)


def simulate_tee(settings: Mapping[str, Any]) -> Tee:
    """Make the simulated devices copy as a GPU TEE with these settings; return them."""
    tee = Tee(**settings)
    for device in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(device)
    accelerator.simulate_tee(tee)
    return tee


def late_seconds(device: torch.device | None) -> float:
    """Return for how long work of simulated copies has exceeded their simulated time, in this process."""
    return accelerator.stats().late_seconds if device is not None and device.type == names.SIMULATED else 0.0


class CopiesBeside:
    """The copies of a staged call, without the call: the same bytes, in pieces of a pass, one stream for each direction.

    Copies block the thread that issues them in confidential mode. So each direction has a thread then; otherwise the
    caller issues them, which costs less than waking a thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._down, self._up = torch.Stream(device), torch.Stream(device)
        self._host = [torch.empty(PASS_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._threads = ThreadPoolExecutor(2)
        self._begun: list[Future[None]] = []

    def start(self, operation: str, tensors: Tensors, rank: int, blocking: bool) -> None:
        """Issue all copies."""
        down, up = tensors.copied(operation, rank)
        for tensor, copy in ((down, self._copy_down), (up, self._copy_up)):
            if tensor is not None and blocking:
                self._begun.append(self._threads.submit(copy, tensor))
            elif tensor is not None:
                copy(tensor)

    def finish(self) -> None:
        """Wait until all copies have ended."""
        for each in self._begun:
            each.result()
        self._begun.clear()
        self._down.synchronize()
        self._up.synchronize()

    def _pieces(self, tensor: torch.Tensor, host: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        flat = tensor.view(-1)
        typed = host.view(flat.dtype)
        return [(part, typed[: part.numel()]) for part in flat.split(typed.numel())]

    def _copy_down(self, tensor: torch.Tensor) -> None:
        with self._down:
            for part, host in self._pieces(tensor, self._host[0]):
                host.copy_(part, non_blocking=True)

    def _copy_up(self, tensor: torch.Tensor) -> None:
        with self._up:
            for part, host in self._pieces(tensor, self._host[1]):
                part.copy_(host, non_blocking=True)


def facts(device: torch.device) -> dict[str, Any]:
    """Return what a reader of the samples wants to know of a device."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return {"device": {"type": device.type, "name": name(device) if name else device.type}}
