"""The environment of a case: reproducible values, views with guarded gaps, and torch's expected result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.conformance.cases import Case

TABLE = 8191  # a prime, so that repetitions never align with chunks
CPU = torch.device("cpu")
ROWS = 3  # of a transposed view
RELATIVE = {  # tolerance of one addition or multiplication
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
    torch.float32: 1e-6,
    torch.float64: 1e-14,
    torch.complex64: 1e-6,
    torch.complex128: 1e-14,
}


@cache
def table(dtype: torch.dtype, op: str) -> Tensor:
    """Random values of a type; near one for products, so that they neither vanish nor overflow."""
    random = torch.Generator().manual_seed(20)
    if dtype.is_floating_point or dtype.is_complex:
        kind = torch.complex128 if dtype.is_complex else torch.float64
        values = torch.randn(TABLE, generator=random, dtype=kind)
        if op == "PRODUCT":
            values = 1 + values.clamp(-3, 3) / 8
        return values.to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (TABLE,), generator=random).to(dtype)
    low, high = (0, 256) if dtype == torch.uint8 else (-128, 128)
    return torch.randint(low, high, (TABLE,), generator=random).to(dtype)


def combine(op: str, dtype: torch.dtype, operands: Sequence[Tensor]) -> Tensor:
    """The expected reduction, by torch. Floats in double precision; a sum of booleans is their disjunction; averages of
    integers are rounded toward zero, and correct even if the sum overflows the type."""
    if dtype == torch.bool:
        step = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}.get(op, op)
        wide = list(operands)
    else:
        step = "SUM" if op == "AVG" else op
        whole = torch.int64 if op == "AVG" else dtype
        kind = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else whole
        wide = [operand.to(kind) for operand in operands]
    steps: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "SUM": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    total = wide[0]
    for operand in wide[1:]:
        total = steps[step](total, operand)
    if op == "AVG":
        total = total.div(len(operands), rounding_mode="trunc" if total.dtype == torch.int64 else None)
    return total.to(dtype)


class Setting:
    """One case on one rank of its group."""

    def __init__(self, case: Case, number: int, group: Any, device: torch.device = CPU) -> None:
        self.case = case
        self.device = device
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.root = number % self.size
        self.rows = ROWS if case.layout == "transposed" else case.size
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self._number = number
        self._guards: list[tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]] = []
        self._unchanged: list[tuple[Tensor, Tensor]] = []

    @property
    def op(self) -> Any:
        return getattr(dist.ReduceOp, self.case.op)

    def values(self, rank: int, slot: int = 0, rows: int | None = None) -> Tensor:
        """The values of a rank for a slot of this case; every rank can compute them."""
        shape = self._shape(self.rows if rows is None else rows)
        count = shape.numel()
        start = (self._number * 977 + rank * 331 + slot * 53) % TABLE
        source = table(self.dtype, self.case.op)
        return source.repeat((start + count) // TABLE + 1)[start : start + count].reshape(shape)

    def _shape(self, rows: int) -> torch.Size:
        return torch.Size((rows, self.case.size)) if self.case.layout == "transposed" else torch.Size((rows,))

    def empty(self, rows: int | None = None) -> Tensor:
        """A tensor for a result, in the layout of the case, in memory with guarded gaps."""
        shape = self._shape(self.rows if rows is None else rows)
        base, view = _layout(self.case.layout, shape, self.dtype)
        base = base.to(self.device)
        self._guards.append((base, base.clone(), view))
        return view(base)

    def place(self, values: Tensor, unchanged: bool = False) -> Tensor:
        """A tensor with values; `unchanged`: the collective may only read it."""
        tensor = self.empty(values.shape[0])
        tensor.copy_(values)
        if unchanged:
            self._unchanged.append((tensor, values))
        return tensor

    def call(self, collective: Callable[..., Any], *args: Any, **keywords: Any) -> None:
        """Call the collective on this group and wait in the mode of the case."""
        pending = collective(*args, group=self.group, async_op=self.case.mode != "sync", **keywords)
        if self.case.mode == "future" and isinstance(pending, dist.Work):
            pending = pending.get_future()
        if self.case.mode != "sync":  # torch's coalesced collectives return a future themselves
            pending.wait()

    def reduced(self, operands: Sequence[Tensor]) -> Tensor:
        return combine(self.case.op, self.dtype, operands)

    def fault(self, actual: Tensor, expected: Tensor) -> str | None:
        """Describe the error in a result, if any."""
        actual = actual.cpu()
        if actual.shape != expected.shape:
            return f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        inexact = self.case.op in ("SUM", "PRODUCT", "AVG") and self.dtype in RELATIVE
        if inexact:
            tolerance = RELATIVE[self.dtype] * self.size
            same = torch.isclose(actual, expected, rtol=tolerance, atol=tolerance * 2)
        else:
            same = actual == expected
        if bool(same.all()):
            return None
        where = int((~same).flatten().nonzero()[0])
        values = f"{actual.flatten()[where].item()} instead of {expected.flatten()[where].item()}"
        return f"{int((~same).sum())} of {same.numel()} elements differ, first at {where}: {values}"

    def damage(self) -> str | None:
        """Describe writes of the collective outside its tensors."""
        for tensor, values in self._unchanged:
            if not torch.equal(tensor.cpu(), values):
                return "an input was changed"
        for base, untouched, view in self._guards:
            untouched, written = untouched.cpu(), base.cpu()
            view(untouched).copy_(view(written))
            if not torch.equal(written, untouched):
                return "memory between the elements of a view was written"
        return None


def _layout(layout: str, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return memory and a function that returns a view of that shape in it."""
    count = shape.numel()
    match layout:
        case "plain":
            return torch.ones(count, dtype=dtype), lambda base: base.view(shape)
        case "offset":
            return torch.ones(count + 8, dtype=dtype), lambda base: base[5 : 5 + count].view(shape)
        case "transposed":
            return torch.ones(count, dtype=dtype), lambda base: base.view(shape[1], shape[0]).T
        case "every_second":
            return torch.ones(2 * count, dtype=dtype), lambda base: base[::2].view(shape)
    raise ValueError(layout)
