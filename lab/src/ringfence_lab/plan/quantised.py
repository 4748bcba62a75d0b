"""An all-reduce with int8 on the wire (`ringfence.hooks.int8`): what it costs, and below which bandwidth it pays.

It is an all-to-all and an all-gather of a quarter of the bytes, and quantising beside them, piece by piece. On a device
quantising costs nothing here: it goes through memory a few times, of which a device has hundreds of gigabytes a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ringfence_lab.plan.hardware import Hardware
from ringfence_lab.plan.steps import collective
from ringfence_lab.plan.work import VARIANTS, stage_costs

SHARE: Final = (256 + 4) / (256 * 4)  # of float32's bytes: blocks of 256 codes, and a scale
_PIECE: Final = 4 << 20  # bytes of float32
_SHARP: Final = 6
_LOWEST: Final = 1e-3  # Gbit/s, between which a limit is looked for
_HIGHEST: Final = 1e4


@dataclass(frozen=True)
class Codec:
    """Seconds for a byte of float32 on one core."""

    quantise: float
    read: float


# `ringfence plan int8 --measure` on an Intel Xeon of 2.5 GHz that did other work as well, 2026-11-19, best of 15.
SHIPPED: Final = Codec(quantise=0.48e-9, read=0.27e-9)


def float32_seconds(hardware: Hardware, workers: int, size: float) -> float:
    """Return the seconds of ringfence's all-reduce of a float32 tensor of `size` bytes."""
    return collective(hardware, VARIANTS["ringfence"], "all_reduce", workers, size).seconds


def int8_seconds(hardware: Hardware, workers: int, size: float, codec: Codec = SHIPPED) -> float:
    """Return the seconds of the same sum with int8 on the wire."""
    sealed = VARIANTS["ringfence"]
    wire = sum(
        collective(hardware, sealed, name, workers, size * SHARE).seconds for name in ("all_to_all", "all_gather")
    )
    pieces = max(1.0, size / _PIECE)
    wire += (pieces - 1) * 2 * (workers - 1) * 2 * stage_costs(hardware, sealed).message  # each piece has its messages
    if hardware["device", "copy_rate"]:
        return wire
    crowd = max(1.0, hardware["node", "workers"] / max(1.0, hardware["node", "cores"]))
    # A worker quantises its contribution to other shards, and the sum of its own; it reads others' parts of that, and all.
    work = size * (codec.quantise + codec.read * (2 - 1 / workers)) * crowd
    ends = 2 * work / max(2.0, pieces)  # the first piece and the last have nothing beside them
    return float((wire**_SHARP + work**_SHARP) ** (1 / _SHARP)) + ends


def pays_below(hardware: Hardware, workers: int, size: float, codec: Codec = SHIPPED) -> float:
    """Return the bandwidth of a node, in Gbit/s, below which int8 is faster; 0 or infinity if it never or always is."""

    def is_faster(rate: float) -> bool:
        limited = hardware.with_values(network_rate=rate)
        return int8_seconds(limited, workers, size, codec) < float32_seconds(limited, workers, size)

    low, high = _LOWEST, _HIGHEST
    if not is_faster(low):
        return 0.0
    if is_faster(high):
        return float("inf")
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_faster(middle) else (low, middle)
    return low
