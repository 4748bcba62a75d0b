"""The last worker is killed during a collective: the others raise in time, and their device is still usable."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from ringfence.cli.selftest.device import Setting
from ringfence.cli.selftest.outcome import Outcome, right, wrong
from ringfence.errors import RingfenceError

LIMIT: Final = 5.0
COUNT: Final = 25 << 18  # 25 MiB of float32


def killed_worker(at: Setting) -> Outcome:
    """Start two collectives; the last rank ends without a word. The others wait for one, and for the other's future."""
    first, second = torch.ones(COUNT, device=at.device), torch.ones(COUNT, device=at.device)
    dist.all_reduce(first)
    dist.barrier()
    began = time.perf_counter()
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
    if at.rank == at.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    future = works[1].get_future()
    said = []
    for name, wait in (("wait()", works[0].wait), ("the future", future.wait)):
        if (error := _raised(wait)) is None:
            return wrong(f"{name} of a collective without the killed worker did not raise")
        said.append(error)
    seconds = time.perf_counter() - began
    if seconds > LIMIT:
        return wrong(f"raised after {seconds:.1f} s", seconds=seconds)
    usable = torch.arange(1000, device=at.device).sum()
    if usable.item() != 499_500 or torch.ones(10).to(at.device).cpu().sum() != 10:
        return wrong("the device computes wrong numbers afterwards")
    return right(f"raised after {seconds:.2f} s", seconds=seconds, error=said[0])


def _raised(wait: Callable[[], Any]) -> str | None:
    """Return the name of the error that a wait raises; the future's callbacks wrap it in their own."""
    try:
        wait()
    except RingfenceError as error:
        return type(error).__name__
    except RuntimeError as error:
        return str(error).splitlines()[-1]
    return None
