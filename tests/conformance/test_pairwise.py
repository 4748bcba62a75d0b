"""The cases of `pairwise_cases` cover every valid pair of parameter values."""

from __future__ import annotations

from dataclasses import asdict
from itertools import combinations, product
from typing import Any

from tests.conformance import cases
from tests.conformance.cases import is_defined, pairwise_cases

COMMON = {"dtype": cases.DTYPES, "size": cases.SIZES, "layout": cases.LAYOUTS, "world": cases.WORLDS}
COMMON |= {"mode": cases.MODES, "group": cases.GROUPS}  # type: ignore[dict-item]


def pairs_to_cover(parameters: dict[str, Any]) -> set[frozenset[tuple[str, Any]]]:
    return {
        frozenset(((one, left), (two, right)))
        for one, two in combinations(parameters, 2)
        for left, right in product(parameters[one], parameters[two])
        if {one, two} != {"op", "dtype"} or not left or is_defined(left, right)
    }


def test_every_valid_pair_of_values_occurs() -> None:
    covered = {frozenset(pair) for case in pairwise_cases() for pair in combinations(asdict(case).items(), 2)}
    reducing = {"op": cases.OPS, "collective": cases.REDUCING, **COMMON}
    moving = {"op": ("",), "collective": cases.MOVING, **COMMON}
    assert pairs_to_cover(reducing) | pairs_to_cover(moving) <= covered


def test_only_defined_reductions_occur() -> None:
    assert all(is_defined(case.op, case.dtype) for case in pairwise_cases() if case.op)


def test_the_cases_are_few_and_deterministic() -> None:
    assert pairwise_cases() == pairwise_cases()
    assert len(pairwise_cases()) < 400  # of more than 400,000 combinations
