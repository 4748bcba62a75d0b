"""Memory of staged calls: pinned memory is bounded whatever the tensor's size, and nothing grows with the number of calls."""

from __future__ import annotations

import ctypes
import gc
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ringfence_lab import accelerator
from ringfence_lab.accelerator import Stats
from tests import device
from tests.pool import Pool

pytestmark = pytest.mark.processes

PINNED_LIMIT = 128 << 20  # bytes for each device
LARGE = 512 << 20  # bytes
WORLD = 4
SEED = 14
BOUNDED, FULL = 150, 2_000
WINDOWS = 4  # the first one warms up; the second and the last are compared
EVERY = 5  # calls between two readings
RESIDENT_SLACK = 8 << 20  # bytes: the resident size of a worker of 320 MiB varies by 3 MiB
SETTLE_SECONDS = 200.0  # until memory counts as lost
M_MMAP_THRESHOLD = -3  # malloc.h


# -- large tensors ---------------------------------------------------------------------------------------------------


def all_reduce(where: torch.device, rank: int, count: int) -> bool:
    tensor = torch.full((count,), rank + 1.0, device=where)
    dist.all_reduce(tensor)
    return holds(tensor, 3.0)


def all_gather(where: torch.device, rank: int, count: int) -> bool:
    outputs = [torch.zeros(count // 2, device=where) for _ in range(2)]
    dist.all_gather(outputs, torch.full((count // 2,), rank + 1.0, device=where))
    return holds(outputs[0], 1.0) and holds(outputs[1], 2.0)


def gather(where: torch.device, rank: int, count: int) -> bool:
    outputs = [torch.zeros(count // 2, device=where) for _ in range(2)] if rank == 1 else None
    dist.gather(torch.full((count // 2,), rank + 1.0, device=where), outputs, dst=1)
    return outputs is None or (holds(outputs[0], 1.0) and holds(outputs[1], 2.0))


def send_and_recv(where: torch.device, rank: int, count: int) -> bool:
    if rank:
        dist.send(torch.full((count,), 5.0, device=where), 0)
        return True
    tensor = torch.zeros(count, device=where)
    dist.recv(tensor, 1)
    return holds(tensor, 5.0)


def uneven_all_to_all(where: torch.device, rank: int, count: int) -> bool:
    """Each rank sends a quarter to rank 0 and three quarters to rank 1."""
    quarter = count // 4
    mine = quarter if rank == 0 else 3 * quarter
    output = torch.zeros(2 * mine, device=where)
    given = torch.full((count,), rank + 1.0, device=where)
    dist.all_to_all_single(output, given, [mine, mine], [quarter, 3 * quarter])
    return holds(output[:mine], 1.0) and holds(output[mine:], 2.0)


LARGE_CALLS = (all_reduce, all_gather, gather, send_and_recv, uneven_all_to_all)


def holds(tensor: torch.Tensor, expected: float) -> bool:
    """Return whether all elements have a value. Compares on the device, which pins nothing."""
    return bool((tensor == expected).all().item())


def run_large(name: str) -> tuple[bool, int]:
    """Run a call; return whether its numbers are right on this rank, and the peak of pinned memory since the start."""
    where = device.load()
    (call,) = (each for each in LARGE_CALLS if each.__name__ == name)
    right = call(where, dist.get_rank(), LARGE // 4)
    torch.accelerator.empty_cache()
    return right, accelerator.stats().pinned_peak_bytes


@pytest.mark.parametrize(
    "name",
    [pytest.param(call.__name__, marks=() if call is all_reduce else pytest.mark.nightly) for call in LARGE_CALLS],
)
def test_pinned_memory_is_bounded_for_large_tensors(devices: Pool, name: str) -> None:
    """An uneven all-to-all is one pass, in pageable memory: no rank knows the sizes of all others."""
    for right, pinned in devices.check(run_large, 2, "ringfence", (name,), 120):
        assert right
        assert pinned <= PINNED_LIMIT
        assert pinned or name == uneven_all_to_all.__name__


# -- many calls ------------------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """The memory of this process, between calls."""

    resident: int
    device: int
    reserved: int
    pinned: int


class Call(NamedTuple):
    """A random call, the same on every rank."""

    kind: str
    dtype: torch.dtype
    elements: int  # of each part
    root: int
    stream: int
    mode: str


KINDS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "ring",
)
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8)
COUNTS = (0, 1, 1000, 4096, 70_000, 400_000)
MODES = ("sync", "async", "dropped")


def random_call(choice: random.Random, streams: int) -> Call:
    return Call(
        choice.choice(KINDS),
        choice.choice(TYPES),
        choice.choice(COUNTS),
        choice.randrange(WORLD),
        choice.randrange(streams),
        choice.choice(MODES),
    )


def submit(call: Call, rank: int, where: torch.device) -> tuple[Sequence[Any], list[torch.Tensor], list[int]]:
    """Begin a call; return its Works, its results on this rank, and the value that each result must hold."""

    def full(value: int) -> torch.Tensor:
        return torch.full((call.elements,), value, dtype=call.dtype, device=where)

    everyone = list(range(WORLD))
    total, begin = WORLD * (WORLD + 1) // 2, {"async_op": True}
    match call.kind:
        case "all_reduce":
            one = full(rank + 1)
            return [dist.all_reduce(one, **begin)], [one], [total]
        case "broadcast":
            one = full(rank + 1)
            return [dist.broadcast(one, call.root, **begin)], [one], [call.root + 1]
        case "reduce":
            one = full(rank + 1)
            return [dist.reduce(one, call.root, **begin)], [one] * (rank == call.root), [total]
        case "all_gather":
            outputs = [full(0) for _ in everyone]
            return [dist.all_gather(outputs, full(rank + 1), **begin)], outputs, [each + 1 for each in everyone]
        case "reduce_scatter":
            one = full(0)
            return [dist.reduce_scatter(one, [full(rank + 1) for _ in everyone], **begin)], [one], [total]
        case "gather":
            outputs = [full(0) for _ in everyone] if rank == call.root else []
            work = dist.gather(full(rank + 1), outputs or None, call.root, **begin)
            return [work], outputs, [each + 1 for each in everyone]
        case "scatter":
            one, inputs = full(0), [full(each + 1) for each in everyone] if rank == call.root else None
            return [dist.scatter(one, inputs, call.root, **begin)], [one], [rank + 1]
        case "all_to_all":
            one = torch.full((call.elements * (rank + 1) * WORLD,), 0, dtype=call.dtype, device=where)
            given = torch.full((call.elements * total,), call.root, dtype=call.dtype, device=where)
            taken = [call.elements * (rank + 1)] * WORLD
            work = dist.all_to_all_single(one, given, taken, [call.elements * (each + 1) for each in everyone], **begin)
            return [work], [one], [call.root]
        case _:
            one, before, after = full(0), (rank - 1) % WORLD, (rank + 1) % WORLD
            return [dist.irecv(one, before), dist.isend(full(rank + 1), after)], [one], [before + 1]


def play(seed: int, count: int) -> tuple[list[str], list[Reading], list[Reading]]:
    """Run random calls on random streams; return the wrong ones and the readings of the second and the last window."""
    where = device.load()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)  # larger blocks go back to the system when they are freed
    choice = random.Random(seed)
    streams = [torch.accelerator.current_stream(), torch.Stream(where), torch.Stream(where)]
    wrong: list[str] = []
    readings: list[Reading] = []
    dist.all_reduce(torch.zeros(PINNED_LIMIT // 2, device=where))  # uses every pinned slot
    for number in range(count):
        call = random_call(choice, len(streams))
        with streams[call.stream]:
            if not is_right(call, where):
                wrong.append(f"{number}: {call}")
        if number % EVERY == EVERY - 1:
            readings.append(settled())
    each = len(readings) // WINDOWS
    return wrong, readings[each : 2 * each], readings[-each:]


def is_right(call: Call, where: torch.device) -> bool:
    """Run a call; return whether its numbers are right, or True at once if its Works and tensors are dropped."""
    works, results, expected = submit(call, dist.get_rank(), where)
    if call.mode == "dropped":
        return True
    for work in works:
        work.wait()
    if call.mode == "sync":
        return all(bool((each == value).all().item()) for each, value in zip(results, expected, strict=False))
    later = [(each == value).all() for each, value in zip(results, expected, strict=False)]
    del works, work, results  # kernels still read the results
    return all(bool(each.item()) for each in later)


def settled() -> Reading:
    """Read the memory once all calls have ended and the allocators have released what they can."""
    dist.barrier()
    wait_until(lambda: (torch.accelerator.synchronize(), accelerator.stats().device_bytes)[1] == (0, 0))
    torch.accelerator.empty_cache()  # it grows with every new combination of sizes and streams
    ctypes.CDLL(None).malloc_trim(0)
    found: Stats = accelerator.stats()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return Reading(resident, sum(found.device_bytes), sum(found.device_reserved_bytes), found.pinned_bytes)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for at most SETTLE_SECONDS; the device thread drops references after its copies have ended."""
    deadline, pause = time.monotonic() + SETTLE_SECONDS, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "calls that have ended still hold memory of the device"
        gc.collect()
        pause.wait(1e-3)


def growth_of(early: Sequence[int], late: Sequence[int]) -> int:
    return int(statistics.median(late) - statistics.median(early))


@pytest.mark.nightly
@pytest.mark.long
def test_random_collectives_leave_no_memory_behind(devices: Pool, full: bool) -> None:
    count = FULL if full else BOUNDED
    played = devices.check(play, WORLD, "ringfence", (SEED, count), 280)
    assert [wrong for wrong, _, _ in played] == [[]] * WORLD
    growth = [Reading(*map(growth_of, zip(*early, strict=True), zip(*late, strict=True))) for _, early, late in played]
    print(f"{count} random collectives on {WORLD} workers, growth of medians in bytes: {growth}")
    assert all(each.resident <= RESIDENT_SLACK for each in growth)
    assert all(each.device == 0 for each in growth)
    assert all(each.reserved <= 0 for each in growth)
    assert all(each.pinned <= 0 for each in growth)
