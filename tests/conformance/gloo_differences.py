"""Valid cases that Gloo (torch 2.13) refuses or answers incorrectly.

Found by running the contract against it; the suite asserts each entry on Gloo, so that an entry that no longer holds
is noticed. ringfence has no such table: it answers every case rightly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.conformance.cases import COMPLEX, INTEGERS, Case


class Difference(NamedTuple):
    reason: str
    applies: Callable[[Case], bool]
    outcome: str  # "refused": on every rank; "wrong": on at least one rank
    text: str  # part of the ranks' reports


def _strided(case: Case) -> bool:
    return case.layout in ("transposed", "every_second")


# The first entry that matches applies.
DIFFERENCES = (
    Difference(
        "lists of tensors of different lengths are not taken",
        lambda case: case.collective in ("all_gather_uneven", "all_to_all_uneven"),
        "refused",
        "invalid tensor size",
    ),
    Difference(
        "point-to-point on strided views",
        lambda case: case.collective == "send_recv" and _strided(case),
        "refused",
        "has to be contiguous",
    ),
    Difference(
        "all_to_all_single on strided views",
        lambda case: case.collective.startswith("all_to_all_single") and _strided(case),
        "refused",
        "Tensors must be contiguous",
    ),
    Difference(
        "16-bit integers, except point-to-point",
        lambda case: case.dtype == "int16" and case.collective != "send_recv",
        "refused",
        "Invalid scalar type",
    ),
    Difference(
        "averages of integers",
        lambda case: case.op == "AVG" and case.dtype in INTEGERS,
        "refused",
        "can't be cast to the desired output type",
    ),
    Difference(
        "complex numbers in gather",
        lambda case: case.dtype in COMPLEX and case.collective == "gather",
        "refused",
        "Invalid scalar type",
    ),
    Difference(
        "the future of a reduce-scatter",
        lambda case: case.collective.startswith("reduce_scatter") and case.mode == "future",
        "refused",
        "getFuture not implemented",
    ),
    Difference(
        "views with gaps: the memory is taken as if it had none",
        lambda case: (
            case.layout == "every_second"
            and case.collective in ("all_reduce", "reduce", "reduce_scatter", "broadcast", "scatter")
        ),
        "wrong",
        "elements differ",
    ),
    Difference(
        "reduce leaves partial sums in the tensors of ranks that are not the destination",
        lambda case: case.collective == "reduce",
        "wrong",
        "an input was changed",
    ),
)


def difference(case: Case) -> Difference | None:
    """The difference of Gloo in this case, if any."""
    return next((entry for entry in DIFFERENCES if entry.applies(case)), None)
