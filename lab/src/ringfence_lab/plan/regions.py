"""What a training step costs between sites over long links: gradients in each step, in float32 or int8, or DiLoCo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ringfence.collectives import Collective
from ringfence.collectives.counts import count

RATES: Final = (0.1e9, 0.5e9, 1e9, 2.5e9)  # bits a second
DELAYS: Final = (0.02, 0.1)  # seconds, one way
WAYS: Final = ("float32", "int8", "DiLoCo", "DiLoCo, int8")
_BUCKET: Final = 25 << 20  # bytes of gradients that DDP averages together
_INT8: Final = (256 + 4) / (4 * 256)  # bytes for one of float32: blocks of 256 values, with a scale each
_BACKWARD: Final = 2 / 3  # of a step's computing: DDP averages meanwhile
_CHECKSUM: Final = 1 / 3e9  # seconds for a byte: CRC-32 on a core of a Xeon at 2.5 GHz
_CHECKED: Final = 2  # of agreed parameters, and of the outer optimizer's momentum
_STANDINGS: Final = 2  # exchanges of a few bytes before and after the average of an outer step


@dataclass(frozen=True)
class Run:
    """A training between sites, each of which is one worker here: its own network is not counted."""

    elements: int  # parameters
    compute: float  # seconds of a step without communication
    sites: int
    every: int  # inner steps in a round of DiLoCo


def seconds(run: Run, rate: float, delay: float) -> dict[str, float]:
    """Return the seconds of a step by way, on average over a round: of the network, computing, and DiLoCo's checksums.

    Args:
        run: What is trained.
        rate: Of each site's link, in bits a second.
        delay: Of a packet, in seconds, one way.
    """
    whole = 4 * run.elements
    bucket = min(whole, _BUCKET)

    def transfer(size: int, share: float = 1.0) -> float:
        counts = count(Collective.ALL_REDUCE, run.sites, size // 4 * 4)
        return counts.wire * share * 8 / rate

    def waiting(int8: bool) -> float:
        return delay * (2 if int8 else count(Collective.ALL_REDUCE, run.sites, bucket // 4 * 4).rounds)

    def synchronous(share: float) -> float:
        last = transfer(bucket, share) + waiting(share < 1.0)  # can only begin when all has been computed
        return max(run.compute + last, (1 - _BACKWARD) * run.compute + transfer(whole, share) + waiting(share < 1.0))

    def in_rounds(share: float) -> float:
        network = transfer(whole, share) + waiting(share < 1.0) + _STANDINGS * delay
        return run.compute + (network + _CHECKED * whole * _CHECKSUM) / run.every

    return dict(zip(WAYS, [synchronous(1.0), synchronous(_INT8), in_rounds(1.0), in_rounds(_INT8)], strict=True))


def table(run: Run, rates: Sequence[float] = RATES, delays: Sequence[float] = DELAYS) -> list[dict[str, float]]:
    """Return `seconds` for each rate and delay, with both."""
    return [{"rate": rate, "delay": delay, **seconds(run, rate, delay)} for rate in rates for delay in delays]
