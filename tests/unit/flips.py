"""Single-bit changes of a message."""

from __future__ import annotations

from collections.abc import Iterator


def flips(data: bytes) -> Iterator[bytes]:
    """Yield every message that differs in one bit."""
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)
