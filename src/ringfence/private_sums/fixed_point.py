"""Tensors as integers whose sum cannot overflow, and the sum as a tensor again (spec/private-sum.md, 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import torch

from ringfence import keys
from ringfence.errors import PrivateSumError
from ringfence.private_sums.masks import Keystreams

INTEGERS: Final = (torch.int16, torch.int32, torch.int64)
FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FIXED: Final = (torch.int32, torch.int64)
EXPONENT: Final = 126  # so that a step is a normal number of float32
COARSEST: Final = 2**16  # steps in a bound, at least, with steps of this size


@dataclass(frozen=True)
class FixedPoint:
    """Integers of `dtype` in steps of 2**-exponent, of which each contribution has at most `largest` steps."""

    dtype: torch.dtype
    exponent: int
    largest: int

    @classmethod
    def fit(cls, given: torch.dtype, fixed: torch.dtype, bound: float, contributions: int) -> FixedPoint:
        """Return the finest steps with which the sum of so many contributions within a bound fits.

        Raises PrivateSumError if there are none, or the sum may not fit the dtype that was given.
        """
        if fixed not in FIXED:
            raise PrivateSumError(f"fixed is {fixed}: pass torch.int32 or torch.int64")
        if given not in (*INTEGERS, *FLOATS):
            raise PrivateSumError(
                f"a tensor of {given} has no private sum: pass float16, bfloat16, float32, float64, int16, int32 or int64. "
                "Quantised blocks have scales of their own: pass the values before they are quantised"
            )
        if not (math.isfinite(bound) and bound > 0):
            raise PrivateSumError(f"bound is {bound}: pass the largest magnitude that a value may have on any rank")
        info = torch.finfo(given) if given in FLOATS else torch.iinfo(given)
        if Fraction(bound) * contributions > Fraction(info.max):
            raise PrivateSumError(
                f"{contributions} values of up to {bound:g} may exceed {given}: pass a smaller bound, or another dtype"
            )
        limit = torch.iinfo(fixed).max
        if given in INTEGERS:
            found = cls(fixed, 0, math.floor(bound))
            if found.largest * contributions > limit:
                raise PrivateSumError(
                    f"{contributions} values of up to {bound:g} may exceed {fixed}: pass fixed=torch.int64"
                )
            return found
        exponent = min(EXPONENT, (limit // contributions).bit_length() - math.frexp(bound)[1] + 2)  # too large by a few
        while _rounded(bound, exponent) * contributions > limit:
            exponent -= 1
        if exponent < -EXPONENT:
            raise PrivateSumError(f"bound is {bound:g}, and the largest is {2.0**EXPONENT:g}")
        found = cls(fixed, exponent, _rounded(bound, exponent))
        if exponent == EXPONENT and found.largest < COARSEST:
            raise PrivateSumError(f"bound is {bound:g}, and the smallest is {COARSEST * 2.0**-EXPONENT:g}")
        return found

    def encode(self, values: torch.Tensor, keystreams: Keystreams) -> tuple[torch.Tensor, bool]:
        """Return masked integers for a flat tensor on the CPU, and whether all of its values are within the bound.

        Block by block: what was converted is masked while it is in the cache.
        """
        out = torch.empty(values.numel(), dtype=self.dtype, device="cpu")
        size = keys.PRIVATE_SUM_BLOCK_BYTES // self.dtype.itemsize
        rounded = None
        if values.dtype not in INTEGERS:
            rounded = torch.empty(min(size, values.numel()), dtype=_wide(values.dtype), device="cpu")
        for block, target in zip(values.split(size), out.split(size), strict=True):
            steps = block
            if rounded is not None:
                steps = rounded[: block.numel()]
                torch.mul(block.to(rounded.dtype), 2.0**self.exponent, out=steps).round_()
            if block.numel():
                least, most = (each.item() for each in torch.aminmax(steps))
                if not (-self.largest <= least and most <= self.largest):  # also a value that is not a number
                    return out, False
            keystreams.add_to(target.copy_(steps))
        return out, True

    def decode(self, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of what `encode` made, as a tensor of another dtype. If its values fit there, it takes the memory."""
        if dtype in INTEGERS:
            return total.to(dtype)
        if dtype.itemsize == total.itemsize:
            found, size = total.view(dtype), keys.PRIVATE_SUM_BLOCK_BYTES // dtype.itemsize
            for block, target in zip(total.split(size), found.split(size), strict=True):
                target.copy_(block.to(dtype).mul_(2.0**-self.exponent))
            return found
        if dtype in (torch.float32, torch.float64):
            return total.to(dtype).mul_(2.0**-self.exponent)
        return total.to(torch.float64).mul_(2.0**-self.exponent).to(torch.float32).to(dtype)


def _rounded(bound: float, exponent: int) -> int:
    """The most steps of a value within the bound, rounded."""
    return round(Fraction(bound) * Fraction(2) ** exponent)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
