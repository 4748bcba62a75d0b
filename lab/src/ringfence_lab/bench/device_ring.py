"""A training step on several devices of one process: buckets summed hop by hop in a ring, as NCCL does, on simulated time.

    device 0 ──copy──► device 1 ──copy──► device 2 ──copy──► device 3 ──copy──► device 0

Each sub-step copies one part of a bucket from every device to the next. In the first half of the sub-steps the receiver adds
it to its own part; in the second half it keeps it. The device decides how a copy from device to device travels: over a link
between them, or encrypted through the host's memory. Events order the streams; the host only issues work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from ringfence_lab import accelerator
from ringfence_lab.bench.operations import WrongResult
from ringfence_lab.bench.replay import Memory

_CHECKED: Final = 1021  # elements of the pattern that is summed to check a ring; a prime, so parts begin anywhere in it


class DeviceRing:
    """The buckets of a step on each device, with the streams that compute, send and receive."""

    def __init__(self, devices: int, sizes: Sequence[int]) -> None:
        """Allocate zeroed float32 buckets of these sizes in bytes on each of the simulated devices."""
        self.devices = [torch.device("sim", index) for index in range(devices)]
        self._memory = [Memory(sizes, "float32", device) for device in self.devices]
        part = -(-max(bucket.numel() for bucket in self._memory[0].buckets) // devices)
        self._received = [torch.zeros(part, device=device) for device in self.devices]
        self._compute = [torch.Stream(device) for device in self.devices]
        # Two streams for each device, since a ring sends and receives at once. Both wait for each other between buckets.
        self._send = [torch.Stream(device) for device in self.devices]
        self._receive = [torch.Stream(device) for device in self.devices]
        self.synchronize()

    def step(self, seconds: Sequence[float]) -> float:
        """Run one step: compute for these seconds before each bucket, sum each bucket, wait for everything.

        Returns the seconds that passed on the devices' clock, which does not count what the host is late by.
        """
        begun = [_now(stream) for stream in self._compute]
        for number, before in enumerate(seconds):
            for device, stream in enumerate(self._compute):
                with stream:
                    if before:
                        accelerator.sleep(before)
                    ready = stream.record_event()
                self._send[device].wait_event(ready)
                self._receive[device].wait_event(ready)
            self.all_reduce([memory.buckets[number] for memory in self._memory])
        for compute, send, receive in zip(self._compute, self._send, self._receive, strict=True):
            compute.wait_event(send.record_event())
            compute.wait_event(receive.record_event())
        ended = [_now(stream) for stream in self._compute]
        self.synchronize()
        passed = [float(begin.elapsed_time(end)) for begin, end in zip(begun, ended, strict=True)]
        return max(passed) / 1e3

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Issue the sum of one tensor of each device; every device gets the result in its own."""
        count = len(tensors)
        parts = [_parts(tensor, count) for tensor in tensors]
        for substep in range(count - 1):
            for device in range(count):
                self._send_part(device, parts[device][(device - substep) % count], self._received)
            for device in range(count):
                part = parts[device][(device - 1 - substep) % count]
                with self._receive[device]:
                    part.add_(self._received[device][: part.numel()])
            self._next_substep()
        for substep in range(count - 1):
            targets = [parts[device][(device - substep) % count] for device in range(count)]
            for device in range(count):
                self._send_part(device, parts[device][(device + 1 - substep) % count], targets)
            self._next_substep()

    def _send_part(self, device: int, part: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        after = (device + 1) % len(targets)
        if part.numel():
            with self._send[device], self._receive[after]:
                targets[after][: part.numel()].copy_(part, non_blocking=True)

    def _next_substep(self) -> None:
        """What a device sends next is what it has received now; it receives into memory that it has sent."""
        for send, receive in zip(self._send, self._receive, strict=True):
            received, sent = receive.record_event(), send.record_event()
            send.wait_event(received)
            receive.wait_event(sent)

    def check(self, name: str) -> None:
        """Sum known numbers in the largest bucket, compare every element on every device, and leave zeros.

        Raises WrongResult, which names the variant.
        """
        largest = [memory.largest for memory in self._memory]
        count = largest[0].numel()
        pattern = torch.arange(_CHECKED, dtype=torch.float32).repeat(-(-count // _CHECKED))[:count]
        for rank, tensor in enumerate(largest):
            tensor.copy_(pattern + rank)
        self.synchronize()
        self.all_reduce(largest)
        self.synchronize()
        ranks = len(largest)
        expected = pattern * ranks + ranks * (ranks - 1) / 2
        for rank, tensor in enumerate(largest):
            if not torch.equal(tensor.cpu(), expected):
                raise WrongResult(f"{name} computed a wrong all_reduce on device {rank}")
            tensor.zero_()  # sums of sums grow without end otherwise
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until every device has done what was issued."""
        for device in self.devices:
            torch.accelerator.synchronize(device)


def _now(stream: torch.Stream) -> torch.Event:
    event = torch.Event(stream.device, enable_timing=True)
    event.record(stream)
    return event


def _parts(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return a flat tensor in `count` parts, of which the last ones may be shorter or empty."""
    size = -(-tensor.numel() // count)
    return [tensor[index * size : (index + 1) * size] for index in range(count)]
