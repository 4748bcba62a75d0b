"""Measure what staging costs on the simulated device, and print it. Nothing here passes or fails.

    python -m tests.integration.device_measure [staged] [one-slot] [model] [call]

- `staged`: device tensors over host tensors with the same copies beside them, 100 MiB, 2 workers. Both queue for the same
  simulated copy engines, one for each direction, so the ratio is what staging adds to a call that can hide its copies. The
  aim is 1.25.
- `one-slot`: the same with one slot, so that a pass is copied down, sent and copied up before the next one begins. The ratio
  must be far larger.
- `model`: how much longer a slower copy rate takes, as the planner predicts it over the measured difference: about 1. Then
  the same for a model in which copies of both directions overlap where they take turns, or the other way round.
- `call`: when an asynchronous all-reduce returns whose input a kernel of 100 ms still computes, as a share of the kernel.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ringfence.collectives import ScheduleId
from ringfence_lab import accelerator
from ringfence_lab.bench.intervals import ratios
from ringfence_lab.bench.names import HOST
from ringfence_lab.bench.worker_pool import Placement, WorkerPool
from ringfence_lab.plan import hardware
from ringfence_lab.plan.cost import staged as cost_of_staged
from ringfence_lab.plan.work import VARIANTS, Cost
from tests import device
from tests.pool import Pool

ROUNDS = 7
SLOW = 0.5e9  # bytes per second: copies that hide behind nothing take longer than the collective
ONE_SLOT = "tests.integration.slowed:OneSlotSession"
MODEL_RATES = (0.2, 0.1)  # GB per second: slower than the network, so that copies determine the time
KERNEL = 0.1  # seconds
CALLS = 15


def prepare(workers: WorkerPool, size: int, only: list[str], rate: float, confidential: bool = False) -> None:
    what = {"operation": "all_reduce", "size": size, "wire": "float32", "only": only}
    workers.tell("prepare_device", **what, copy_rate=rate, confidential=confidential)


def ratio(workers: WorkerPool, variant: str, rate: float) -> float:
    """Return the median time of a variant over that of host tensors, which are measured before and after it."""
    prepare(workers, 100 << 20, [*HOST, variant], rate)
    turns = [(HOST[0], 1), (variant, 1), (HOST[1], 1)]
    rounds = [workers.measure("round", turns=turns, busy=False) for _ in range(ROUNDS)]
    seconds = {name: [samples[name]["seconds"] for samples in rounds] for name, _ in turns}
    return statistics.median(ratios(seconds[variant], seconds[HOST[0]], seconds[HOST[1]]))


def staged() -> None:
    with WorkerPool([Placement()] * 2, [*HOST, "ringfence"], "sim") as workers:
        for rate in (2e9, 10e9, SLOW):
            print(f"staged over host tensors, copies at {rate / 1e9:g} GB/s: {ratio(workers, 'ringfence', rate):.2f}")


def one_slot() -> None:
    with WorkerPool([Placement()] * 2, [*HOST, ONE_SLOT], "sim") as workers:
        print(f"one slot over host tensors, copies at {SLOW / 1e9:g} GB/s: {ratio(workers, ONE_SLOT, SLOW):.2f}")


# -- the planner's model --------------------------------------------------------------------------------------------

MODEL_SIZE = 32 << 20


def measured(workers: WorkerPool, rate: float, confidential: bool) -> float:
    """Return the median seconds of the staged all-reduce; a rate of 0 is as fast as the machine."""
    prepare(workers, MODEL_SIZE, ["ringfence"], rate * 1e9, confidential)
    rounds = [workers.measure("round", turns=[("ringfence", 1)], busy=False) for _ in range(ROUNDS)]
    return statistics.median(each["ringfence"]["seconds"] for each in rounds)


def predicted(on_host: float, rate: float, overlap: bool) -> float:
    """Return the seconds that the model expects, given those of the collective on host tensors."""
    profile = hardware.load("h100-cc").with_values(
        device_copy_rate=rate, device_copy_overhead=0, device_overlap=float(overlap)
    )
    found = Cost(on_host, {"wire": on_host}, "network")
    return cost_of_staged(profile, VARIANTS["ringfence"], ScheduleId.ALL_REDUCE_RING, 2, MODEL_SIZE, found).seconds


def model() -> None:
    with WorkerPool([Placement()] * 2, [*HOST, "ringfence"], "sim") as workers:
        for confidential in (False, True):
            on_host, fast, slow = (measured(workers, rate, confidential) for rate in (0.0, *MODEL_RATES))
            right, wrong = (
                (predicted(on_host, MODEL_RATES[1], overlap) - predicted(on_host, MODEL_RATES[0], overlap))
                / (slow - fast)
                for overlap in (not confidential, confidential)
            )
            mode = "confidential mode" if confidential else "normal mode"
            print(f"predicted over measured difference, {mode}: {right:.2f}, with the other overlap {wrong:.2f}")


# -- the call itself ------------------------------------------------------------------------------------------------


def returns_after() -> list[float]:
    """Seconds until an asynchronous all-reduce returns whose input a long kernel still computes."""
    where = device.load()
    tensor = torch.ones(1000, device=where)
    dist.all_reduce(tensor)
    seconds = []
    for _ in range(CALLS):
        torch.accelerator.synchronize()
        dist.barrier()
        accelerator.sleep(KERNEL)
        tensor.fill_(1.0)
        start = time.perf_counter()
        work = dist.all_reduce(tensor, async_op=True)
        seconds.append(time.perf_counter() - start)
        work.wait()
    return seconds


def call() -> None:
    with Pool() as pool:
        seconds = pool.check(returns_after, 2)
        shares = [statistics.median(each) / KERNEL for each in seconds]
    print(
        f"an all-reduce behind a kernel returns after these shares of it: {', '.join(f'{each:.4f}' for each in shares)}"
    )


PARTS: dict[str, Callable[[], None]] = {"staged": staged, "one-slot": one_slot, "model": model, "call": call}


def main(names: list[str]) -> None:
    if unknown := set(names) - set(PARTS):
        sys.exit(f"there is no part {', '.join(sorted(unknown))}: give {', '.join(PARTS)}, or none for all")
    accelerator.prepare()
    for name in names or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    from tests.integration import device_measure  # workers import functions by their module's name

    device_measure.main(sys.argv[1:])
