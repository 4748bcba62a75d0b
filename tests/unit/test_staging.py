"""The parts of the staging that need no device: slices, slots, and the division into passes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringfence.collectives.selection import ScheduleId
from ringfence.dataplane.request import PASS_BYTES, STAGED, describe_call
from ringfence.device.collective import _lay_out, slice_bytes
from ringfence.device.slots import SLOT_BYTES, SLOTS, SlotRing
from ringfence.device.tensors import DeviceTensor, Slice
from ringfence.link.frames import Call

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.complex128)


def test_pinned_memory_is_at_most_64_mib() -> None:
    assert SLOTS * SLOT_BYTES == 64 << 20


@given(size=st.integers(1, 4096))
def test_a_pass_fits_in_a_slot(size: int) -> None:
    each = slice_bytes(size)
    assert each % 4096 == 0 and 4096 <= each <= PASS_BYTES
    assert each * (size + 1) <= SLOT_BYTES or each == 4096


@pytest.mark.parametrize(("size", "each"), [(2, 2 << 20), (3, 2 << 20), (4, 409 * 4096), (64, 31 * 4096), (5000, 4096)])
def test_a_pass_takes_the_slices_of_the_specification(size: int, each: int) -> None:
    assert slice_bytes(size) == each


@given(st.sampled_from(DTYPES), st.integers(0, 50_000), st.integers(1, 5).map(lambda n: 4096 * n))
def test_slices_of_all_passes_are_the_whole(dtype: torch.dtype, count: int, each: int) -> None:
    whole = Slice(DeviceTensor(torch.empty(count + 7, dtype=dtype), True, True, dtype, 1), 7, count)
    passes = max(1, -(-whole.nbytes // each))
    cut = [whole.cut(index * each, (index + 1) * each) for index in range(passes)]
    assert [element for part in cut for element in range(part.start, part.start + part.length)] == [
        *range(7, 7 + count)
    ]
    assert all(part.nbytes <= each for part in cut)


@given(
    st.sampled_from(DTYPES), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 30)), max_size=8)
)
def test_neighbours_are_one_copy_and_every_part_has_its_place(
    dtype: torch.dtype, drawn: list[tuple[int, int, int]]
) -> None:
    """What the copies bring to a slot, byte by byte, is what the views of the parts then show."""
    tensors = [DeviceTensor(torch.empty(100, dtype=dtype), True, True, dtype, 1) for _ in range(3)]
    parts = [Slice(tensors[number], start, length) for number, start, length in drawn]
    offsets, joined, length = _lay_out(parts)
    slot: dict[int, tuple[DeviceTensor, int]] = {}
    for part, offset in joined:
        assert offset % 64 == 0 and offset + part.nbytes <= length
        for byte in range(part.nbytes):
            assert offset + byte not in slot
            slot[offset + byte] = part.tensor, part.start * dtype.itemsize + byte
    for part in parts:
        for byte in range(part.nbytes):
            assert slot[offsets[part] + byte] == (part.tensor, part.start * dtype.itemsize + byte)


def test_parts_of_a_whole_tensor_are_one_copy() -> None:
    tensor = DeviceTensor(torch.empty(10), True, True, torch.float32, 1)
    thirds = [Slice(tensor, 0, 4), Slice(tensor, 4, 4), Slice(tensor, 8, 2)]
    offsets, joined, length = _lay_out([*thirds, *thirds])
    assert list(offsets.values()) == [0, 16, 32]
    assert (joined, length) == ([(Slice(tensor, 0, 10), 0)], 40)


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


def test_a_staged_call_differs_from_one_on_host_tensors() -> None:
    assert max(ScheduleId) < STAGED
    call = Call(0, dtype=7, schedule=1, elements=10)
    staged = call._replace(schedule=call.schedule | STAGED)
    assert staged.pack() != call.pack()
    assert describe_call(call, 3) == "all_reduce #3 (10 x float32, sum)"
    assert describe_call(staged, 3) == "all_reduce #3 (10 x float32, sum, on device tensors)"
