"""The process of the rings between simulated devices: executes and times commands, round by round."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ringfence.lab import accelerator
from ringfence.lab.bench import names
from ringfence.lab.bench.channel import Message
from ringfence.lab.bench.device import late_seconds, simulate_tee
from ringfence.lab.bench.device_ring import DeviceRing, facts
from ringfence.lab.bench.operations import WrongResult
from ringfence.lab.bench.worker import main


class RingWorker:
    """All devices of a machine in one process."""

    def __init__(self, config: Message) -> None:
        self._count: int = config["devices"]
        accelerator.load(devices=self._count)
        self._device = torch.device(names.SIMULATED, 0)
        self._ring: DeviceRing
        self._tees: dict[str, Message] = {}
        self._run: Callable[[float], None]

    def hello(self) -> Message:
        return facts(self._count)

    def prepare_tee(self, steps: list[tuple[int, float]], tees: dict[str, Message], operation: str | None) -> Message:
        """Allocate the buckets and check, for every variant, that what is timed computes the right result.

        `tees` are the settings of the devices for each variant; the check runs without dilation.
        """
        self._ring = DeviceRing(self._count, [size for size, _ in steps])
        self._tees = tees
        copies = HostCopies(self._device, steps[0][0])
        for name, settings in tees.items():
            simulate_tee({**settings, "dilation": 1.0})
            if operation == "copy":
                copies.check(name)
            else:
                self._ring.check(name)
        seconds = [before for _, before in steps]

        def step(dilation: float) -> None:
            self._ring.step([dilation * before for before in seconds])

        self._run = copies.run if operation == "copy" else step
        return {"variants": list(tees)}

    def train(self, turns: list[tuple[str, int]]) -> Message:
        """Time the given number of steps of every variant in turn."""
        return {name: self._timed(name, repeats) for name, repeats in turns}

    def _timed(self, name: str, repeats: int) -> Message:
        tee = simulate_tee(self._tees[name])
        late = late_seconds(self._device)
        cpu, start = time.process_time_ns(), time.perf_counter_ns()
        for _ in range(repeats):
            self._run(tee.dilation)
        seconds, cpu = (time.perf_counter_ns() - start) / 1e9, time.process_time_ns() - cpu
        late = late_seconds(self._device) - late
        return {"seconds": seconds, "cpu": cpu / 1e9, "sent": 0, "repeats": repeats, "late": late}


class HostCopies:
    """A copy from a device to pinned memory and back."""

    def __init__(self, device: torch.device, size: int) -> None:
        count = max(1, size // 4)
        self._tensor = torch.zeros(count, device=device)
        self._host = torch.zeros(count, pin_memory=True)

    def run(self, _dilation: float) -> None:
        self._host.copy_(self._tensor, non_blocking=True)
        self._tensor.copy_(self._host, non_blocking=True)
        torch.accelerator.synchronize(self._tensor.device)

    def check(self, name: str) -> None:
        """Raise WrongResult unless a copy there and back gives the same numbers."""
        expected = torch.arange(self._tensor.numel(), dtype=torch.float32)
        self._host.copy_(expected)
        self._tensor.copy_(self._host)
        self._host.zero_()
        self.run(1.0)
        if not torch.equal(self._host, expected) or not torch.equal(self._tensor.cpu(), expected):
            raise WrongResult(f"{name} copied wrong numbers between host and device")


if __name__ == "__main__":
    main(RingWorker)
