"""`ringfence.private_sum`."""

from __future__ import annotations

from typing import Any

import torch

from ringfence import keys
from ringfence.admission import encoding
from ringfence.errors import PrivateSumError
from ringfence.private_sums.agreement import agree
from ringfence.private_sums.fixed_point import EXPONENT, FixedPoint
from ringfence.private_sums.pairs import PrivateGroup, private_group


def private_sum(
    tensor: torch.Tensor, group: Any = None, *, bound: float, fixed: torch.dtype = torch.int32
) -> torch.Tensor:
    """Return the sum of a tensor over all ranks of a group, of which each member learns the sum and nothing else.

    Experimental. The policy must have a `[private_sum]` table, which says who the members are and how many of them may collude.
    Each rank adds masks that cancel in the sum, so every rank of the group must call this, in the same order as other
    collectives. There is no average: divide the sum.

    Never repeat a sum whose members may have lost a worker with the same values and other members: the difference is somebody's
    contribution.

    Args:
        tensor: The contribution of this rank: float16, bfloat16, float32, float64, int16, int32 or int64, on the CPU or on the
            current accelerator. It is not changed. Wait for asynchronous calls on it first.
        group: A ringfence process group. Default: the default group.
        bound: The largest magnitude that a value may have on any rank; equal on all ranks. Floats are rounded to a multiple
            of a power of two, the finest with which the sum cannot overflow `fixed`: about `bound` * ranks / 2**31.
        fixed: The integers that are summed: torch.int32 or, for finer steps and twice the traffic, torch.int64.

    Returns:
        A new tensor with the sum, of the same shape, dtype and device.

    Raises:
        PrivateSumError: On every rank, before anything of a tensor was sent: the policy does not permit it, the ranks pass
            different arguments, or a value on one rank exceeds the bound or is not a number.
    """
    return sum_in(private_group(group), tensor, bound=bound, fixed=fixed)


def sum_in(
    private: PrivateGroup,
    tensor: torch.Tensor,
    *,
    bound: float,
    fixed: torch.dtype = torch.int32,
    also: bytes = b"",
    refusal: Exception | None = None,
) -> torch.Tensor:
    """Return the private sum of a tensor over a group whose pairs have their seeds.

    All ranks compare `also` with the other terms, and all refuse if one does.
    """
    with private.one_sum:
        group, call, terms = private.group, private.begin(), b""
        try:
            if refusal:
                raise refusal
            _check(tensor)
            form = FixedPoint.fit(tensor.dtype, fixed, bound, private.size)
            terms = terms_of(call, tensor, form) + also
            values = tensor.detach().to("cpu").contiguous().view(-1)
            contribution, within = form.encode(values, private.keystreams(call))
            if not within:
                raise PrivateSumError(f"a value exceeds the bound {bound:g}, or is not a number: nothing was sent")
        except Exception as error:
            refusal = error
        agree(group, terms, refusal)
        group.allreduce([contribution]).wait()
        return form.decode(contribution, tensor.dtype).view(tensor.shape).to(tensor.device)


def terms_of(call: int, tensor: torch.Tensor, form: FixedPoint) -> bytes:
    """Return what must be equal on all ranks."""
    numbers = (call, tensor.numel(), form.largest, form.exponent + EXPONENT)
    names = (str(tensor.dtype), str(form.dtype))
    return b"".join(encoding.number(each, 8) for each in numbers) + b"".join(map(encoding.text, names))


def _check(tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise PrivateSumError(f"a {type(tensor).__name__} has no private sum if it is not a dense tensor")
    if tensor.numel() * torch.int64.itemsize > keys.PRIVATE_SUM_BYTES:
        raise PrivateSumError(f"a private sum has at most {keys.PRIVATE_SUM_BYTES} bytes")
