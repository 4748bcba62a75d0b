"""Order of streams and the host, for tests/integration/test_accelerator.py: run in a process with the simulated accelerator."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from ringfence.lab import accelerator

LONG = 0.15  # seconds: of a kernel that is still running when the next line is executed
SIZE = 1 << 16


@contextlib.contextmanager
def loaded(**times: float) -> Iterator[None]:
    """The device with these times; afterwards idle and reset."""
    accelerator.load()
    accelerator.configure(**times)  # type: ignore[arg-type]
    try:
        yield
    finally:
        torch.accelerator.synchronize()
        torch.accelerator.synchronize(1)
        accelerator.reset()


def recorded(stream: torch.Stream | None = None, timing: bool = False) -> torch.Event:
    event = torch.Event("sim", enable_timing=timing)
    event.record(stream or torch.accelerator.current_stream())
    return event


# -- each wait that is left out shows in the numbers ----------------------------------------------------------------


def producer(wait: bool) -> float:
    """Another stream reads a tensor that the current one writes."""
    tensor, pinned, side = torch.zeros(SIZE, device="sim"), torch.zeros(SIZE).pin_memory(), torch.Stream("sim")
    torch.accelerator.synchronize()
    accelerator.sleep(LONG)
    tensor.fill_(7)
    if wait:
        side.wait_event(recorded())
    with side:
        pinned.copy_(tensor, non_blocking=True)
    side.synchronize()
    return float(pinned[0])


def consumer(wait: bool) -> float:
    """The current stream reads a tensor that another one writes."""
    tensor, side = torch.zeros(SIZE, device="sim"), torch.Stream("sim")
    torch.accelerator.synchronize()
    with side:
        accelerator.sleep(LONG)
        tensor.fill_(7)
    if wait:
        torch.accelerator.current_stream().wait_event(recorded(side))
    return float(tensor[0])


def host_reads(wait: bool) -> float:
    """The host reads pinned memory that a copy writes."""
    tensor, pinned = torch.full((SIZE,), 7.0, device="sim"), torch.zeros(SIZE).pin_memory()
    accelerator.sleep(LONG)
    pinned.copy_(tensor, non_blocking=True)
    if wait:
        recorded().synchronize()
    return float(pinned[0])


def host_writes(wait: bool) -> float:
    """The host overwrites pinned memory that a copy reads."""
    tensor, pinned = torch.zeros(SIZE, device="sim"), torch.full((SIZE,), 7.0).pin_memory()
    accelerator.sleep(LONG)
    tensor.copy_(pinned, non_blocking=True)
    if wait:
        recorded().synchronize()
    pinned.zero_()
    return float(tensor[0])


def lifetime(wait: bool) -> float:
    """A tensor is freed and its memory is used again while another stream reads it."""
    tensor, pinned, side = torch.full((SIZE,), 7.0, device="sim"), torch.zeros(SIZE).pin_memory(), torch.Stream("sim")
    side.wait_event(recorded())
    with side:
        accelerator.sleep(LONG)
        pinned.copy_(tensor, non_blocking=True)
    if wait:
        tensor.record_stream(side)
    del tensor
    torch.empty(SIZE, device="sim")
    side.synchronize()
    return float(pinned[0])


def other_device(wait: bool) -> float:
    """A stream of another device reads a tensor that the current one writes; a copy between devices waits by itself."""
    tensor = torch.zeros(SIZE, device="sim:0")
    torch.accelerator.synchronize()
    accelerator.sleep(LONG)
    tensor.fill_(7)
    if wait:
        return float(tensor.to("sim:1")[0])
    with torch.Stream("sim:0"):
        return float(tensor.to("sim:1")[0])


ORDER: dict[str, Callable[[bool], float]] = {
    each.__name__: each for each in (producer, consumer, host_reads, host_writes, lifetime, other_device)
}


def ordering(name: str, jitter: float) -> tuple[float, float]:
    """Return what a scenario computes with its wait, and without."""
    with loaded(jitter=jitter):
        return ORDER[name](True), ORDER[name](False)


# -- streams and events ---------------------------------------------------------------------------------------------


def names() -> None:
    with loaded():
        assert torch.accelerator.current_accelerator() == torch.device("sim")
        assert torch.accelerator.device_count() == 2
        assert torch.accelerator.current_device_index() == 0
        with torch.accelerator.device_index(1):
            assert torch.ones(1, device="sim").device == torch.device("sim", 1)
        side = torch.Stream("sim")
        with side:
            assert torch.accelerator.current_stream() == side
        assert torch.accelerator.current_stream() == torch.sim.default_stream()
        seen: list[object] = []
        with torch.Stream("sim:1"), torch.accelerator.device_index(1):
            thread = threading.Thread(
                target=lambda: seen.extend([torch.sim.current_device(), torch.sim.current_stream()])
            )
            thread.start()
            thread.join()
        assert seen == [0, torch.sim.default_stream(0)]  # a new thread begins with the defaults


def later() -> None:
    """A launch returns at once, and its result is there later, in order; whatever operator it is."""
    with loaded():
        tensor = torch.zeros(100, device="sim")
        accelerator.sleep(LONG)
        begin = time.perf_counter()
        tensor.add_(1).mul_(3)
        total = torch.cat([tensor, tensor]).sum()
        event = recorded()
        launched = time.perf_counter() - begin
        assert not event.query()
        assert not torch.accelerator.current_stream().query()
        event.synchronize()
        assert time.perf_counter() - begin > LONG / 2 > launched
        assert event.query()
        assert total.item() == 600
        accelerator.configure(kernel=LONG)
        found = torch.arange(4.0, device="sim").cumsum(0).flip(0)  # computed by the CPU, written in the stream
        assert not recorded().query()
        assert found.tolist() == [6, 3, 1, 0]


def timing() -> None:
    with loaded(kernel=0.02):
        first = recorded(timing=True)
        accelerator.sleep(0.1)
        torch.zeros(8, device="sim")
        last = recorded(timing=True)
        last.synchronize()
        assert 119 < first.elapsed_time(last) < 500


def many_tasks() -> None:
    """Tasks of several streams with random delays, ordered by events only."""
    with loaded(jitter=0.002, seed=3):
        streams = [torch.Stream("sim") for _ in range(4)]
        tensor = torch.zeros(SIZE, device="sim")
        before = recorded()
        for number in range(60):
            stream = streams[number * 7 % 4]
            stream.wait_event(before)
            with stream:
                tensor.mul_(2).add_(number).remainder_(1009)
                before = recorded()
        before.synchronize()
        expected = 0
        for number in range(60):
            expected = (expected * 2 + number) % 1009
        assert tensor.eq(expected).all().item()


def jitter_time(seed: int) -> float:
    """The time of twelve kernels, which the seed determines."""
    with loaded(jitter=0.02, seed=seed):
        tensor = torch.zeros(1, device="sim")
        torch.accelerator.synchronize()
        accelerator.configure(jitter=0.02, seed=seed)
        accelerator.sleep(LONG)
        first = recorded(timing=True)
        for _ in range(12):
            tensor.fill_(1)
        last = recorded(timing=True)
        last.synchronize()
        return float(first.elapsed_time(last))


def capture() -> None:
    with loaded():
        side = torch.Stream("sim")
        with accelerator.capturing(side):
            assert side.is_capturing()
            assert not torch.accelerator.current_stream().is_capturing()
            with side:
                assert torch.accelerator.current_stream().is_capturing()
            with pytest.raises(RuntimeError, match="being captured"):
                side.synchronize()
        assert not side.is_capturing()
