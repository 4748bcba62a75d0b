"""Memory and copies, for lab/tests/integration/test_accelerator.py: run in a process with the simulated accelerator."""

from __future__ import annotations

import contextlib

import pytest
import torch

from lab.tests.integration.accelerator_order import ANY_LAG, SIZE, loaded, recorded, waits_for
from ringfence_lab import accelerator

# -- memory ---------------------------------------------------------------------------------------------------------


def reuse() -> None:
    """The stream of a freed block gets it again at once, another stream does not; it is poisoned in stream order."""
    with loaded():
        poison = torch.empty(SIZE, device="sim")
        assert float(poison[0]) < -1e36
        address = poison.data_ptr()
        with accelerator.hold():
            del poison
            with torch.Stream("sim"):
                assert torch.empty(SIZE, device="sim").data_ptr() != address
            again = torch.empty(SIZE, device="sim")
            assert again.data_ptr() == address
            assert not torch.accelerator.current_stream().query()


def no_growth() -> None:
    """Random sizes on random streams do not grow the reserved memory. Streams are behind by eight tensors."""
    with loaded():
        generator = torch.Generator().manual_seed(5)
        streams = [torch.Stream("sim") for _ in range(3)]
        reserved = []
        for _ in range(3):
            for _ in range(64):
                with contextlib.ExitStack() as held:
                    for stream in (*streams, torch.accelerator.current_stream()):
                        with stream:
                            held.enter_context(accelerator.hold())
                    for size, at, other in torch.randint(0, 1 << 15, (8, 3), generator=generator).tolist():
                        with streams[at % 3]:
                            tensor = torch.zeros(size, device="sim")
                        tensor.record_stream(streams[other % 3])
                        pinned = torch.empty(size).pin_memory()
                        pinned.copy_(tensor, non_blocking=True)
                        del tensor, pinned
                torch.accelerator.synchronize()
            reserved.append((accelerator.stats().device_reserved_bytes[0], accelerator.stats().pinned_bytes))
        assert reserved[2][0] < 1.5 * reserved[0][0] + (1 << 20), reserved
        assert reserved[2][1] < 1.5 * reserved[0][1] + (1 << 20), reserved


def returned() -> None:
    """Cached memory is returned on request, and what is too large is refused."""
    with loaded():
        before = accelerator.stats()
        large = torch.ones(1 << 24, dtype=torch.uint8, device="sim")
        assert accelerator.stats().device_bytes[0] - before.device_bytes[0] == 1 << 24
        assert torch.accelerator.max_memory_allocated() >= 1 << 24
        del large
        assert accelerator.stats().device_reserved_bytes[0] >= 1 << 24
        torch.accelerator.empty_cache()
        after = accelerator.stats()
        assert after.device_bytes == before.device_bytes
        assert after.device_reserved_bytes[0] < 1 << 24
        with pytest.raises(torch.OutOfMemoryError, match="sim:0 is out of memory"):
            torch.empty(1 << 34, dtype=torch.uint8, device="sim")
        assert torch.ones(3, device="sim").sum().item() == 3


def resized() -> None:
    """A storage is freed and made again, as FSDP2 does."""
    with loaded():
        tensor = torch.arange(1000.0, device="sim")
        storage = tensor.untyped_storage()
        before = accelerator.stats().device_bytes[0]
        storage.resize_(0)
        assert accelerator.stats().device_bytes[0] < before
        storage.resize_(4000)
        tensor.copy_(torch.arange(1000.0))
        storage.resize_(8000)
        assert tensor.sum().item() == 499500


def pinned() -> None:
    with loaded():
        source = torch.ones(SIZE, device="sim")
        torch.accelerator.empty_host_cache()
        before = accelerator.stats().pinned_bytes
        memory = torch.empty(SIZE).pin_memory()
        address = memory.data_ptr()
        assert memory.is_pinned()
        assert memory[10:].is_pinned()
        assert not torch.ones(3).is_pinned()
        assert accelerator.stats().pinned_bytes - before == SIZE * 4
        with accelerator.hold():
            memory.copy_(source, non_blocking=True)
            del memory
            other = torch.empty(SIZE, pin_memory=True)
            assert other.data_ptr() != address  # a copy to the first one is still queued
        torch.accelerator.synchronize()
        assert torch.empty(SIZE, pin_memory=True).data_ptr() == address
        del other
        torch.accelerator.empty_host_cache()
        assert accelerator.stats().pinned_bytes == before
        assert accelerator.stats().pinned_peak_bytes >= before + 2 * SIZE * 4


def pageable() -> None:
    """A copy to pageable memory blocks; one from pageable memory takes the values of the time of the call."""
    with loaded():
        tensor, memory = torch.ones(SIZE, device="sim"), torch.zeros(SIZE)
        with accelerator.hold() as kernel:
            assert waits_for(kernel, lambda: memory.copy_(tensor, non_blocking=True))
        assert memory.sum().item() == SIZE
        with accelerator.hold():
            tensor.copy_(memory, non_blocking=True)
            assert not torch.accelerator.current_stream().query()
            memory.zero_()
        assert tensor.sum().item() == SIZE


