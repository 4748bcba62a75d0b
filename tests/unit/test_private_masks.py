"""Masks and fixed point within one process: what cancels, what fits, and what a contribution shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence import keys
from ringfence.errors import PrivateSumError
from ringfence.keys import Secret
from ringfence.private_sums.fixed_point import FIXED, FLOATS, INTEGERS, FixedPoint
from ringfence.private_sums.graph import worker_edges
from ringfence.private_sums.masks import Keystreams, Pair

BLOCK = keys.PRIVATE_SUM_BLOCK_BYTES // 4  # elements of int32


def pairs_of(members: Sequence[Sequence[int]], degree: int) -> dict[int, list[Pair]]:
    """Return the pairs of each worker, with seeds that tests can repeat."""
    found: dict[int, list[Pair]] = {worker: [] for workers in members for worker in workers}
    for low, high in worker_edges(members, degree):
        seed = Secret(keys.digest(b"test seed", bytes([low, high])))
        found[low].append(Pair(seed, True))
        found[high].append(Pair(seed, False))
    return found


def contributions(tensors: Sequence[torch.Tensor], form: FixedPoint, degree: int, call: int = 1) -> list[torch.Tensor]:
    """Return what each worker sends, if each is a member."""
    pairs = pairs_of([(worker,) for worker in range(len(tensors))], degree)
    found = [form.encode(each, Keystreams(pairs[worker], call)) for worker, each in enumerate(tensors)]
    assert all(within for _, within in found)
    return [masked for masked, _ in found]


def added(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors)).sum(0, dtype=tensors[0].dtype)


def steps_of(tensor: torch.Tensor, form: FixedPoint) -> list[int]:
    """The values in steps, computed with fractions."""
    return [round(Fraction(value) * Fraction(2) ** form.exponent) for value in tensor.tolist()]


@given(
    workers=st.integers(2, 16),
    degree=st.integers(1, 5),
    dtype=st.sampled_from([*FLOATS, *INTEGERS]),
    fixed=st.sampled_from(FIXED),
    bound=st.floats(1.0, 1000.0),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_the_sum_is_that_of_the_steps(
    workers: int, degree: int, dtype: torch.dtype, fixed: torch.dtype, bound: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    form = FixedPoint.fit(dtype, fixed, bound, workers)
    drawn = (torch.rand(workers, 5, generator=generator, dtype=torch.float64) * 2 - 1) * bound
    drawn[:, 0], drawn[:, 1] = bound, -bound  # the sums that come closest to an overflow
    tensors = [each.trunc().to(dtype) if dtype in INTEGERS else rounded_down(each, dtype) for each in drawn]
    total = added(contributions(tensors, form, degree))
    wanted = [sum(column) for column in zip(*(steps_of(each, form) for each in tensors), strict=True)]
    assert total.tolist() == wanted
    found = form.decode(total, dtype)
    assert found.dtype is dtype
    if dtype is torch.float64:
        assert found.tolist() == [float(each) * 2.0**-form.exponent for each in wanted]


def rounded_down(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values in another dtype, none of which has a greater magnitude than before."""
    found = values.to(dtype)
    return torch.where(found.double().abs() > values.abs(), torch.nextafter(found, torch.zeros_like(found)), found)


@given(
    bound=st.floats(1e-30, 1e30), workers=st.integers(2, 1000), fixed=st.sampled_from(FIXED),
)  # fmt: skip
def test_steps_are_the_finest_whose_sum_fits(bound: float, workers: int, fixed: torch.dtype) -> None:
    form, limit = FixedPoint.fit(torch.float64, fixed, bound, workers), torch.iinfo(fixed).max
    assert form.largest == round(Fraction(bound) * Fraction(2) ** form.exponent)
    assert workers * form.largest <= limit
    finer = round(Fraction(bound) * Fraction(2) ** (form.exponent + 1))
    assert workers * finer > limit or form.exponent == 126


@pytest.mark.parametrize("fixed", FIXED, ids=str)
def test_masks_cancel_over_several_blocks(fixed: torch.dtype) -> None:
    form = FixedPoint.fit(torch.float32, fixed, 1.0, 3)
    tensors = [torch.linspace(-1, 1, 2 * BLOCK + 7) * (worker + 1) / 3 for worker in range(3)]
    assert added(contributions(tensors, form, 2)).tolist()[:: BLOCK // 3] == [
        sum(column) for column in zip(*(steps_of(each[:: BLOCK // 3], form) for each in tensors), strict=True)
    ]


@pytest.mark.parametrize("elements", [0, 1, 3, 5, BLOCK - 1, BLOCK, BLOCK + 1])
def test_any_number_of_elements(elements: int) -> None:
    form = FixedPoint.fit(torch.float32, torch.int32, 1.0, 2)
    ones = [torch.ones(elements)] * 2
    assert form.decode(added(contributions(ones, form, 1)), torch.float32).tolist() == [2.0] * elements


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.0001, -1.0001, 3e38])
@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, BLOCK + 5])
def test_a_value_beyond_the_bound_is_found(value: float, place: int) -> None:
    form, values = FixedPoint.fit(torch.float32, torch.int32, 1.0, 3), torch.zeros(BLOCK + 9)
    assert form.encode(values, Keystreams([], 1))[1]
    values[place] = value
    assert not form.encode(values, Keystreams([], 1))[1]


