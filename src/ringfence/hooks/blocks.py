"""Blocks of 256 values as int8 with a float32 scale each, packed into bytes. All of it is torch operations on the
device of the values.

A packet holds the codes of its blocks, then their scales, then a header of the caller. A value is its code times its
block's scale; codes are rounded half to even, within -127 to 127. A block with a value that is not finite has the scale
NaN: all of its values are read as NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

BLOCK: Final = 256
_SCALE_BYTES: Final = 4
_LARGEST_CODE: Final = 127
_SMALLEST: Final = 2.0**-100  # the largest value of a block counts as at least this: its reciprocal is finite
_TILE: Final = 512  # blocks that the CPU works on at once


def packet_bytes(count: int, header: int) -> int:
    """Return the length of a packet of `count` values, a multiple of BLOCK. The header's bytes are a multiple of 4."""
    return count + count // BLOCK * _SCALE_BYTES + header


def quantise(
    values: torch.Tensor,
    packets: torch.Tensor,
    *,
    added: Sequence[torch.Tensor] = (),
    divisor: int = 1,
    keep_errors: bool = False,
) -> None:
    """Write each row of values to the packet of the same row.

    Args:
        values: float32, with a multiple of BLOCK columns.
        packets: uint8; their headers are left alone.
        added: Packets whose values are added to `values` before, in this order.
        divisor: What is read from the packets is divided by this.
        keep_errors: Replace the values by what their codes lack of them (before the division): 0 in blocks that are not
            finite.
    """
    blocks = values.unflatten(1, (-1, BLOCK))
    codes, scales = _parts(packets, blocks.size(1))
    others = [_parts(each, blocks.size(1)) for each in added]
    all_largest = values.new_empty(blocks.shape[:2])
    for tile, scratch in _tiles(blocks):
        block = blocks[tile]
        for their_codes, their_scales in others:
            block.addcmul_(scratch.copy_(their_codes[tile]), their_scales[tile].unsqueeze(2))
        torch.abs(block, out=scratch)
        largest = torch.amax(scratch, 2, out=all_largest[tile]).clamp_(min=_SMALLEST)
        torch.mul(block, (_LARGEST_CODE / largest).unsqueeze_(2), out=scratch).round_()
        codes[tile].copy_(scratch)
        if keep_errors:
            block.addcmul_(scratch, (largest / _LARGEST_CODE).unsqueeze_(2), value=-1)
    if keep_errors:
        lost = all_largest.isfinite().logical_not_()
        if blocks.device.type != "cpu" or bool(lost.any()):  # another device is not waited for
            blocks.masked_fill_(lost.unsqueeze(2), 0.0)
    infinity_as_nan = all_largest - all_largest
    torch.div(all_largest.div_(_LARGEST_CODE).add_(infinity_as_nan), divisor, out=scales)


def read(packets: torch.Tensor, values: torch.Tensor) -> None:
    """Write to each row of values, which are float32, what the packet of the same row holds."""
    blocks = values.unflatten(1, (-1, BLOCK))
    codes, scales = _parts(packets, blocks.size(1))
    for tile, _ in _tiles(blocks):
        blocks[tile].copy_(codes[tile]).mul_(scales[tile].unsqueeze(2))


def _parts(packets: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and the scales of each packet's blocks."""
    codes, scales, _ = packets.tensor_split((count * BLOCK, count * (BLOCK + _SCALE_BYTES)), dim=1)
    return codes.view(torch.int8).unflatten(1, (-1, BLOCK)), scales.view(torch.float32)


def _tiles(blocks: torch.Tensor) -> Iterator[tuple[tuple[slice, slice], torch.Tensor]]:
    """Yield the rows and columns that are worked on at once, and scratch memory for them.

    On the CPU they fit in its second-level cache; on another device they are all.
    """
    rows, columns = blocks.shape[:2]
    if not rows * columns:
        return
    together = _TILE if blocks.device.type == "cpu" else rows * columns
    wide, high = min(columns, together), max(1, together // columns)
    scratch = blocks.new_empty(min(rows, high), wide, BLOCK)
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            tile = slice(row, row + high), slice(column, column + wide)
            yield tile, scratch[: rows - row, : columns - column]
