"""The cases of the contract: which collectives, on which tensors, in which groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.conformance.pairwise import cover

REDUCING = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor")
MOVING = (
    "broadcast",
    "all_gather",
    "all_gather_uneven",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_uneven",
    "all_to_all_single",
    "all_to_all_single_uneven",
    "send_recv",
)
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)
BITWISE = ("BAND", "BOR", "BXOR")
OPS = ("SUM", "PRODUCT", "MIN", "MAX", *BITWISE, "AVG")
SIZES = (0, 1, 1237, 70_001)
LAYOUTS = ("plain", "offset", "transposed", "every_second")
WORLDS = (1, 2, 3, 4, 5, 6, 7, 8)
MODES = ("sync", "async", "future")
GROUPS = ("world", "evens", "upper")
LARGE = 64 * 2**20 // 4  # 64 MiB of float32


@dataclass(frozen=True)
class Case:
    """One call of one collective by all members of a group."""

    collective: str
    dtype: str
    op: str  # empty where nothing is reduced
    size: int  # elements in each rank's share (times three rows where transposed)
    layout: str
    world: int
    mode: str
    group: str

    def __str__(self) -> str:
        what = f"{self.collective} {self.op}".strip()
        where = f"world {self.world}, {self.group}, {self.mode}"
        return f"{what}, {self.dtype} x {self.size}, {self.layout}, {where}"


def means_something(row: dict[str, Any]) -> bool:
    """Whether an operation is defined for a type: complex numbers have no order, floats no bits, booleans no average."""
    dtype, op = row.get("dtype"), row.get("op")
    if dtype is None or op is None:
        return True
    if dtype in COMPLEX:
        return op in ("SUM", "AVG")
    if dtype in FLOATS:
        return op not in BITWISE
    return not (op == "AVG" and dtype == "bool")


def pairwise_cases() -> list[Case]:
    """Every pair of values of two axes, for the collectives that reduce and for those that only move."""
    common = {"dtype": DTYPES, "size": SIZES, "layout": LAYOUTS, "world": WORLDS, "mode": MODES, "group": GROUPS}
    reducing = cover({"collective": REDUCING, "op": OPS, **common}, means_something, seed=1)
    moving = cover({"collective": MOVING, "op": ("",), **common}, seed=2)
    return [Case(**row) for row in (*reducing, *moving)]


def every_type(world: int) -> list[Case]:
    """All types and operations that mean something: what a wrong table of them would get wrong."""
    moving = [("", dtype, collective) for collective in MOVING for dtype in DTYPES]
    reducing = [(op, dtype, collective) for collective in REDUCING for dtype in DTYPES for op in OPS]
    return [
        Case(collective, dtype, op, 37, "plain", world, "sync", "world")
        for op, dtype, collective in (*reducing, *moving)
        if not op or means_something({"dtype": dtype, "op": op})
    ]


def every_view(world: int) -> list[Case]:
    """Every collective on every kind of view, waited for in every way."""
    return [
        Case(collective, "float32", "SUM" if collective in REDUCING else "", 1237, layout, world, mode, "world")
        for collective in (*REDUCING, *MOVING)
        for layout in LAYOUTS
        for mode in MODES
    ]


def large_cases(world: int) -> list[Case]:
    """64 MiB on each rank."""
    share = LARGE // world
    return [
        Case("all_reduce", "float32", "SUM", LARGE, "plain", world, "sync", "world"),
        Case("broadcast", "float32", "", LARGE, "plain", world, "sync", "world"),
        Case("reduce_scatter_tensor", "float32", "SUM", share, "plain", world, "sync", "world"),
        Case("all_gather_into_tensor", "float32", "", share, "plain", world, "sync", "world"),
        Case("all_to_all_single", "float32", "", share, "plain", world, "sync", "world"),
        Case("send_recv", "float32", "", LARGE, "plain", world, "sync", "world"),
    ]
