"""How long quantising takes on this machine, on one core."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from ringfence.hooks import blocks
from ringfence_lab.plan.quantised import Codec

_PIECES: Final = 6  # so that each is no longer in the cache when its turn comes again
_TIMES: Final = 15


def measure() -> Codec:
    """Return the best of several measurements, in processor time of this thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        values = torch.randn(_PIECES, 1, 1 << 20)
        packets = torch.empty(_PIECES, 1, blocks.packet_bytes(values.size(2), 0), dtype=torch.uint8)
        quantise = _best(blocks.quantise, list(zip(values, packets, strict=True)))
        read = _best(blocks.read, list(zip(packets, values, strict=True)))
    finally:
        torch.set_num_threads(before)
    return Codec(quantise / values.nbytes, read / values.nbytes)


def _best(
    call: Callable[[torch.Tensor, torch.Tensor], None], pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> float:
    taken = []
    for _ in range(_TIMES):
        start = time.thread_time()
        for piece in pieces:
            call(*piece)
        taken.append(time.thread_time() - start)
    return min(taken)
