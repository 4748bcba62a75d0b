"""The lower bound of a sealed collective's CPU time: the cost of each stage on one core, times the bytes that it handles."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ringfence.keys import IV_BYTES, KEY_BYTES, SEGMENT_BYTES, TAG_BYTES
from ringfence_lab.bench import machine
from ringfence_lab.bench.byte_counts import stage_bytes
from ringfence_lab.bench.measure import Setup
from ringfence_lab.bench.samples import Case, Samples

_SECONDS: Final = 0.1  # for each stage
_ROTATING: Final = 16  # buffers: more than the caches next to a core hold, as in a collective
_SOCKET_BUFFER: Final = 4 * SEGMENT_BYTES


def recorded_costs(setup: Setup, facts: Mapping[str, Any]) -> dict[str, float]:
    """Return the costs of the stages on this machine and with this code. They are measured once and kept with the samples."""
    case = {"kind": "lower_bound", "machine": machine.digest(facts)}
    samples = Samples(setup.results)
    if not samples.rounds(case):
        samples.begin(facts, setup.command, machine.now())
        samples.add(case, {stage: {"ns_per_byte": cost} for stage, cost in stage_costs().items()})
    return {stage: sample["ns_per_byte"] for stage, sample in samples.rounds(case)[0].items()}


def recorded_lower_bound(setup: Setup, facts: Mapping[str, Any], case: Case, costs: dict[str, float]) -> float:
    """Return the lower bound of a case. It is kept with the samples, because another version may have other schedules."""
    place = {name: case[name] for name in ("operation", "size", "workers")}
    kept = {"kind": "lower_bound", **place, "machine": machine.digest(facts)}
    samples = Samples(setup.results)
    if not samples.rounds(kept):
        seconds = lower_bound(case["operation"], case["size"], case["workers"], costs)
        samples.add(kept, {"lower_bound": {"cpu_seconds": seconds}})
    found: float = samples.rounds(kept)[0]["lower_bound"]["cpu_seconds"]
    return found


def stage_costs() -> dict[str, float]:
    """Measure the CPU nanoseconds per byte of each stage, in segments of the largest size."""
    torch.set_num_threads(1)
    plain = [memoryview(bytearray(SEGMENT_BYTES)) for _ in range(_ROTATING)]
    sealed = [memoryview(bytearray(SEGMENT_BYTES + TAG_BYTES)) for _ in range(_ROTATING)]
    cipher, nonce = AESGCM(bytes(KEY_BYTES)), bytes(IV_BYTES)
    for source, target in zip(plain, sealed, strict=True):
        cipher.encrypt_into(nonce, source, None, target)
    sums = [torch.zeros(SEGMENT_BYTES // 4) for _ in range(_ROTATING)]
    addend = torch.zeros(SEGMENT_BYTES // 4)
    costs = {
        "open": _per_byte(lambda i: cipher.decrypt_into(nonce, sealed[i], None, plain[i])),
        "seal": _per_byte(lambda i: cipher.encrypt_into(nonce, plain[i], None, sealed[i])),
        "reduce": _per_byte(lambda i: torch.add(sums[i], addend, out=sums[i])),
    }
    return {**costs, **_socket_costs(plain, sealed)}


def _per_byte(work: Callable[[int], object]) -> float:
    rounds, spent = 0, 0
    while spent < _SECONDS * 1e9:
        start = time.thread_time_ns()
        for index in range(_ROTATING):
            work(index)
        spent += time.thread_time_ns() - start
        rounds += 1
    return spent / rounds / _ROTATING / SEGMENT_BYTES


def _socket_costs(sources: list[memoryview], targets: list[memoryview]) -> dict[str, float]:
    """One thread writes a segment and then reads it, so that no second core is needed to measure each."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        forth = socket.create_connection(listener.getsockname())
        back, _ = listener.accept()
    spent = {"send": 0, "receive": 0}
    moved = 0
    with forth, back:
        forth.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        back.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
        while sum(spent.values()) < 2 * _SECONDS * 1e9:
            for source, target in zip(sources, targets, strict=True):
                start = time.thread_time_ns()
                count = forth.send(source[: SEGMENT_BYTES // 2])
                middle = time.thread_time_ns()
                got = 0
                while got < count:
                    got += back.recv_into(target[got:count])
                spent["send"] += middle - start
                spent["receive"] += time.thread_time_ns() - middle
                moved += count
    return {stage: nanoseconds / moved for stage, nanoseconds in spent.items()}


def lower_bound(operation: str, size: int, ranks: int, costs: dict[str, float]) -> float:
    """Return the least CPU seconds, over all ranks, with which these schedules can be implemented."""
    return sum(costs[stage] * count for stage, count in stage_bytes(operation, size, ranks).items()) / 1e9
