"""The parts of the staging that need no device: slices, slots, and the division into passes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringfence.collectives import Buffer, Collective
from ringfence.collectives.passes import OF_ONE_TENSOR, passes
from ringfence.device import tensors as staging_tensors
from ringfence.device.collective import _lay_out
from ringfence.device.slots import SLOT_BYTES, SLOTS, SlotRing
from ringfence.device.tensors import DeviceTensor, Region, Slice, joined

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.complex128)


def test_pinned_memory_is_at_most_128_mib() -> None:
    assert SLOTS * SLOT_BYTES == 128 << 20


@given(st.sampled_from(list(Collective)[:7]), st.integers(1, 20_000), st.integers(0, 1 << 34), st.integers(1, 8))
def test_a_pass_fits_in_a_slot(kind: Collective, size: int, longest: int, channels: int) -> None:
    each = passes(kind, size, longest, channels).each
    assert each * (1 if kind in OF_ONE_TENSOR else size + 1) <= SLOT_BYTES


@given(st.sampled_from(DTYPES), st.integers(0, 50_000), st.integers(1, 5).map(lambda n: 4096 * n))
def test_slices_of_all_passes_are_the_whole(dtype: torch.dtype, count: int, each: int) -> None:
    whole = Slice(DeviceTensor(torch.empty(count + 7, dtype=dtype), True, True, dtype, 1), 7, count)
    passes = max(1, -(-whole.nbytes // each))
    cut = [whole.cut(index * each, (index + 1) * each) for index in range(passes)]
    assert [element for part in cut for element in range(part.start, part.start + part.length)] == [
        *range(7, 7 + count)
    ]
    assert all(part.nbytes <= each for part in cut)


@given(st.sampled_from(DTYPES), st.integers(0, 3000), st.integers(1, 9), st.integers(1, 90).map(lambda n: 64 * n))
def test_a_region_brings_what_a_pass_takes_of_every_part(
    dtype: torch.dtype, elements: int, parts: int, each: int
) -> None:
    """Of one tensor that is divided into parts, byte by byte; from there, all passes bring it back."""
    random = torch.Generator().manual_seed(elements)
    stored = (torch.randint(0, 99, (10 + elements * parts,), generator=random).to(dtype) for _ in range(2))
    tensor, copy = (DeviceTensor(each[3:], True, True, dtype, 1) for each in stored)  # not at the start of its storage
    for bound in (tensor, copy):
        bound.begin()
    assert tensor.flat is not None and copy.flat is not None
    nbytes = elements * dtype.itemsize
    for start in range(0, max(1, nbytes), each):
        mine, other = (Slice(bound, 7, elements * parts).cut(start, start + each, parts) for bound in (tensor, copy))
        host = torch.empty(mine.nbytes, dtype=torch.uint8)
        if len(host):
            Region(host, [mine]).to_host()
            rows = tensor.flat[7:].contiguous().view(torch.uint8).view(parts, nbytes)
            assert torch.equal(host, rows[:, start : start + each].reshape(-1))
            Region(host, [other]).to_device()
    assert torch.equal(copy.flat[7:], tensor.flat[7:])


def test_a_region_of_several_tensors_is_packed_and_unpacked() -> None:
    tensors = [DeviceTensor(torch.arange(n, dtype=torch.float32), True, True, torch.float32, 1) for n in (3, 0, 5)]
    for each in tensors:
        each.begin()
    slices = [Slice(each, 0, each.outline.numel()) for each in tensors]
    host = torch.empty(32, dtype=torch.uint8)
    Region(host, slices).to_host()
    assert host.view(torch.float32).tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    host.view(torch.float32).mul_(10)
    Region(host, slices).to_device()
    assert [each.flat.tolist() for each in tensors if each.flat is not None] == [[0, 10, 20], [], [0, 10, 20, 30, 40]]


def test_neighbours_of_one_tensor_are_one_slice() -> None:
    """So an all-to-all of one tensor packs nothing."""
    tensor, other = (DeviceTensor(torch.arange(10.0), True, True, torch.float32, 1) for _ in range(2))
    parts = [Slice(tensor, 0, 4), Slice(tensor, 4, 4), Slice(tensor, 8, 2), Slice(other, 0, 2), Slice(other, 3, 1)]
    assert joined(parts) == [Slice(tensor, 0, 10), Slice(other, 0, 2), Slice(other, 3, 1)]
    assert joined([]) == []


def test_more_than_a_slot_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take as much memory on the device again."""
    monkeypatch.setattr(staging_tensors, "PASS_BYTES", 16)
    monkeypatch.setattr(torch, "cat", None)
    tensors = [DeviceTensor(torch.arange(n, dtype=torch.float32), True, True, torch.float32, 1) for n in (3, 5)]
    for each in tensors:
        each.begin()
    host = torch.empty(32, dtype=torch.uint8)
    region = Region(host, [Slice(each, 0, each.outline.numel()) for each in tensors])
    region.to_host()
    assert host.view(torch.float32).tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    host.view(torch.float32).mul_(10)
    region.to_device()
    assert [each.flat.tolist() for each in tensors if each.flat is not None] == [[0, 10, 20], [0, 10, 20, 30, 40]]


def test_buffers_that_are_the_same_memory_have_one_place_in_a_slot() -> None:
    tensor = DeviceTensor(torch.empty(10), True, True, torch.float32, 1)
    whole, half = [Slice(tensor, 0, 10)], [Slice(tensor, 0, 5)]
    assert _lay_out({Buffer.INPUT: whole, Buffer.OUTPUT: whole}) == ({Buffer.INPUT: 0, Buffer.OUTPUT: 0}, 40)
    assert _lay_out({Buffer.INPUT: half, Buffer.OUTPUT: whole}) == ({Buffer.INPUT: 0, Buffer.OUTPUT: 64}, 104)


def test_tensors_overlap_only_if_one_is_written() -> None:
    base = torch.empty(10, 4)

    def bound(tensor: torch.Tensor, writes: bool) -> DeviceTensor:
        return DeviceTensor(tensor, True, writes, tensor.dtype, 1)

    first, second, column = base[:5], base[5:], base[:, 1]
    assert not bound(first, True).overlaps(bound(second, True))
    assert bound(first, True).overlaps(bound(column, False))
    assert bound(column, False).overlaps(bound(second, True))
    assert not bound(column, False).overlaps(bound(second, False))
    assert not bound(base[:0], True).overlaps(bound(base, True))


def test_slots_are_bounded_and_recycled() -> None:
    ring = SlotRing()
    ring._can_pin = False  # pinning needs an accelerator
    taken = [ring.take() for _ in range(SLOTS)]
    assert None not in taken and ring.take() is None
    assert taken[0] is not None and taken[1] is not None
    ring.give(taken[0])
    assert ring.take() is taken[0]
    ring.drop(taken[1])  # an execution may still use it: another one takes its place
    replaced = ring.take()
    assert replaced is not None and replaced not in taken and ring.take() is None
    pageable = ring.pageable(100)
    ring.give(pageable)
    assert ring.take() is None and len(pageable.view) == 100
