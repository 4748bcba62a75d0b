"""How a chunk is cut into segments: a pure function of its length, so that both ends cut alike without a word."""

from __future__ import annotations

from typing import Final

from ringfence.keys import SEGMENT_BYTES

_SMALLEST: Final = 128 * 1024  # below this, calls cost more than overlapping them saves
_ALIGNED: Final = 4096


def segment_bytes(length: int) -> int:
    """The length of a chunk's segments but the last: about a quarter of the chunk, so that its stages overlap."""
    quarter = -(-length // (4 * _ALIGNED)) * _ALIGNED
    return min(SEGMENT_BYTES, max(_SMALLEST, quarter))


def segment_count(length: int) -> int:
    """How many segments a chunk has; an empty one has one, empty."""
    return max(1, -(-length // segment_bytes(length)))
