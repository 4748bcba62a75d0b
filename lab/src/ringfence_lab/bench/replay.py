"""Training steps replayed from a trace: the all-reduces of a model's buckets, and its computing in between as time that passes.

Models that do not fit here still have a communication pattern, and that runs for real. As in DDP, each bucket is handed over
as soon as its gradients would be there, several are under way at once, and all are waited for at the end of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from ringfence_lab import accelerator
from ringfence_lab.bench.operations import Tensors, type_of
from ringfence_lab.bench.variants import WorkerVariant

_MEMORY: Final = 64 << 20  # for all buckets together, unless one is larger
_SIDE: Final = 256  # of the matrices that keep a core busy: a product takes a fraction of a millisecond


class Memory:
    """Memory that the buckets of a step share, one after the other and then from the beginning.

    A bucket may come round to memory whose last sum is still under way, which DDP's never do. Nothing is lost by it: all is
    zero, and so is every sum of it.
    """

    def __init__(self, sizes: Sequence[int], wire: str, device: torch.device | None = None) -> None:
        kind = type_of(wire)
        counts = [max(1, size // kind.itemsize) for size in sizes]
        room = max(*counts, min(sum(counts), _MEMORY // kind.itemsize))
        memory = torch.zeros(room, dtype=kind, device=device)
        self.largest = memory[: max(counts)]
        self.buckets: list[torch.Tensor] = []
        at = 0
        for count in counts:
            if at + count > room:
                at = 0
            self.buckets.append(memory[at : at + count])
            at += count

    def tensors(self, bucket: torch.Tensor) -> Tensors:
        """Return the tensors of an all-reduce of a bucket."""
        return Tensors(bucket, bucket[:0], bucket[:0])


class Busy:
    """Computing on a CPU. It takes processor time, so it takes longer if there are fewer cores than workers.

    Whole matrix products, each without the interpreter's lock, as a backward pass holds it hardly ever. What one takes too
    long is taken off the next.
    """

    def __init__(self) -> None:
        self._matrix = torch.ones(_SIDE, _SIDE) / _SIDE
        self._until = time.thread_time()

    def __call__(self, seconds: float) -> None:
        self._until += seconds
        while time.thread_time() < self._until:
            self._matrix = self._matrix @ self._matrix


class Idle:
    """Computing on a GPU: the host waits."""

    def __init__(self) -> None:
        self._until = time.perf_counter()

    def __call__(self, seconds: float) -> None:
        self._until += seconds
        time.sleep(max(0.0, self._until - time.perf_counter()))


class OnDevice:
    """Computing on a simulated device: the host only issues it."""

    def __call__(self, seconds: float) -> None:
        if seconds:
            accelerator.sleep(seconds)


def step(
    variant: WorkerVariant, memory: Memory, seconds: Sequence[float], compute: type[Busy | Idle | OnDevice]
) -> Callable[[], None]:
    """Return a function that replays one step: computes for these seconds before each bucket, and waits for all sums."""

    def run() -> None:
        go_on = compute()
        begun = []
        for bucket, before in zip(memory.buckets, seconds, strict=True):
            go_on(before)
            if variant.offers("all_reduce"):
                begun.append(variant.begin("all_reduce", memory.tensors(bucket)))
        for each in begun:
            each.wait()
        if compute is OnDevice:
            torch.accelerator.synchronize()

    return run
