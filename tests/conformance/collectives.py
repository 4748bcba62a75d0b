"""Runs the cases with random values of every type, each reduced in every way that torch defines for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringfence.cli.selftest.conformance import Call, Case

RIGHT = "right"
TABLE = 8191  # a prime, so that repetitions never align with chunks
CPU = torch.device("cpu")
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


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


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
    total = wide[0]
    for operand in wide[1:]:
        total = STEPS[step](total, operand)
    if op == "AVG":
        total = total.div(len(operands), rounding_mode="trunc" if total.dtype == torch.int64 else None)
    return total.to(dtype)


class RandomCall(Call):
    """A case with random values."""

    def values(self, rank: int, slot: int = 0, rows: int | None = None) -> Tensor:
        shape = self.shape(self.rows if rows is None else rows)
        count = shape.numel()
        start = (self.number * 977 + rank * 331 + slot * 53) % TABLE
        source = table(self.dtype, self.case.op)
        return source.repeat((start + count) // TABLE + 1)[start : start + count].reshape(shape)

    def reduced(self, slot: int = 0) -> Tensor:
        return combine(self.case.op, self.dtype, self.all_values(slot))

    def same(self, actual: Tensor, expected: Tensor) -> Tensor:
        if self.case.op not in ("SUM", "PRODUCT", "AVG") or self.dtype not in RELATIVE:
            return super().same(actual, expected)
        tolerance = RELATIVE[self.dtype] * self.size
        return torch.isclose(actual, expected, rtol=tolerance, atol=tolerance * 2)


def outcome(case: Case, number: int, group: Any, device: torch.device) -> str:
    """Run one case; return RIGHT, "wrong: ..." or "refused: ..."."""
    try:
        fault = RandomCall(case, number, group, device).run()
    except (RuntimeError, ValueError, TypeError) as error:
        return f"refused: {type(error).__name__}: {error}".splitlines()[0]
    return f"wrong: {fault}" if fault else RIGHT


def groups_of(world: int) -> dict[str, list[int]]:
    """The groups of the cases, as global ranks."""
    return {
        "world": list(range(world)),
        "evens": list(range(0, world, 2)),
        "upper": list(range(world // 2, world)),
    }


def play(cases: Sequence[tuple[int, Case]], device: torch.device = CPU) -> list[str | None]:
    """Run all cases in order, on tensors of a device; the result is None where this rank is not a member."""
    warnings.simplefilter("ignore")
    members = groups_of(dist.get_world_size())
    groups = {name: dist.new_group(ranks) for name, ranks in members.items() if name != "world"}
    groups["world"] = dist.group.WORLD
    try:
        return [
            outcome(case, number, groups[case.group], device) if dist.get_rank() in members[case.group] else None
            for number, case in cases
        ]
    finally:
        for name, group in groups.items():
            if name != "world" and dist.get_rank() in members[name]:
                dist.destroy_process_group(group)
