"""Rings between simulated devices, for lab/tests/integration/test_gpu_tee.py: run in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ringfence_lab import accelerator
from ringfence_lab.accelerator import tee
from ringfence_lab.bench.device_ring import DeviceRing
from ringfence_lab.bench.operations import WrongResult

DEVICES = 8  # of the process; rings take as many of them as they need


def sums(devices: int, counts: Sequence[int], variant: dict[str, bool] | None) -> None:
    """Sum tensors with these numbers of elements, as the settings of a TEE copy them, and compare with the host's sum."""
    accelerator.load(devices=DEVICES)
    accelerator.reset()
    accelerator.simulate_tee(None if variant is None else tee.load("software").with_values(**variant))
    ring = DeviceRing(devices, [4 * max(counts)])
    draw = torch.Generator().manual_seed(devices)
    for count in counts:
        parts = [torch.randint(-1000, 1000, (count,), generator=draw, dtype=torch.float32) for _ in range(devices)]
        tensors = [part.to(device) for part, device in zip(parts, ring.devices, strict=True)]
        ring.synchronize()
        ring.all_reduce(tensors)
        ring.synchronize()
        expected = torch.stack(parts).sum(0)
        for tensor in tensors:
            assert torch.equal(tensor.cpu(), expected), count
    ring.check("a ring")


class Unordered(DeviceRing):
    """A ring that forgets to wait between sub-steps."""

    def _next_substep(self) -> None:
        pass


def unordered() -> None:
    """A sum whose sub-steps are not ordered is refused, so it is never timed."""
    accelerator.load(devices=DEVICES)
    accelerator.reset()
    accelerator.configure(jitter=0.02, seed=3)
    with pytest.raises(WrongResult, match="no waits computed a wrong all_reduce on device"):
        Unordered(4, [1 << 20]).check("no waits")


def corrupted() -> None:
    """A flipped bit in a bounce buffer ends the ring with an error."""
    accelerator.load(devices=DEVICES)
    accelerator.reset()
    accelerator.simulate_tee(tee.load("h100"))
    ring = DeviceRing(2, [1 << 16])
    accelerator.corrupt_next_copy(after=5)
    with pytest.raises(RuntimeError, match="authenti"):
        ring.check("a ring")


def hidden() -> None:
    """On the devices' clock, a step takes its computing and the last bucket's hops: others run beside computing."""
    accelerator.load(devices=DEVICES)
    accelerator.reset()
    slow = tee.load("h100").with_values(confidential=False, peer_rate=1e7, peer_overhead=0.0)
    accelerator.simulate_tee(slow)
    ring = DeviceRing(2, [400_000] * 3)  # each takes two hops of 200 kB: 40 ms
    assert 0.339 < ring.step([0.1, 0.1, 0.1]) < 0.40
    assert 0.119 < ring.step([0.0, 0.0, 0.0]) < 0.17
