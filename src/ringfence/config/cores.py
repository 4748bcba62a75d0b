"""The cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores in this process's mask, or what the limit of its container leaves of them."""
    cores = len(os.sched_getaffinity(0))
    try:
        group = (root / "proc/self/cgroup").read_text(encoding="ascii").partition("0::/")[2].strip()
        quota, period = (root / "sys/fs/cgroup" / group / "cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # without a limit, the quota is "max"
        return cores
