"""The cores of this machine, and the channels that a run has by default: without torch, for `ringfence plan`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_MEASURED: Final = 2  # the most channels that were measured, and helped
_CORES: Final = 2 * _MEASURED  # of a worker: one for each channel, and as many for what it computes meanwhile
_ONE_CHANNEL_MBIT: Final = 10_000  # what one thread seals, sends, receives and opens in a second


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores in this process's mask, or what the limit of its container leaves of them."""
    cores = len(os.sched_getaffinity(0))
    try:
        group = (root / "proc/self/cgroup").read_text(encoding="ascii").partition("0::/")[2].strip()
        quota, period = (root / "sys/fs/cgroup" / group / "cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # without a limit, the quota is "max"
        return cores


def cpu_fact(*names: str, root: Path = Path("/")) -> str:
    """Return what the kernel says of the first core under one of these names, which are in small letters, or ""."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    facts = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in facts if key.strip().lower() in names), "")


def default_channels(cores: int, workers: int, mbit: int | None) -> int:
    """Return the channels of a run in which `workers` share this many cores of a machine with this link.

    A link that does not say how fast it is counts as fast: behind a slow one a second channel costs an idle thread.
    """
    slow = mbit is not None and mbit <= _ONE_CHANNEL_MBIT
    return 1 if slow or cores < _CORES * workers else _MEASURED
