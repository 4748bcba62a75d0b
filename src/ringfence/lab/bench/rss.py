"""The memory of this process as the kernel counts it: pages that are resident now, and the most there were."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"  # proc(5): the peak starts again from what is resident now


def resident_bytes() -> int:
    """What is resident now, mapped files and shared memory included."""
    return _kibibytes("VmRSS") << 10


def peak_bytes() -> int:
    """The most that was resident since `reset_peak`."""
    return _kibibytes("VmHWM") << 10


def reset_peak() -> None:
    _CLEAR.write_text(_RESET_PEAK)


def _kibibytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise OSError(f"{_STATUS} has no {name}")
