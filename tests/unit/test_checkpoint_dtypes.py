"""Loading into tensors of another dtype: numbers are rounded, or the load is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from ringfence import checkpoint
from ringfence.checkpoint import conversion, tensors
from ringfence.checkpoint.index import ITEM_BYTES
from ringfence.errors import CheckpointError
from tests.unit.checkpoint_samples import key_file

INTEGERS = [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
EIGHT_BITS = [getattr(torch, name) for name in ITEM_BYTES if name.startswith("float8")]
INFINITE = float("inf")


@pytest.fixture
def key(tmp_path: Path) -> str:
    return key_file(tmp_path)


def loaded(folder: Path, key: str, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Load what was saved into a tensor of a dtype, and into one that is not contiguous."""
    checkpoint.save({"a": stored, "b": stored}, folder / "saved", key=key)
    target = {"a": torch.zeros(stored.shape, dtype=dtype), "b": torch.zeros((*stored.shape, 2), dtype=dtype)[..., 0]}
    checkpoint.load(target, folder / "saved", key=key)
    assert torch.equal(target["a"].nan_to_num(7), target["b"].nan_to_num(7))
    return target["a"]


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.tensor([1000, -1, 2**40]), torch.int8),
        (torch.tensor([1, 2]), torch.int32),
        (torch.tensor([255], dtype=torch.uint8), torch.int8),
        (torch.tensor([-1], dtype=torch.int8), torch.uint64),
        (torch.tensor([1], dtype=torch.uint64), torch.int64),
        (torch.tensor([1000.0]), torch.float8_e4m3fn),
        (torch.tensor([-2.0]), torch.float8_e8m0fnu),
    ],
    ids=lambda each: str(getattr(each, "dtype", each)),
)
def test_a_dtype_that_does_not_hold_all_is_refused(
    tmp_path: Path, key: str, stored: torch.Tensor, dtype: torch.dtype
) -> None:
    with pytest.raises(CheckpointError, match=f"a is of {stored.dtype} .* load it into a tensor of {stored.dtype}"):
        loaded(tmp_path, key, stored, dtype)


@pytest.mark.parametrize(("stored", "target"), itertools.product(INTEGERS, INTEGERS), ids=str)
def test_integers_are_refused_unless_all_of_them_fit(stored: torch.dtype, target: torch.dtype) -> None:
    limits = torch.iinfo(stored)
    fits = [torch.iinfo(target).min <= each <= torch.iinfo(target).max for each in (limits.min, limits.max)]
    try:
        conversion.check("a", stored, target)
    except CheckpointError:
        assert not all(fits)
    else:
        assert all(fits)


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.tensor([1.0, 1e300], dtype=torch.float64), torch.float16),
        (torch.tensor([1.0, 1e300], dtype=torch.float64), torch.float32),
        (torch.tensor([1.0, 70000.0]), torch.float16),
        (torch.tensor([1.0, 3.4e38]), torch.bfloat16),
        (torch.tensor([INFINITE, -1e39, float("nan")], dtype=torch.float64), torch.bfloat16),
        (torch.tensor([1, 1 << 20]), torch.float16),
        (torch.tensor([1 + 1j, 1 + 1e300j], dtype=torch.complex128), torch.complex64),
        (torch.tensor([1.0, 2.0**100]).to(torch.float8_e8m0fnu), torch.float16),
    ],
    ids=lambda each: str(getattr(each, "dtype", each)),
)
def test_a_number_that_would_become_infinite_is_refused(
    tmp_path: Path, key: str, stored: torch.Tensor, dtype: torch.dtype
) -> None:
    with pytest.raises(CheckpointError, match=r"a, b: .* too large") as caught:
        loaded(tmp_path, key, stored, dtype)
    assert "Load another checkpoint" not in str(caught.value)


@pytest.mark.parametrize("row", [0, -1])
def test_an_overflow_in_any_block_is_found(tmp_path: Path, key: str, row: int) -> None:
    stored = torch.zeros(2, tensors.STAGING_BYTES // 8 + 5)  # more than the staging holds at once
    stored[row, -1] = -1e10
    checkpoint.save({"a": stored}, tmp_path / "saved", key=key)
    with pytest.raises(CheckpointError, match="too large"):
        checkpoint.load({"a": torch.zeros(stored.shape, dtype=torch.float16)}, tmp_path / "saved", key=key)


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.tensor([0.1, -65504.0, 1e-30, INFINITE, -INFINITE, float("nan")]), torch.float16),
        (torch.tensor([0.1, 3e38, INFINITE]), torch.bfloat16),
        (torch.tensor([0.1, 60000.0], dtype=torch.float16), torch.bfloat16),
        (torch.tensor([0.1, 1e38], dtype=torch.bfloat16), torch.float64),
        (torch.tensor([200, 3], dtype=torch.uint8), torch.int16),
        (torch.tensor([True, False]), torch.int8),
        (torch.tensor([(1 << 24) + 1]), torch.float32),
        (torch.tensor([1.0, 2.0]), torch.complex64),
        (torch.tensor([1.0, -448.0]).to(torch.float8_e4m3fn), torch.bfloat16),
    ],
    ids=lambda each: str(getattr(each, "dtype", each)),
)
def test_numbers_are_rounded(tmp_path: Path, key: str, stored: torch.Tensor, dtype: torch.dtype) -> None:
    found = loaded(tmp_path, key, stored, dtype)
    assert torch.equal(found.nan_to_num(7), stored.to(dtype).nan_to_num(7))


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_nothing_else_is_loaded_into_eight_bits(dtype: torch.dtype) -> None:
    for other in (torch.float32, torch.int8, torch.bool, *EIGHT_BITS):
        if other is dtype:
            conversion.check("a", other, dtype)
            continue
        with pytest.raises(CheckpointError, match="cannot hold all"):
            conversion.check("a", other, dtype)
