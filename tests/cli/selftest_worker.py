"""A worker of `ringfence selftest` on a simulated device that is changed first: the self-test has to notice.

`python -m tests.cli.selftest_worker CHANGE ...` takes the arguments of `ringfence.cli.selftest.worker` after the change: the
name of a wait that is left out (see device_scenarios.FAULTS), on a device in confidential mode; or "choose". Then each check
can be asked for with a fault: "fault/check".
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import torch

from ringfence.cli.selftest import device, worker
from ringfence.cli.selftest.device import LongKernel, Setting
from ringfence.cli.selftest.report import Outcome
from ringfence_lab import accelerator
from tests.integration.device_scenarios import FAULTS

CHOOSE = "choose"
open_device = device.open_device
tries: Counter[object] = Counter()
FACTORS = (1, 1, 3, 1, 9, 1, 27)


def left_out(fault: str) -> mock._patch[object]:
    target, name, without, _ = FAULTS[fault]
    return mock.patch.object(target, name, without)


def with_fault(fault: str, check: Callable[[Setting], Outcome], at: Setting) -> Outcome:
    """Check with the fault. Every other time that this is asked for, kernels are longer: a busy host comes too late."""
    tries[fault, check] += 1
    slower = partial(longer, at.busy, FACTORS[tries[fault, check] % len(FACTORS)])
    with left_out(fault):
        return check(replace(at, busy=slower))


def longer(busy: LongKernel, factor: int, seconds: float) -> None:
    busy(seconds * factor)


def open_confidential(wanted: str, rank: int) -> torch.device:
    opened = open_device(wanted, rank)
    accelerator.confidential(True)
    return opened


def main(change: str, arguments: list[str]) -> None:
    wanted, rank, size, quick, store, channel = arguments
    if change == CHOOSE:
        for fault in FAULTS:
            for name, check in [*worker.CHECKS.items()]:
                worker.CHECKS.setdefault(f"{fault}/{name}", partial(with_fault, fault, check))
    else:
        mock.patch.object(device, "open_device", open_confidential).start()
        left_out(change).start()
    worker.main(wanted, int(rank), int(size), quick == "quick", store, int(channel))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
