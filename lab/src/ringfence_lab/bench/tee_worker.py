"""The process of the rings between simulated devices: executes and times commands, round by round."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from ringfence.errors import RingfenceError
from ringfence_lab import accelerator
from ringfence_lab.bench import names
from ringfence_lab.bench.device import late_seconds, simulate_tee
from ringfence_lab.bench.device_ring import DeviceRing
from ringfence_lab.bench.json_pipe import Message, run_worker
from ringfence_lab.bench.operations import WrongResult

_ATTEMPTS: Final = 5  # each with twice the dilation of the one before
_MOVED: Final = 0.02  # of the simulated time: what the devices' clock may move on because this machine is too slow


class MachineTooSlow(RingfenceError):
    """Simulated time could not be kept, so no ratio of it would mean anything."""


class RingWorker:
    """All devices of a machine in one process."""

    def __init__(self, config: Message) -> None:
        torch.set_num_threads(1)
        self._count: int = config["devices"]
        accelerator.load(devices=self._count)
        self._device = torch.device(names.SIMULATED, 0)
        self._ring: DeviceRing
        self._tees: dict[str, Message] = {}
        self._run: Callable[[float], float]

    def hello(self) -> Message:
        return {"device": {"type": names.SIMULATED, "name": f"{self._count} simulated devices in one process"}}

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

        def step(dilation: float) -> float:
            return self._ring.step([dilation * before for before in seconds])

        self._run = copies.run if operation == "copy" else step
        return {"variants": list(tees)}

    def train(self, turns: list[tuple[str, int]]) -> Message:
        """Time the given number of steps of every variant in turn."""
        return {name: self._timed(name, repeats) for name, repeats in turns}

    def _timed(self, name: str, repeats: int) -> Message:
        """Time a variant on the devices' clock. If this machine was too slow for its dilation, double that and repeat."""
        settings = self._tees[name]
        for attempt in range(_ATTEMPTS):
            tee = simulate_tee({**settings, "dilation": settings["dilation"] * 2**attempt})
            late = late_seconds(self._device)
            cpu, start = time.process_time_ns(), time.perf_counter_ns()
            seconds = sum(self._run(tee.dilation) for _ in range(repeats))
            wall, cpu = (time.perf_counter_ns() - start) / 1e9, time.process_time_ns() - cpu
            late = late_seconds(self._device) - late
            if seconds - (wall - late) <= _MOVED * seconds:
                about = {"wall": wall, "late": late, "dilation": tee.dilation}
                return {"seconds": seconds, "cpu": cpu / 1e9, "sent": 0, "repeats": repeats, **about}
        raise MachineTooSlow(
            f"this machine is too busy to simulate {self._count} devices ({name}), even with time dilated {tee.dilation:g} "
            "times: close other programs and run the study again, which continues, or lower `load` in the grid"
        )


class HostCopies:
    """A copy from a device to pinned memory and back."""

    def __init__(self, device: torch.device, size: int) -> None:
        count = max(1, size // 4)
        self._tensor = torch.zeros(count, device=device)
        self._host = torch.zeros(count, pin_memory=True)

    def run(self, _dilation: float) -> float:
        """Copy, and return the seconds that it took, without those for which simulated time stood still.

        The host waits for each copy in confidential mode, so its clock is the one to measure by.
        """
        late, start = late_seconds(self._tensor.device), time.perf_counter()
        self._host.copy_(self._tensor, non_blocking=True)
        self._tensor.copy_(self._host, non_blocking=True)
        torch.accelerator.synchronize(self._tensor.device)
        wall = time.perf_counter() - start
        return wall - (late_seconds(self._tensor.device) - late)

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
    run_worker(RingWorker)