def confidential() -> None:
    """A copy of pinned memory blocks until its stream is done; not the copies of an idle stream."""
    with loaded():
        tensor, memory, idle = torch.ones(SIZE, device="sim"), torch.zeros(SIZE).pin_memory(), torch.Stream("sim")
        torch.accelerator.synchronize()
        for direction in ("down", "up"):
            accelerator.confidential(True)
            assert not memory.is_pinned()
            target, source = (memory, tensor) if direction == "down" else (tensor, memory)
            with accelerator.hold() as kernel:
                assert waits_for(kernel, lambda: target.copy_(source, non_blocking=True)), direction  # noqa: B023
                assert torch.accelerator.current_stream().query()
            with accelerator.hold() as kernel, idle:
                target.copy_(source, non_blocking=True)  # returns while the other stream is busy
                assert idle.query()
            accelerator.confidential(False)
            assert memory.is_pinned()


# -- copies ---------------------------------------------------------------------------------------------------------


def copy_times(rate: float) -> dict[str, float]:
    """The time of 8 MB in milliseconds: down and up; of two streams in one direction; of two streams in both."""
    size = 8_000_000
    with loaded(down_rate=rate, up_rate=2 * rate, lag=ANY_LAG):
        tensors = [torch.zeros(size, dtype=torch.uint8, device="sim") for _ in range(2)]
        memory = [torch.zeros(size, dtype=torch.uint8).pin_memory() for _ in range(2)]
        streams = [torch.Stream("sim") for _ in range(2)]
        found = {}
        for name, jobs in {"down": "d", "up": "u", "both down": "dd", "down and up": "du"}.items():
            torch.accelerator.synchronize()
            ends = []
            with accelerator.hold():  # until all is queued
                begin = recorded(timing=True)
                for stream, job, tensor, host in zip(streams, jobs, tensors, memory, strict=False):
                    stream.wait_event(begin)
                    with stream:
                        for part in range(0, size, size // 8):
                            there, here = tensor[part : part + size // 8], host[part : part + size // 8]
                            source, target = (there, here) if job == "d" else (here, there)
                            target.copy_(source, non_blocking=True)
                        ends.append(recorded(timing=True))
            for end in ends:
                end.synchronize()
            found[name] = max(begin.elapsed_time(end) for end in ends)
        return found


def counted() -> None:
    with loaded():
        before = accelerator.stats()
        tensor = torch.zeros(1000).to("sim")
        (tensor + 1).cpu()
        torch.arange(3.0, device="sim").cumsum(0)  # what a kernel reads and writes is no copy
        after = accelerator.stats()
        assert (after.copies_up - before.copies_up, after.bytes_up - before.bytes_up) == (1, 4000)
        assert (after.copies_down - before.copies_down, after.bytes_down - before.bytes_down) == (1, 4000)


def conversions() -> None:
    """Copies of other types and layouts; errors of shapes and devices are raised by the call."""
    with loaded():
        values = torch.arange(24.0).view(2, 3, 4)
        device = values.to("sim")
        assert torch.equal(device.permute(2, 0, 1).cpu(), values.permute(2, 0, 1))
        assert torch.equal(device[:, 1:, ::2].contiguous().cpu(), values[:, 1:, ::2])
        assert torch.equal(device.to(torch.bfloat16).cpu(), values.bfloat16())
        assert torch.equal(device.to("cpu", torch.int32), values.int())
        wave = torch.tensor([1 + 2j, 3 - 1j])
        assert torch.equal(wave.to("sim").conj().cpu(), wave.conj())
        assert torch.equal(torch.view_as_real(wave.to("sim")).cpu(), torch.view_as_real(wave))
        out = torch.empty(0, device="sim")
        torch.add(device, device, out=out)
        assert torch.equal(out.cpu(), values * 2)
        assert (torch.ones(3, device="sim") + torch.tensor(2.0)).tolist() == [3, 3, 3]
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            device @ device[0]
        with pytest.raises(RuntimeError, match="same device"):
            device + values
        with pytest.raises(RuntimeError, match="same device"):
            device + device.to("sim:1")


def generators() -> None:
    with loaded():
        torch.manual_seed(5)
        first = torch.randn(100, device="sim").cpu()
        state = torch.sim.get_rng_state()
        second = torch.randn(100, device="sim").cpu()
        assert not torch.equal(first, second)
        torch.sim.set_rng_state(state)
        assert torch.equal(torch.randn(100, device="sim").cpu(), second)
        torch.manual_seed(5)
        assert torch.equal(torch.randn(100, device="sim").cpu(), first)
        own = torch.Generator("sim").manual_seed(9)
        drawn = torch.rand(10, device="sim", generator=own).cpu()
        assert torch.equal(torch.rand(10, device="sim", generator=own.manual_seed(9)).cpu(), drawn)
        with torch.random.fork_rng(devices=[0], device_type="sim"):
            torch.randn(3, device="sim")
        dropout = torch.nn.functional.dropout(torch.ones(1000, device="sim"))
        assert 300 < dropout.count_nonzero().item() < 700
