"""Order of streams and the host, for lab/tests/integration/test_accelerator.py: run in a process with the simulated device.

No duration decides: a kernel runs until the scenario releases it, and the device's clock measures what is queued behind it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from ringfence_lab import accelerator
from ringfence_lab.accelerator import HeldKernel

SIZE = 1 << 16
ANY_LAG = 600.0  # seconds: the device's clock stays on time on any machine
NEVER = 600.0  # seconds of a kernel or a copy that does not end within a test


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


def release_late(kernel: HeldKernel) -> None:
    """Release a kernel after several round trips on other streams: what does not wait for it has been executed by then."""
    for _ in range(20):
        with torch.Stream("sim") as other:
            torch.zeros(SIZE, device="sim")
            other.synchronize()
    kernel.release()


def waits_for(kernel: HeldKernel, call: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> bool:
    """Return whether a call returns only after a kernel was released, which happens once a thread of the host waits.

    `meanwhile` is called by another thread while the call waits.
    """
    returned, before = threading.Event(), accelerator.stats().host_waits

    def release_when_waited_for() -> None:
        while not returned.wait(1e-3):
            if accelerator.stats().host_waits > before:
                meanwhile()
                release_late(kernel)
                return

    thread = threading.Thread(target=release_when_waited_for)
    thread.start()
    call()
    released = kernel.released
    returned.set()
    thread.join()
    return released


# -- each wait that is left out shows in the numbers ----------------------------------------------------------------


def producer(wait: bool) -> float:
    """Another stream reads a tensor that the current one writes."""
    tensor, pinned, side = torch.zeros(SIZE, device="sim"), torch.zeros(SIZE).pin_memory(), torch.Stream("sim")
    torch.accelerator.synchronize()
    with accelerator.hold() as kernel:
        tensor.fill_(7)
        if wait:
            side.wait_event(recorded())
        with side:
            pinned.copy_(tensor, non_blocking=True)
        if wait:
            release_late(kernel)
        side.synchronize()
        return float(pinned[0])


def consumer(wait: bool) -> float:
    """The current stream reads a tensor that another one writes."""
    tensor, pinned, side = torch.zeros(SIZE, device="sim"), torch.zeros(SIZE).pin_memory(), torch.Stream("sim")
    torch.accelerator.synchronize()
    with side:
        kernel = accelerator.hold()
        tensor.fill_(7)
    with kernel:
        if wait:
            torch.accelerator.current_stream().wait_event(recorded(side))
        pinned.copy_(tensor, non_blocking=True)
        if wait:
            release_late(kernel)
        torch.accelerator.current_stream().synchronize()
        return float(pinned[0])


def host_reads(wait: bool) -> float:
    """The host reads pinned memory that a copy writes."""
    tensor, pinned = torch.full((SIZE,), 7.0, device="sim"), torch.zeros(SIZE).pin_memory()
    with accelerator.hold() as kernel:
        pinned.copy_(tensor, non_blocking=True)
        if wait:
            assert waits_for(kernel, recorded().synchronize)
        return float(pinned[0])


def host_writes(wait: bool) -> float:
    """The host overwrites pinned memory that a copy reads."""
    tensor, pinned = torch.zeros(SIZE, device="sim"), torch.full((SIZE,), 7.0).pin_memory()
    with accelerator.hold() as kernel:
        tensor.copy_(pinned, non_blocking=True)
        if wait:
            assert waits_for(kernel, recorded().synchronize)
        pinned.zero_()
    return float(tensor[0])


def lifetime(wait: bool) -> float:
    """A tensor is freed and its memory is used again while another stream reads it."""
    tensor, pinned, side = torch.full((SIZE,), 7.0, device="sim"), torch.zeros(SIZE).pin_memory(), torch.Stream("sim")
    side.wait_event(recorded())
    with side:
        kernel = accelerator.hold()
        pinned.copy_(tensor, non_blocking=True)
    with kernel:
        if wait:
            tensor.record_stream(side)
        del tensor
        torch.empty(SIZE, device="sim")
        torch.accelerator.current_stream().synchronize()  # the memory that was allocated is overwritten
    side.synchronize()
    return float(pinned[0])


def other_device(wait: bool) -> float:
    """A stream of another device reads a tensor that the current one writes; a copy between devices waits by itself."""
    tensor, pinned = torch.zeros(SIZE, device="sim:0"), torch.zeros(SIZE).pin_memory()
    torch.accelerator.synchronize()
    with accelerator.hold() as kernel, contextlib.ExitStack() as stack:
        tensor.fill_(7)
        if not wait:
            stack.enter_context(torch.Stream("sim:0"))
        pinned.copy_(tensor.to("sim:1"), non_blocking=True)
        if wait:
            release_late(kernel)
        torch.accelerator.current_stream(1).synchronize()
        return float(pinned[0])


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
    """A launch returns while earlier work runs, and its result is there later, in order; whatever operator it is."""
    with loaded():
        tensor = torch.zeros(100, device="sim")
        with accelerator.hold():
            tensor.add_(1).mul_(3)
            total = torch.cat([tensor, tensor]).sum()
            event = recorded()
            assert not event.query()
            assert not torch.accelerator.current_stream().query()
        event.synchronize()
        assert event.query()
        assert total.item() == 600
        found = torch.arange(4.0, device="sim").cumsum(0).flip(0)  # computed by the CPU, written in the stream
        assert found.tolist() == [6, 3, 1, 0]


def later_though_computed_by_the_cpu() -> None:
    """The result of an operator that the CPU computes is written in the stream. Leaves a kernel that does not end."""
    accelerator.load()
    tensor = torch.arange(4.0, device="sim")
    torch.accelerator.synchronize()
    accelerator.configure(kernel=NEVER)
    tensor.cumsum(0)
    assert not recorded().query()


def timing() -> None:
    with loaded(kernel=0.02, lag=ANY_LAG):
        with accelerator.hold():
            first = recorded(timing=True)
            accelerator.sleep(0.1)
            torch.zeros(8, device="sim")
            last = recorded(timing=True)
        last.synchronize()
        assert first.elapsed_time(last) == pytest.approx(120, abs=0.001)


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
    """The time of twelve kernels in milliseconds, which the seed determines."""
    with loaded(lag=ANY_LAG):
        tensor = torch.zeros(1, device="sim")
        torch.accelerator.synchronize()
        accelerator.configure(jitter=0.02, seed=seed, lag=ANY_LAG)
        with accelerator.hold():
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
