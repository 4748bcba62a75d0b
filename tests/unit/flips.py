"""Single-bit changes of a message."""

from __future__ import annotations

from collections.abc import Iterator


def flips(data: bytes, every: bool = True) -> Iterator[bytes]:
    """Every message that differs in one bit; or, if not `every`, one for each byte, not always in the same bit."""
    for bit in range(8 * len(data)):
        if every or bit % 8 == bit // 8 % 8:
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            yield bytes(changed)
