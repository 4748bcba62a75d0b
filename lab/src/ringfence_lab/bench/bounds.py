"""What the stages of a sealed collective cost, and the least time that follows for a collective of this machine's cores.

A stage is measured through the call that the data plane makes for it, a segment at a time over a tensor of 25 MiB, in one
process and then on every core at once. The bound is the CPU time of what the schedules make all workers do, over the cores
that they can use: nobody waits, nothing but the stages runs, and what one stage has written is in the cache for the next.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from ringfence.cli.terminal import table
from ringfence.collectives.counts import count
from ringfence.collectives.schedule import Collective
from ringfence.keys import KEY_BYTES, SEGMENT_BYTES, TAG_BYTES, Secret
from ringfence.link.frames import HEADER_BYTES
from ringfence.link.seal import Opener, Sealer
from ringfence.machines import spread
from ringfence_lab.bench.units import size_text, time_text

STAGES: Final = ("seal", "open", "send", "receive", "add", "copy")
OPERATIONS: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
_SIZE: Final = 25 << 20  # of the collectives whose bounds are printed
_TENSOR: Final = 100 * SEGMENT_BYTES
_HIDES_VAES: Final = {"OPENSSL_ia32cap": ":~0x60000000000"}  # VAES and vector PCLMULQDQ: bits 9 and 10 of ECX, leaf 7


class Layout(NamedTuple):
    """So many machines with so many workers each."""

    machines: int
    workers: int

    def __str__(self) -> str:
        return f"{self.machines} x {self.workers}"


LAYOUTS: Final = (Layout(2, 1), Layout(4, 1), Layout(2, 2), Layout(2, 4), Layout(1, 4))


# -- stages -------------------------------------------------------------------------------------------------------------


def measure(vaes: bool = True, seconds: float = 1.5) -> dict[str, dict[str, float]]:
    """Return nanoseconds of CPU time for a byte by stage: of one process `alone`, and with all cores `busy`."""
    cores = len(os.sched_getaffinity(0))
    with _environment({} if vaes else _HIDES_VAES):
        return {name: _measured(processes, seconds) for name, processes in (("alone", 1), ("busy", cores))}


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes that start meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _measured(processes: int, seconds: float) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(processes)
    with ProcessPoolExecutor(processes, context, _together, (start,)) as pool:
        found = list(pool.map(_stages, [seconds] * processes))
    return {name: sum(each[name] for each in found) / processes for name in STAGES}


_start: Any = None  # in a process of the pool: the barrier


def _together(start: Any) -> None:
    global _start
    _start = start


def _stages(seconds: float) -> dict[str, float]:
    """Return nanoseconds a byte by stage, measured while the other processes of the pool measure too."""
    import torch

    tensor, other = torch.ones(_TENSOR // 4), torch.ones(_TENSOR // 4)
    torch.set_num_threads(1)
    memory = memoryview(tensor.numpy()).cast("B")
    parts = [memory[at : at + SEGMENT_BYTES] for at in range(0, _TENSOR, SEGMENT_BYTES)]
    sums = list(zip(tensor.split(SEGMENT_BYTES // 4), other.split(SEGMENT_BYTES // 4), strict=True))
    frame = memoryview(bytearray(SEGMENT_BYTES + TAG_BYTES))
    plain, header = frame[:SEGMENT_BYTES], bytes(HEADER_BYTES)
    secret = os.urandom(KEY_BYTES)
    sealer, opener = Sealer(Secret(secret)), Opener(Secret(secret))
    far, near = _connection()
    with far, near:
        return _timed(
            {
                "seal": lambda turn: sealer.seal_into(header, parts[turn], frame),
                "send": lambda turn: far.sendall(plain),
                "receive": lambda turn: _receive(near, plain),
                "open": lambda turn: opener.open_into(header, frame, parts[turn]),
                "add": lambda turn: torch.add(*sums[turn], out=sums[turn][0]),
                "copy": lambda turn: plain.__setitem__(slice(None), parts[turn]),
            },
            seconds,
        )


def _connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    for end in (far, near):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * SEGMENT_BYTES)
    return far, near


def _receive(near: socket.socket, target: memoryview) -> None:
    have = 0
    while have < len(target):
        have += near.recv_into(target[have:])


def _timed(stages: Mapping[str, Callable[[int], object]], seconds: float) -> dict[str, float]:
    """Run the stages in turns; return this thread's CPU nanoseconds for a byte. What was sent is received and opened."""
    spent, turns = dict.fromkeys(stages, 0), 0
    _start.wait()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, stage in stages.items():
            before = time.thread_time_ns()
            stage(turns % (_TENSOR // SEGMENT_BYTES))
            spent[name] += time.thread_time_ns() - before
        turns += 1
    return {name: spent[name] / turns / SEGMENT_BYTES for name in STAGES}


# -- bounds -------------------------------------------------------------------------------------------------------------


class Bound(NamedTuple):
    operation: str
    layout: Layout
    seconds: float
    shares: dict[str, float]  # of its CPU time, by stage


def bound(operation: str, layout: Layout, size: int, costs: Mapping[str, float], cores: int) -> Bound:
    """Return the least seconds of a collective of `size` bytes, if stages cost so many nanoseconds a byte."""
    workers = layout.machines * layout.workers
    machines = spread(rank // layout.workers for rank in range(workers))
    spent = dict.fromkeys(STAGES, 0.0)
    for rank in range(workers):
        found = count(Collective[operation.upper()], workers, size, machines=machines, rank=rank)
        moved = (found.encrypted, found.opened, found.wire, found.opened, found.reduced, found.local + found.copied)
        for name, bytes_ in zip(STAGES, moved, strict=True):
            spent[name] += bytes_ * costs[name] / 1e9
    whole = sum(spent.values())
    return Bound(operation, layout, whole / min(workers, cores), {name: each / whole for name, each in spent.items()})


def document(vaes: bool = True) -> dict[str, Any]:
    """Measure the stages, and return them with the bounds of all collectives."""
    costs, cores = measure(vaes), len(os.sched_getaffinity(0))
    found = [bound(operation, layout, _SIZE, costs["busy"], cores) for layout in LAYOUTS for operation in OPERATIONS]
    bounds = [{**each._asdict(), "layout": str(each.layout)} for each in found]
    return {"size": _SIZE, "segment": SEGMENT_BYTES, "vaes": vaes, "stages": costs, "bounds": bounds}


def results_text(found: Mapping[str, Any]) -> str:
    """Return the results as text for a terminal."""
    costs = found["stages"]
    stages = [(name, f"{costs['alone'][name]:.3f}", f"{costs['busy'][name]:.3f}") for name in STAGES]
    bounds = [
        (
            each["layout"],
            each["operation"],
            time_text(each["seconds"]),
            *(f"{each['shares'][name]:.0%}" for name in STAGES),
        )
        for each in found["bounds"]
    ]
    return (
        f"{table([('ns a byte', 'alone', 'all cores busy'), *stages])}\n"
        f"{table([('machines', size_text(found['size']), 'at least', *STAGES), *bounds])}"
    )
