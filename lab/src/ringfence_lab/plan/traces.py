"""A training step as a trace: which bucket is reduced after how much computing. Studies replay it, plans predict it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ringfence_lab.plan.buckets import buckets
from ringfence_lab.plan.models import Model

MOST_BYTES: Final = 2 << 30  # that are replayed in a step; the rest is scaled, and marked
FORWARD: Final = 1 / 3  # of a step's computing: the backward pass costs twice the forward one


@dataclass(frozen=True)
class Trace:
    """One step. Each bucket is all-reduced after its computing; the step waits for all of them at its end."""

    steps: tuple[tuple[int, float], ...]  # (bytes of the bucket, seconds of computing before it), in order
    busy: bool  # whether that computing takes a core (a CPU's) or leaves it free (a GPU's)
    scale: float = 1.0  # how many times the real step is as long as this one: 1 unless it was cut

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.steps)

    @property
    def compute_seconds(self) -> float:
        return sum(seconds for _, seconds in self.steps)


def trace(
    model: Model, cap_mib: float | None, bytes_each: int, seconds: float, busy: bool, most_bytes: int = MOST_BYTES
) -> Trace:
    """Return the step of a model that computes for `seconds` without communication.

    The forward pass comes before the first bucket; the backward pass is spread over buckets by the parameters in them.
    A step of more than `most_bytes` is cut to an even choice of its buckets, with its computing cut alike.
    """
    sizes = buckets(model.parameters, cap_mib, bytes_each)
    whole = sum(sizes)
    kept = _thinned(sizes, most_bytes)
    replayed = sum(kept)
    scale = whole / replayed
    backward = seconds * (1 - FORWARD)
    steps = [(size, backward * size / whole) for size in kept]
    first = steps[0]
    steps[0] = (first[0], first[1] + seconds * FORWARD / scale)
    return Trace(tuple(steps), busy, scale)


def as_replayed(
    model: Model, cap_mib: float | None, bytes_each: int, seconds: float, busy: bool, scale: float
) -> Trace:
    """Return the trace that was cut by `scale` and whose computing took `seconds` in the replay."""
    sizes = buckets(model.parameters, cap_mib, bytes_each)
    whole = sum(sizes)
    limits = [_evenly(sizes, wanted) for wanted in range(len(sizes), 0, -1)]
    kept = min(limits, key=lambda chosen: abs(whole / sum(chosen) / scale - 1))
    most = sum(kept)
    if len(kept) == 1 and whole / scale < most:
        most = round(whole / scale)  # a single bucket that was cut itself
    return trace(model, cap_mib, bytes_each, seconds * whole / most, busy, most_bytes=most)


def _thinned(sizes: tuple[int, ...], most: int) -> list[int]:
    """Choose buckets, evenly spread over the step, of at most `most` bytes in total; a single bucket is cut itself."""
    for wanted in range(len(sizes), 0, -1):
        chosen = _evenly(sizes, wanted)
        if sum(chosen) <= most:
            return chosen
    return [min(most, sizes[len(sizes) // 2])]


def _evenly(sizes: tuple[int, ...], wanted: int) -> list[int]:
    count = len(sizes)
    return [sizes[(2 * index + 1) * count // (2 * wanted)] for index in range(wanted)]
