"""Sizes and times as people read them."""

from __future__ import annotations


def size_text(size: float) -> str:
    """Bytes in the largest unit that keeps them above one."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:.0f} B"


def time_text(seconds: float) -> str:
    """Seconds in the unit that shows three figures or so."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
