"""Copies of a simulated GPU TEE, for lab/tests/integration/test_accelerator_tee.py: run in a process with four devices."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from lab.tests.integration.accelerator_order import ANY_LAG, NEVER, waits_for
from ringfence_lab import accelerator
from ringfence_lab.accelerator import Tee

MIB = 1 << 20
# Rates far above those of this machine, dilated by a hundred.
TEE = Tee(
    copy_overhead=30e-6,
    plain_overhead=10e-6,
    cpu_rate=40e9,
    cpu_threads=8,
    engines=1,
    link_rate=100e9,
    device_rate=80e9,
    authentication_rate=20e9,
    authentication_parts=4,
    piece_bytes=MIB // 8,
    peer_rate=200e9,
    peer_overhead=5e-6,
    dilation=100,
)
SWITCHES = [
    dict(zip(("parallel_authentication", "overlap"), on, strict=True))
    for on in itertools.product([False, True], repeat=2)
]
WAYS = ("host to device", "device to host", "device to device", "direct")


@contextlib.contextmanager
def simulated(tee: Tee | None) -> Iterator[None]:
    """Four devices that copy like this; afterwards idle and reset."""
    accelerator.load(4)
    accelerator.configure(lag=ANY_LAG)
    accelerator.simulate_tee(tee)
    try:
        yield
        synchronize()
    finally:
        accelerator.reset()


def synchronize() -> None:
    for index in range(4):
        torch.accelerator.synchronize(index)


def device(index: int, size: int = MIB) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=f"sim:{index}")


def between(*pairs: tuple[int, int], size: int = MIB) -> float:
    """Return the seconds of the devices' clock in which copies between these devices are done that begin at once.

    Each has a stream of its own at both ends.
    """
    tensors = [(device(source, size), device(target, size)) for source, target in pairs]
    places = [(torch.Stream(f"sim:{a}"), torch.Stream(f"sim:{b}")) for a, b in pairs]
    synchronize()
    begin, ends = torch.Event("sim", enable_timing=True), []
    with accelerator.hold():
        begin.record()
        for (source, target), (reader, writer) in zip(tensors, places, strict=True):
            reader.wait_event(begin)
            writer.wait_event(begin)
            with reader, writer:
                target.copy_(source)
            ends.append(torch.Event("sim", enable_timing=True))
            ends[-1].record(writer)
    for end in ends:
        end.synchronize()
    return max(begin.elapsed_time(end) for end in ends) / 1e3


def to_host(size: int = MIB) -> tuple[float, float]:
    """Return the seconds of a copy to the host and of one to the device, on the devices' clock.

    The host waits for such copies. So another thread records their end, before the kernel ends that they follow.
    """
    there, here = device(0, size), torch.zeros(size, dtype=torch.uint8).pin_memory()
    synchronize()
    found, stream = [], torch.accelerator.current_stream()
    for target, source in ((here, there), (there, here)):
        begin, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
        with accelerator.hold() as kernel:
            begin.record()
            assert waits_for(kernel, lambda: target.copy_(source), lambda: end.record(stream))  # noqa: B023
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return found[0], found[1]


# -- what is expected -----------------------------------------------------------------------------------------------


def stages(tee: Tee, size: int) -> dict[str, tuple[float, float]]:
    """How long each stage takes for all bytes and for one piece."""
    rates = {"cpu": tee.cpu_rate, "link": tee.link_rate, "cipher": tee.device_rate, "tag": tee.authentication_rate}
    piece = min(size, tee.piece_bytes)
    found = {name: (size / rate, piece / rate) if rate else (0.0, 0.0) for name, rate in rates.items()}
    if tee.parallel_authentication:
        parts = min(tee.authentication_parts, math.ceil(size / tee.piece_bytes))
        found["tag"] = (found["tag"][0] / parts, found["tag"][1])
    return found


def total(tee: Tee, names: str, size: int) -> float:
    """The sum of stages; with overlap the longest one, and the time of a piece in the others."""
    found = [stages(tee, size)[name] for name in names.split()]
    if not tee.overlap:
        return sum(whole for whole, _ in found)
    return max(whole - piece for whole, piece in found) + sum(piece for _, piece in found)


def expected(tee: Tee, way: str, size: int = MIB) -> float:
    sealed = tee.copy_overhead + total(tee, "cpu link tag cipher", size)
    seconds = {
        "host to device": sealed if tee.confidential else tee.plain_overhead + size / tee.link_rate,
        "device to host": sealed if tee.confidential else tee.plain_overhead + size / tee.link_rate,
        "device to device": 2 * sealed if tee.confidential else tee.peer_overhead + size / tee.peer_rate,
        "direct": tee.copy_overhead + total(tee, "cipher tag link link tag cipher", size),
    }
    return seconds[way] * tee.dilation


# -- time -----------------------------------------------------------------------------------------------------------


def copies_between_devices() -> None:
    variants = [TEE.with_values(direct=direct, **on) for on in SWITCHES for direct in (False, True)]
    found = {}
    for tee in [TEE.with_values(confidential=False), *variants]:
        with simulated(tee):
            way = "direct" if tee.direct else "device to device"
            for size in (1000, MIB + 1):
                found[tee, size] = between((0, 1), size=size)
                assert found[tee, size] == pytest.approx(expected(tee, way, size), abs=2e-6), (tee, size)
    assert len({round(seconds, 6) for (_, size), seconds in found.items() if size > MIB}) == 9  # each switch counts


def copies_of_the_host() -> None:
    for tee in [TEE.with_values(confidential=False), TEE, *(TEE.with_values(**on) for on in SWITCHES[1:])]:
        with simulated(tee):
            for seconds, way in zip(to_host(), ("device to host", "host to device"), strict=True):
                assert seconds == pytest.approx(expected(tee, way), abs=2e-6), (tee, way)


def contention() -> None:
    """Copies wait for driver threads of the machine, and for copy engines of a device; not for those of other devices."""
    cpu = TEE.with_values(copy_overhead=0, link_rate=1e18, device_rate=0, authentication_rate=0)
    one = 2 * MIB / cpu.cpu_rate * cpu.dilation  # decryption and encryption by the host
    for threads, times in ((1, 2), (2, 1)):
        with simulated(cpu.with_values(cpu_threads=threads)):
            assert between((0, 1), (2, 3)) == pytest.approx(times * one, abs=2e-6)
    with simulated(TEE):
        assert between((0, 1), (2, 3)) == pytest.approx(expected(TEE, "device to device"), abs=2e-6)
    direct = TEE.with_values(direct=True)
    before_link = (TEE.copy_overhead + total(TEE, "cipher tag", MIB)) * TEE.dilation
    on_link = total(TEE, "link", MIB) * TEE.dilation
    for engines, waits in ((1, before_link + on_link), (2, on_link)):  # two engines share the link
        with simulated(direct.with_values(engines=engines)):
            assert between((0, 1), (0, 2)) == pytest.approx(expected(direct, "direct") + waits, abs=2e-6)
    with simulated(TEE.with_values(confidential=False)):
        once = expected(TEE.with_values(confidential=False), "device to device")
        assert between((0, 1), (0, 2)) == pytest.approx(2 * once, abs=2e-6)
        assert between((0, 2), (1, 2)) == pytest.approx(2 * once, abs=2e-6)
        assert between((0, 1), (1, 0)) == pytest.approx(once, abs=2e-6)  # a link for each direction


def dilation() -> None:
    """Twice the factor takes twice the time, so ratios do not depend on it."""
    found = {}
    for factor in (60, 120):
        for sealed in (False, True):
            with simulated(TEE.with_values(dilation=factor, confidential=sealed)):
                found[factor, sealed] = between((0, 1))
    for sealed in (False, True):
        assert found[120, sealed] == pytest.approx(2 * found[60, sealed], abs=2e-6)


def a_gap_before_a_reservation_is_used() -> None:
    """The driver thread that one copy needs after ten minutes serves another one before. Leaves a copy that does not end."""
    accelerator.load(4)
    accelerator.simulate_tee(TEE.with_values(cpu_threads=1, device_rate=MIB * TEE.dilation / NEVER))
    source, target, other = device(0), device(1), device(2, 1000)
    synchronize()
    copies, end = accelerator.stats().sealed_copies, torch.Event("sim:1")
    target.copy_(source)
    end.record(torch.accelerator.current_stream(1))
    while accelerator.stats().sealed_copies == copies:  # until it has begun
        os.sched_yield()
    other.copy_(torch.zeros(1000, dtype=torch.uint8))  # the host waits for it
    assert torch.accelerator.current_stream(2).query()
    assert not end.query()


def slow_machine() -> None:
    """What takes longer than its simulated time is late: the devices' clock shows that and simulated time."""
    free = {"cpu_rate": 1e18, "link_rate": 1e18, "device_rate": 0, "authentication_rate": 0}
    with simulated(TEE.with_values(copy_overhead=1e-6, dilation=1, **free)):
        accelerator.configure()  # with the lag of the TEE
        source, target = device(0, 64 * MIB), device(1, 64 * MIB)
        synchronize()
        before = accelerator.stats()
        begin, end = (torch.Event("sim:0", enable_timing=True) for _ in range(2))
        with accelerator.hold():
            begin.record()
            for _ in range(6):
                target.copy_(source)
            end.record()
        end.synchronize()
        after = accelerator.stats()
        late, took = after.late_seconds - before.late_seconds, begin.elapsed_time(end) / 1e3
        assert late > 0
        assert took == pytest.approx(late + 12e-6, abs=2e-6)
        assert after.crypto_seconds - before.crypto_seconds > 6 * 4 * 64 * MIB / 1e11


