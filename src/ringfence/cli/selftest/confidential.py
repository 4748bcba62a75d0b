"""Whether a GPU is in confidential mode: what the driver says, and how pinned memory and copies behave. Imports torch late.

In confidential mode, copies go through bounce buffers. torch then reports pinned memory as not pinned, and a copy that should
return at once blocks its thread until the stream has reached it.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

KERNEL_SECONDS: Final = 0.1
SMI_SECONDS: Final = 20.0
COPY_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Signs:
    """What was found. None: it could not be found out."""

    driver: bool | None  #     nvidia-smi says that confidential compute is on
    pinned: bool | None  #     memory that was asked to be pinned is pinned
    blocks: float | None = None  # seconds that a pinned copy blocked its thread behind a kernel of KERNEL_SECONDS


def driver_says() -> bool | None:
    """Return whether `nvidia-smi conf-compute -f` reports that the mode is on, or None if it cannot tell."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - the driver's own tool
            [command, "conf-compute", "-f"], capture_output=True, text=True, timeout=SMI_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse(done.stdout) if done.returncode == 0 else None


def parse(text: str) -> bool | None:
    """Return the status in the output of `nvidia-smi conf-compute -f`, such as "CC status: ON"."""
    found = re.search(r"status\s*:\s*(ON|OFF)\b", text, re.IGNORECASE)
    return None if found is None else found[1].upper() == "ON"


def memory_is_pinned() -> bool | None:
    """Return whether torch reports pinned memory as pinned, or None if memory cannot be pinned."""
    import torch

    try:
        return bool(torch.empty(1, pin_memory=True).is_pinned())
    except RuntimeError:
        return None


def seconds_blocked(device: torch.device, busy: Callable[[float], None]) -> float | None:
    """Return how long a thread that copies to the device from pinned memory, behind a long kernel, is blocked."""
    import torch

    try:
        host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return None
    stream, target = torch.Stream(device), torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    torch.accelerator.synchronize()
    times = []
    with stream:
        target.copy_(host, non_blocking=True)
        for _ in range(3):
            stream.synchronize()
            busy(KERNEL_SECONDS)
            began = time.perf_counter()
            target.copy_(host, non_blocking=True)
            times.append(time.perf_counter() - began)
    stream.synchronize()
    return min(times)


def signs(device: torch.device, busy: Callable[[float], None] | None = None) -> Signs:
    """Collect the signs; without a long kernel, all but the behaviour of copies."""
    driver = driver_says() if device.type == "cuda" else None
    pinned, blocks = memory_is_pinned(), None
    if busy is not None:
        with contextlib.suppress(RuntimeError):
            blocks = seconds_blocked(device, busy)
    return Signs(driver, pinned, blocks)


def verdict(found: Signs) -> tuple[str, list[str]]:
    """Return "yes", "no" or "unclear", and the reasons. Behaviour counts more than a driver that says no."""
    blocking = None if found.blocks is None else found.blocks > KERNEL_SECONDS / 2
    reasons = []
    if found.driver is not None:
        reasons.append(f"nvidia-smi reports that confidential compute is {'on' if found.driver else 'off'}")
    if found.pinned is None:
        reasons.append("host memory cannot be pinned for this device")
    else:
        reasons.append(f"torch reports pinned memory as {'pinned' if found.pinned else 'not pinned'}")
    if found.blocks is not None:
        behind = f"behind a kernel of {KERNEL_SECONDS * 1e3:.0f} ms"
        reasons.append(
            f"a pinned copy {behind} blocked its thread for {found.blocks * 1e3:.0f} ms"
            if blocking
            else f"a pinned copy {behind} returned at once ({found.blocks * 1e3:.2f} ms)"
        )
    if found.driver or (blocking and found.pinned is False):
        return "yes", reasons
    if not blocking and (found.pinned or found.driver is False):
        return "no", reasons
    return "unclear", reasons
