"""The buckets into which DistributedDataParallel gathers gradients, each of which is all-reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MIB: Final = 1 << 20
DEFAULT_MIB: Final = 25.0
_FIRST: Final = 1 * MIB  # DDP's first bucket if no size is set: communication starts early


def buckets(parameters: Sequence[int], cap_mib: float | None, bytes_each: int) -> tuple[int, ...]:
    """Return the bytes of the buckets in the order in which DDP reduces them: from the last parameter to the first.

    This is DDP from its second step on; in the first it does not yet know in which order gradients come, and reduces
    everything as one. A bucket is closed by the parameter with which it reaches its cap, so it may be much larger. `bytes_each`
    is what an element of a gradient takes in the bucket; a hook that compresses acts on buckets that were cut before.
    """
    cap = int((DEFAULT_MIB if cap_mib is None else cap_mib) * MIB)
    limit = _FIRST if cap_mib is None else cap
    result = []
    filled = 0
    for elements in reversed(parameters):
        filled += elements * bytes_each
        if filled >= limit:
            result.append(filled)
            filled, limit = 0, cap
    return (*result, filled) if filled else tuple(result)