# -- data -----------------------------------------------------------------------------------------------------------


sent_with: dict[str, bool] = {}  # switches of the copies that `sent` makes


def sent(way: str, values: torch.Tensor) -> torch.Tensor:
    """Copy values and return them from where they arrive."""
    accelerator.simulate_tee(None)  # what is copied to begin and to end with is not part of it
    there = values.to("sim:0")
    target = torch.empty_like(there, device="sim:1")
    here = torch.empty_like(values).pin_memory()
    synchronize()
    accelerator.simulate_tee(TEE.with_values(dilation=1, direct=way == "direct", **sent_with))
    if way == "host to device":
        target.copy_(values)
    elif way == "device to host":
        here.copy_(there)
    else:
        target.copy_(there)
    try:
        synchronize()
    finally:
        accelerator.simulate_tee(None)
    return here if way == "device to host" else target.cpu()


def data() -> None:
    with simulated(None):
        for way, switches in itertools.product(WAYS, SWITCHES):
            sent_with.update(switches)
            for size in (1, 15, MIB // 8 - 1, MIB // 8, MIB // 8 + 1, MIB + 5):
                values = torch.randint(0, 256, (size,), dtype=torch.uint8)
                before = accelerator.stats()
                assert torch.equal(sent(way, values), values), (way, switches, size)
                after = accelerator.stats()
                legs = 2 if way == "device to device" else 1
                assert after.sealed_copies - before.sealed_copies == legs
                assert after.sealed_bytes - before.sealed_bytes == legs * size


def views() -> None:
    """Other types and layouts at either end."""
    values = torch.arange(48.0).view(6, 8)
    wave = torch.tensor([1 + 2j, 3 - 1j])
    for direct in (False, True):
        with simulated(TEE.with_values(dilation=1, direct=direct)):
            there = values.to("sim:0")
            assert torch.equal(there.t().cpu(), values.t())
            assert torch.equal(there[:, ::2].to("sim:1").cpu(), values[:, ::2])
            assert torch.equal(there.to("sim:1", torch.bfloat16).cpu(), values.bfloat16())
            assert torch.equal(there.to("cpu", torch.int32), values.int())
            target = torch.zeros(8, 6, device="sim:1")
            target.t().copy_(there)
            assert torch.equal(target.cpu(), values.t())
            target[:3].copy_(values[0, :6])
            assert torch.equal(target[:3].cpu(), values[0, :6].expand(3, 6))
            assert torch.equal(wave.to("sim:0").conj().to("sim:1").cpu(), wave.conj())


def ciphertext() -> None:
    """A bounce buffer holds the plaintext nowhere, and never the same ciphertext twice."""
    values = torch.arange(MIB // 32)
    with simulated(None):
        for way, switches in itertools.product(WAYS, SWITCHES):
            sent_with.update(switches)
            buffers = []
            for _ in range(2):
                sent(way, values.view(torch.uint8))
                buffers.append(accelerator.bounce_buffer())
            pieces = 2 if switches["parallel_authentication"] else 1
            assert {len(buffer) for buffer in buffers} == {MIB // 4 + 16 * pieces}
            for buffer in buffers:
                words = buffer[: MIB // 4].view(torch.int64)
                assert len(words.unique()) == len(words)  # as good as certain for random bits
                assert not torch.isin(words, values).any()
            assert (buffers[0] == buffers[1]).float().mean().item() < 0.01


def nonces_count_up() -> None:
    """Under one key, neither another copy of the same values nor another piece of one has the same ciphertext."""
    values = torch.zeros(MIB, dtype=torch.uint8)
    for direct in (False, True):
        with simulated(TEE.with_values(dilation=1, direct=direct, parallel_authentication=True)):
            there, other, buffers = values.to("sim:0"), device(1), []
            for copy in (lambda: there.copy_(values), there.cpu, lambda: other.copy_(there)) * 2:  # noqa: B023
                copy()
                synchronize()
                buffers += accelerator.bounce_buffer()[:MIB].split(TEE.piece_bytes)
            words = torch.cat(buffers).view(torch.int64)
            assert len(words.unique()) == len(words)


def refused() -> None:
    """One flipped bit, of the ciphertext or of a tag and in each bounce buffer, fails the copy."""
    values = torch.randint(0, 128, (MIB,), dtype=torch.uint8)
    with simulated(None):
        for way, switches in itertools.product(WAYS, SWITCHES):
            sent_with.update(switches)
            for after in range(2 if way == "device to device" else 1):
                for position in (0, MIB - 1, -1):
                    accelerator.corrupt_next_copy(after, position)
                    with pytest.raises(
                        RuntimeError, match=r"confidential copy \d+ of 1048576 bytes from .* failed auth"
                    ):
                        sent(way, values)
                    with pytest.raises(RuntimeError, match="bounce buffer was changed"):
                        torch.ones(1, device="sim")
                    torch.ops.ringfence_sim.recover()
            assert torch.equal(sent(way, values), values)


def nothing_of_a_refused_copy_arrives() -> None:
    values = torch.randint(0, 128, (MIB,), dtype=torch.uint8)
    with simulated(TEE.with_values(parallel_authentication=True)):
        there, here = values.to("sim:0"), torch.zeros(MIB, dtype=torch.uint8)
        accelerator.corrupt_next_copy(position=MIB - 1)
        with pytest.raises(RuntimeError, match=r"from sim:0 to the host failed authentication"):
            here.copy_(there)
        torch.ops.ringfence_sim.recover()
        assert here.unique().tolist() == [0xFB]


def nonces_are_limited() -> None:
    """A key that has encrypted as often as AES-GCM permits encrypts nothing more; a new simulation has new keys."""
    tensor = torch.zeros(10)
    with simulated(TEE.with_values(dilation=1)):
        torch.ops.ringfence_sim.spend_nonces(2**32 - 1)
        there = tensor.to("sim:0")
        with pytest.raises(RuntimeError, match=r"4294967296 times.*call simulate_tee again"):
            there.copy_(tensor)
        torch.ops.ringfence_sim.recover()
        accelerator.simulate_tee(TEE.with_values(dilation=1))
        there.copy_(tensor)


# -- the host -------------------------------------------------------------------------------------------------------


def host_blocks() -> None:
    """Copies from and to the host block in confidential mode, whatever the memory; other streams go on."""
    with simulated(None):
        there, pinned, pageable = device(0), torch.zeros(MIB, dtype=torch.uint8).pin_memory(), torch.zeros(MIB).byte()
        synchronize()
        for tee, blocks in ((TEE.with_values(confidential=False), False), (TEE, True), (None, False)):
            accelerator.simulate_tee(tee)
            assert pinned.is_pinned() is not blocks
            for host in (pinned, pageable):
                with accelerator.hold() as kernel:
                    assert waits_for(kernel, lambda: there.copy_(host, non_blocking=True)) is blocks  # noqa: B023
                    assert torch.accelerator.current_stream().query() is blocks
                synchronize()
            with torch.Stream("sim"):
                kernel = accelerator.hold()
            with kernel:
                there.copy_(pinned, non_blocking=True)  # returns while the other stream is busy
            synchronize()


def threads() -> None:
    """Several threads copy at the same time, and every value arrives."""
    values = [torch.randint(0, 256, (MIB,), dtype=torch.uint8) for _ in range(4)]
    failures: list[BaseException] = []

    def copies(index: int) -> None:
        try:
            with torch.Stream(f"sim:{index}"):
                for _ in range(5):
                    there = values[index].to(f"sim:{index}")
                    assert torch.equal(there.cpu(), values[index])
        except BaseException as error:
            failures.append(error)

    with simulated(TEE.with_values(dilation=1, cpu_threads=2, parallel_authentication=True)):
        started = [threading.Thread(target=copies, args=(index,)) for index in range(4)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        assert not failures, failures


SCENARIOS: list[Callable[[], None]] = [
    copies_between_devices,
    copies_of_the_host,
    contention,
    dilation,
    slow_machine,
    data,
    views,
    ciphertext,
    nonces_count_up,
    refused,
    nothing_of_a_refused_copy_arrives,
    nonces_are_limited,
    host_blocks,
    threads,
]
