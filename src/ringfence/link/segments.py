"""Division of a chunk into segments: a function of its length only, so that both endpoints agree without negotiation."""

from __future__ import annotations

from typing import Final

from ringfence.keys import SEGMENT_BYTES

SMALLEST_BYTES: Final = 128 * 1024  # below this, the cost of a call exceeds what overlap saves
ALIGNED_BYTES: Final = 4096


def segment_bytes(length: int) -> int:
    """The length of a chunk's segments except the last: about a quarter of the chunk, so that its stages overlap."""
    quarter = -(-length // (4 * ALIGNED_BYTES)) * ALIGNED_BYTES
    return min(SEGMENT_BYTES, max(SMALLEST_BYTES, quarter))


def segment_count(length: int) -> int:
    """The number of segments of a chunk; an empty chunk has one empty segment."""
    return max(1, -(-length // segment_bytes(length)))
