"""The resident memory of this process, now and at its peak, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"  # proc(5): the peak starts again from what is resident now


def resident_bytes() -> int:
    """Return the resident bytes, with mapped files and shared memory."""
    return _kibibytes("VmRSS") << 10


def peak_bytes() -> int:
    """Return the peak of the resident bytes since `reset_peak`."""
    return _kibibytes("VmHWM") << 10


def reset_peak() -> None:
    _CLEAR.write_text(_RESET_PEAK)


def _kibibytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise OSError(f"{_STATUS} has no {name}")