def test_an_integer_that_fixed_does_not_hold_is_found() -> None:
    form = FixedPoint.fit(torch.int64, torch.int32, 1000.0, 3)
    assert not form.encode(torch.tensor([2**32 + 1]), Keystreams([], 1))[1]  # it would be 1


@pytest.mark.parametrize(
    ("dtype", "fixed", "bound", "says"),
    [
        (torch.complex64, torch.int32, 1.0, "no private sum"),
        (torch.float8_e4m3fn, torch.int32, 1.0, "no private sum"),
        (torch.int8, torch.int32, 1.0, "before they are quantised"),
        (torch.uint8, torch.int32, 1.0, "before they are quantised"),
        (torch.bool, torch.int32, 1.0, "no private sum"),
        (torch.float32, torch.int16, 1.0, r"pass torch\.int32 or torch\.int64"),
        (torch.float32, torch.float32, 1.0, r"pass torch\.int32 or torch\.int64"),
        (torch.float32, torch.int32, 0.0, "bound is 0"),
        (torch.float32, torch.int32, -1.0, "bound is -1"),
        (torch.float32, torch.int32, math.inf, "bound is inf"),
        (torch.float32, torch.int32, math.nan, "bound is nan"),
        (torch.float16, torch.int32, 30_000.0, r"may exceed torch\.float16"),
        (torch.int16, torch.int32, 20_000.0, r"may exceed torch\.int16"),
        (torch.int64, torch.int32, 1e9, r"pass fixed=torch\.int64"),
        (torch.float64, torch.int64, 1e200, "the largest is"),
        (torch.float32, torch.int32, 1e-40, "the smallest is"),
        (torch.float64, torch.int64, 2.0**-110 * 0.999, "the smallest is"),
    ],
)
def test_what_has_no_private_sum(dtype: torch.dtype, fixed: torch.dtype, bound: float, says: str) -> None:
    with pytest.raises(PrivateSumError, match=says):
        FixedPoint.fit(dtype, fixed, bound, 3)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 11), (torch.bfloat16, 8)])
def test_halves_are_rounded_by_way_of_float32(dtype: torch.dtype, bits: int) -> None:
    """1 + 2**-11 + 2**-26 becomes 1 + 2**-11, and then the even neighbour. Rounded once it would be the other one."""
    form, total = FixedPoint(torch.int64, 26, 2**30), torch.tensor([2**26 + 2 ** (26 - bits) + 1])
    assert form.decode(total, dtype).tolist() == [1.0]
    assert form.decode(total, torch.float64).tolist() == [1 + 2.0**-bits + 2.0**-26]


def test_the_smallest_bound() -> None:
    assert FixedPoint.fit(torch.float32, torch.int32, 2.0**-110, 3) == FixedPoint(torch.int32, 126, 2**16)


# -- what is sent -------------------------------------------------------------------------------------------------------


def chi_squared(contribution: torch.Tensor) -> float:
    """How far the counts of byte values are from equal: 255 on average for random bytes, with a deviation of 23."""
    counts = torch.bincount(torch.frombuffer(contribution.numpy(), dtype=torch.uint8).long(), minlength=256).double()
    return float(((counts - counts.mean()) ** 2 / counts.mean()).sum())


def ones_in_bits(contribution: torch.Tensor) -> list[float]:
    """The share of ones in each bit of the words: a half for random words."""
    return [float((contribution >> bit & 1).double().mean()) for bit in range(32)]


def serial_correlation(contribution: torch.Tensor) -> float:
    values = contribution.double()
    return float(torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1])


INPUTS = {
    "zeros": torch.zeros(1 << 18),
    "a gradient": torch.linspace(-1, 1, 1 << 18) ** 9,
    "one word": torch.full((1 << 18,), 0.7),
}


@pytest.mark.promise(
    "Colluding members, up to the number in the policy, learn the sum of a private sum and nothing else."
)
@pytest.mark.parametrize("name", INPUTS)
def test_contributions_look_random_whatever_the_input(name: str) -> None:
    """Seeds and inputs are fixed, so the figures are the same in each run; limits are six deviations."""
    form = FixedPoint.fit(torch.float32, torch.int32, 1.0, 4)
    for sent in contributions([INPUTS[name]] * 4, form, 2):
        assert abs(chi_squared(sent) - 255) < 6 * math.sqrt(2 * 255)
        assert max(abs(share - 0.5) for share in ones_in_bits(sent)) < 6 * 0.5 / math.sqrt(len(sent))
        assert abs(serial_correlation(sent)) < 6 / math.sqrt(len(sent))


def test_the_same_measures_tell_inputs_that_are_not_masked() -> None:
    form = FixedPoint.fit(torch.float32, torch.int32, 1.0, 4)
    for values in INPUTS.values():
        plain, _ = form.encode(values, Keystreams([], 1))
        assert chi_squared(plain) > 1000


def test_two_sums_of_one_input_share_no_mask() -> None:
    form, values = FixedPoint.fit(torch.float32, torch.int32, 1.0, 4), torch.zeros(1 << 18)
    first, second = (contributions([values] * 4, form, 2, call)[0] for call in (1, 2))
    assert abs(chi_squared(first - second) - 255) < 6 * math.sqrt(2 * 255)


def test_a_wiped_seed_masks_nothing() -> None:
    """Objects that are kept after the group has ended cannot make a keystream that anybody could repeat."""
    seed = Secret(bytes(32))
    seed.forget()
    with pytest.raises(ValueError, match="seed"):
        Keystreams([Pair(seed, True)], 1)
