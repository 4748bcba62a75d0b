"""Parses and formats sizes and times."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def bytes_of(text: str) -> int:
    """Parse a size such as "25MiB" into bytes.

    Raises ValueError.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(B|KiB|MiB|GiB)?", text)
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 4 or size % 4:
        raise ValueError(f"{text!r}: write a whole number of float32, such as 4KiB or 25MiB")
    return size


def size_text(size: float) -> str:
    """Format bytes in the largest unit in which they are at least one."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:.0f} B"


def time_text(seconds: float) -> str:
    """Format seconds in s, ms or µs."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def bucket_text(bucket_mb: float | None) -> str:
    """Format the size of DDP's buckets."""
    return "default buckets" if bucket_mb is None else f"buckets of {bucket_mb:g} MiB"
