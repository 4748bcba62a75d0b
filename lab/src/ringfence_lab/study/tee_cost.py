"""How long a variant of a gpu-tee cell takes in simulated time, and how much work it is for this machine.

The quotient of the two is the dilation that keeps a given number of this machine's cores in use. These estimates choose the
dilation and print how long a study takes. No result contains them; the preset `published` is solved with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from ringfence.collectives import Collective
from ringfence.collectives.passes import passes
from ringfence.keys import CHANNEL_LIMIT
from ringfence_lab.accelerator.tee import Tee
from ringfence_lab.bench import names
from ringfence_lab.plan.hardware import load
from ringfence_lab.study.cells import Step

HOST_PROFILE: Final = "tdx-100g"  # of the planner: what a core of a confidential virtual machine costs
_AES: Final = 0.3e-9  # seconds of a core of this machine, for each byte and pass
_MOVE: Final = 0.4e-9  # copying and adding a byte of a sub-step
_SEALED: Final = 2.5e-9  # sealing, sending through a limited link, receiving, opening and adding a byte, both ends
_COPY: Final = 100e-6  # issuing one copy, with its events
_PASSES: Final = {"plain": 0, "plain-again": 0, "direct": 2, "all": 2}  # of AES for each byte of a sub-step; else 4
HOST_CORES: Final = float(CHANNEL_LIMIT)  # of each device's host that seal: a channel each, of the 12 that a GPU has


def host_rate(cores: float) -> float:
    """Return the bytes per second that cores of a host seal, send, receive, open and add, by the planner's profile."""
    profile = load(HOST_PROFILE)
    return cores / sum(profile["core", stage] for stage in ("seal", "send", "receive", "open", "reduce"))


def copy_seconds(tee: Tee, size: float) -> float:
    """Return the time of one host-device copy."""
    if not tee.confidential:
        return tee.plain_overhead + size / tee.link_rate
    return tee.copy_overhead + _stages(tee, size, [1 / tee.cpu_rate, 1 / tee.link_rate, *_device(tee)])


def hop_seconds(tee: Tee, size: float) -> float:
    """Return the time of one copy from device to device."""
    if not tee.confidential:
        return tee.peer_overhead + size / tee.peer_rate
    if tee.direct:
        link = 1 / tee.link_rate
        return tee.copy_overhead + _stages(tee, size, [*_device(tee), link, link, *_device(tee)])
    return 2 * copy_seconds(tee, size)


def one_copy(tee: Tee, size: float, devices: int, operation: str | None) -> float:
    """Return the time of one copy of a bucket, or of what is copied in its place."""
    return copy_seconds(tee, size) if operation == "copy" else hop_seconds(tee, size / devices)


def _device(tee: Tee) -> list[float]:
    """Return the seconds per byte of encryption and of authentication on the device."""
    parts = tee.authentication_parts if tee.parallel_authentication else 1
    authentication = 1 / tee.authentication_rate / parts if tee.authentication_rate else 0.0
    return [1 / tee.device_rate if tee.device_rate else 0.0, authentication]


def _stages(tee: Tee, size: float, per_byte: Sequence[float]) -> float:
    if not tee.overlap:
        return size * sum(per_byte)
    return size * max(per_byte) + min(size, tee.piece_bytes) * (sum(per_byte) - max(per_byte))


def ring_seconds(tee: Tee, devices: int, trace: Sequence[Step]) -> float:
    """Return the simulated time of a step whose buckets are summed hop by hop."""
    computed = done = 0.0
    for size, before in trace:
        computed += before
        done = max(done, computed) + 2 * (devices - 1) * hop_seconds(tee, size / devices)
    return done


def sealed_seconds(tee: Tee, workers: int, trace: Sequence[Step], rate: float) -> float:
    """Return the simulated time of a step whose buckets ringfence sums, with so many bytes per second of a host.

    One thread of each process copies, in both directions: a pass that is ready goes back before another one is fetched.
    """
    waiting: list[tuple[float, float]] = []  # passes that are fetched: from when on, and their bytes
    computed = 0.0
    for size, before in trace:
        computed += before
        number = passes(Collective.ALL_REDUCE, workers, math.ceil(size)).number
        waiting += [(computed, size / number)] * number
    summed: list[tuple[float, float]] = []  # passes that go back: from when on, and their bytes
    now = host = 0.0
    while waiting or summed:
        now = max(now, min(summed[:1] + waiting[:1])[0])
        if summed and summed[0][0] <= now:
            now += copy_seconds(tee, summed.pop(0)[1])
        else:
            part = waiting.pop(0)[1]
            now += copy_seconds(tee, part)
            host = max(host, now) + 2 * (workers - 1) / workers * part / rate
            summed.append((host, part))
    return now


def work(variant: str, devices: int, trace: Sequence[Step], operation: str | None) -> float:
    """Return the seconds of this machine's cores that one run of a variant takes."""
    size, hops, each = sum(size for size, _ in trace), 2 * (devices - 1), _MOVE + _AES * _PASSES.get(variant, 4)
    if operation == "copy":
        return size * each + 2 * _COPY
    if variant == names.TEE_SEALED:
        return devices * size * 4 * _AES + hops * size * _SEALED
    return hops * size * each + hops * devices * len(trace) * _COPY


def simulated(
    variant: str, tee: Tee, devices: int, trace: Sequence[Step], operation: str | None, cores: float
) -> float:
    """Return the simulated seconds of one run of a variant; `cores` are those of a host of ringfence."""
    if operation == "copy":
        return sum(2 * copy_seconds(tee, size) for size, _ in trace)
    if variant == names.TEE_SEALED:
        return sealed_seconds(tee, devices, trace, host_rate(cores))
    return ring_seconds(tee, devices, trace)
