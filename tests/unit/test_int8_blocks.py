"""Blocks of int8 values: what rounding loses, what is kept of it, values that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringfence.hooks import blocks
from ringfence.hooks.blocks import BLOCK

HEADER = 8
ROWS = st.integers(1, 3)
COUNTS = st.sampled_from([0, 1, 2, 5, 511, 513]).map(lambda count: count * BLOCK)  # around what is worked on at once
MAGNITUDES = st.sampled_from([0.0, 1e-45, 1e-38, 1e-30, 1e-3, 1.0, 3e4, 3e38])


def random_values(rows: int, count: int, magnitude: float, seed: int) -> torch.Tensor:
    """Values of a magnitude that differs from block to block."""
    random = torch.Generator().manual_seed(seed)
    values = (torch.rand(rows, count, generator=random) * 2 - 1).unflatten(1, (-1, BLOCK))
    return (values * magnitude * torch.rand(rows, count // BLOCK, 1, generator=random)).flatten(1)


def packed(values: torch.Tensor, divisor: int = 1, keep_errors: bool = False) -> torch.Tensor:
    packets = torch.full((values.size(0), blocks.packet_bytes(values.size(1), HEADER)), 7, dtype=torch.uint8)
    blocks.quantise(values, packets, divisor=divisor, keep_errors=keep_errors)
    assert bool((packets[:, packets.size(1) - HEADER :] == 7).all())
    return packets


def unpacked(packets: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    values = torch.full_like(like, math.nan)
    blocks.read(packets, values)
    return values


def largest(values: torch.Tensor) -> torch.Tensor:
    """For each value the largest magnitude of its block."""
    each = values.unflatten(1, (-1, BLOCK)).abs().amax(2, keepdim=True)
    return each.expand(-1, -1, BLOCK).flatten(1)


@given(ROWS, COUNTS, MAGNITUDES, st.integers(0, 9))
def test_the_error_is_half_a_step_at_most(rows: int, count: int, magnitude: float, seed: int) -> None:
    values = random_values(rows, count, magnitude, seed)
    given_values = values.clone()
    read = unpacked(packed(values), values)
    assert torch.equal(values, given_values)
    error = (read.double() - values.double()).abs()
    assert bool((error <= largest(values).double().clamp(min=2.0**-100) / 127 * 0.50005).all())


@given(ROWS, COUNTS, MAGNITUDES, st.integers(0, 9), st.sampled_from([1, 3, 4]))
def test_errors_that_are_kept_make_up_the_difference(
    rows: int, count: int, magnitude: float, seed: int, divisor: int
) -> None:
    values = random_values(rows, count, magnitude, seed)
    errors = values.clone()
    read = unpacked(packed(errors, divisor, keep_errors=True), values).double() * divisor
    lost = (read + errors.double() - values.double()).abs()
    assert bool((lost <= largest(values).double() * 1e-6 + 2.0**-140).all())


@given(ROWS, COUNTS, st.integers(0, 9))
def test_packets_are_added_before(rows: int, count: int, seed: int) -> None:
    values, *others = (random_values(rows, count, 1.0, each) for each in (seed, seed + 10, seed + 20))
    added = [packed(each) for each in others]
    expected = values + unpacked(added[0], values) + unpacked(added[1], values)
    packets = torch.zeros_like(added[0])
    blocks.quantise(values, packets, added=added)
    assert torch.allclose(values, expected, rtol=0, atol=2.0**-21)
    assert torch.equal(unpacked(packets, values), unpacked(packed(values), values))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("count", [3 * BLOCK, 600 * BLOCK])
def test_a_block_that_is_not_finite_is_nan(bad: float, count: int) -> None:
    values = random_values(2, count, 1.0, 0)
    values[1, BLOCK + 5] = bad
    errors = values.clone()
    read = unpacked(packed(errors, keep_errors=True), values)
    wrong = torch.zeros_like(values, dtype=torch.bool)
    wrong[1, BLOCK : 2 * BLOCK] = True
    assert torch.equal(read.isnan(), wrong)
    assert bool((errors[wrong] == 0).all()) and bool(errors.isfinite().all())


def test_codes_are_rounded_half_to_even() -> None:
    values = torch.zeros(1, BLOCK)
    values[0, :7] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0])
    read = unpacked(packed(values), values)
    assert read[0, :7].tolist() == [127.0, 0.0, 2.0, 2.0, 0.0, -2.0, -127.0]
