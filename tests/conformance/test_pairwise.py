"""The covering really covers, keeps to what is allowed, is small, and is the same every time."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.pairwise import all_pairs, cover, pairs_of

AXES = {"colour": list("rgbk"), "size": [0, 1, 2], "shape": ["round", "square"], "weight": range(5)}

axes_of_any_shape = st.lists(st.integers(1, 5), min_size=2, max_size=5).map(
    lambda counts: {f"axis{index}": list(range(count)) for index, count in enumerate(counts)}
)


@given(axes_of_any_shape, st.integers(0, 1000))
def test_every_pair_occurs(axes: dict[str, list[int]], seed: int) -> None:
    rows = cover(axes, seed=seed)
    covered = set().union(*(pairs_of(row) for row in rows))
    assert covered == all_pairs(axes, lambda row: True)
    assert len(rows) <= prod(len(values) for values in axes.values())


def test_what_is_not_allowed_does_not_occur_and_the_rest_does() -> None:
    def allowed(row: dict[str, Any]) -> bool:
        return not (row.get("colour") == "k" and row.get("size") == 0)

    rows = cover(AXES, allowed)
    assert all(allowed(row) for row in rows)
    assert set().union(*(pairs_of(row) for row in rows)) == all_pairs(AXES, allowed)


def test_it_is_small_and_repeats() -> None:
    rows = cover(AXES, seed=3)
    assert rows == cover(AXES, seed=3)
    assert len(rows) < 2 * 4 * 5  # the two longest axes need 20; the full product has 120


def test_an_axis_without_a_choice_is_an_error() -> None:
    with pytest.raises(ValueError, match="no value of"):
        cover({"a": [1, 2], "b": [1], "c": [1]}, lambda row: not (row.get("a") == 1 and "b" in row and "c" in row))
