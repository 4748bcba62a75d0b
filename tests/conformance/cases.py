"""The cases of the conformance tests: collectives, tensors and groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from allpairspy import AllPairs

from ringfence.cli.selftest import conformance
from ringfence.cli.selftest.conformance import LAYOUTS, MODES, Case

# Two are played on devices only, beside the ones named here. Objects on the host have tests of their own; Gloo refuses a
# coalescing manager that is given a device, and torch then sends nothing more over that group.
ON_DEVICES = {"all_reduce_coalesced": "coalescing_manager", "all_gather": "all_gather_object"}
REDUCING = tuple(name for name in conformance.REDUCING if name not in ON_DEVICES.values())
MOVING = tuple(name for name in conformance.MOVING if name not in ON_DEVICES.values())
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)
BITWISE = ("BAND", "BOR", "BXOR")
ORDERED = ("SUM", "PRODUCT", "MIN", "MAX")
OPS = (*ORDERED, *BITWISE, "AVG")
# Which operations are defined for which types: complex numbers have no order, floats no bits, booleans no average.
DEFINED = (
    (("bool",), (*ORDERED, *BITWISE)),
    (INTEGERS, OPS),
    (FLOATS, (*ORDERED, "AVG")),
    (COMPLEX, ("SUM", "AVG")),
)
SIZES = (0, 1, 1237, 70_001)
WORLDS = (1, 2, 3, 4, 5, 6, 7, 8)
GROUPS = ("world", "evens", "upper")
LARGE = 64 * 2**20 // 4  # 64 MiB of float32


def is_defined(op: str, dtype: str) -> bool:
    """Whether a reduction is defined for a type."""
    return any(dtype in dtypes and op in ops for dtypes, ops in DEFINED)


def pairwise_cases() -> list[Case]:
    """Cases in which every valid pair of values of two parameters occurs (pairwise testing).

    `AllPairs` misses pairs when it filters, so each class of types, with the operations defined for it, is covered by itself.
    """
    common = {"size": SIZES, "layout": LAYOUTS, "world": WORLDS, "mode": MODES, "group": GROUPS}
    parameters: list[Mapping[str, Sequence[Any]]] = [{"collective": MOVING, "op": ("",), "dtype": DTYPES, **common}]
    parameters += [{"collective": REDUCING, "op": ops, "dtype": dtypes, **common} for dtypes, ops in DEFINED]
    return [
        Case(**dict(zip(names, row, strict=True))) for names in parameters for row in AllPairs(list(names.values()))
    ]


def every_type(world: int) -> list[Case]:
    """Every type with every operation defined for it: finds errors in the tables of types and operations."""
    moving = [("", dtype, collective) for collective in MOVING for dtype in DTYPES]
    reducing = [(op, dtype, collective) for collective in REDUCING for dtype in DTYPES for op in OPS]
    return [
        Case(collective, dtype, op, 37, "plain", world, "sync", "world")
        for op, dtype, collective in (*reducing, *moving)
        if not op or is_defined(op, dtype)
    ]


def every_view(world: int) -> list[Case]:
    """Every collective on every kind of view, with every way to wait."""
    return [
        Case(collective, "float32", "SUM" if collective in REDUCING else "", 1237, layout, world, mode, "world")
        for collective in (*REDUCING, *MOVING)
        for layout in LAYOUTS
        for mode in MODES
    ]


def on_devices(cases: list[Case]) -> list[Case]:
    """The cases, with those of the collectives that are played on devices only."""
    further = [replace(each, collective=ON_DEVICES[each.collective]) for each in cases if each.collective in ON_DEVICES]
    return cases + further


def large_cases(world: int, elements: int = LARGE) -> list[Case]:
    """64 MiB on each rank, or as many elements as given."""
    part = elements // world
    return [
        Case("all_reduce", "float32", "SUM", elements, "plain", world, "sync", "world"),
        Case("broadcast", "float32", "", elements, "plain", world, "sync", "world"),
        Case("reduce_scatter_tensor", "float32", "SUM", part, "plain", world, "sync", "world"),
        Case("all_gather_into_tensor", "float32", "", part, "plain", world, "sync", "world"),
        Case("all_to_all_single", "float32", "", part, "plain", world, "sync", "world"),
        Case("send_recv", "float32", "", elements, "plain", world, "sync", "world"),
    ]
