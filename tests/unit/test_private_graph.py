"""Which workers share a mask: what any colluding members learn is the sum of the others, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest

from ringfence.private_sums.graph import Edge, member_edges, worker_edges


def ones_of(workers: Sequence[int]) -> list[tuple[int, ...]]:
    """Each worker is a member of its own."""
    return [(worker,) for worker in workers]


def learned(members: Sequence[Sequence[int]], edges: Sequence[Edge], colluding: Sequence[int], prime: int) -> int:
    """Return how many independent sums of the other members' contributions some colluding members can solve for.

    They hold a linear equation for each other worker: what it sent is its contribution plus or minus its masks. Masks that it
    shares with them are known. A combination of the equations says something of the contributions alone if it cancels all other
    masks, so the answer is the number of equations less the rank of these masks' coefficients, modulo a prime.
    """
    ours = {worker for place in colluding for worker in members[place]}
    others = [worker for workers in members for worker in workers if worker not in ours]
    hidden = [edge for edge in edges if not ours & set(edge)]
    rows = [[(worker == low) - (worker == high) for low, high in hidden] for worker in others]
    return len(others) - rank_of(rows, prime)


def rank_of(rows: list[list[int]], prime: int) -> int:
    """Return the rank of a matrix modulo a prime."""
    rows, rank = [[value % prime for value in row] for row in rows], 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((index for index in range(rank, len(rows)) if rows[index][column]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        inverse = pow(rows[rank][column], -1, prime)
        for index in range(rank + 1, len(rows)):
            factor = rows[index][column] * inverse % prime
            if factor:
                rows[index] = [(a - factor * b) % prime for a, b in zip(rows[index], rows[rank], strict=True)]
        rank += 1
    return rank


def most_learned(members: Sequence[Sequence[int]], degree: int, colluding: int, prime: int) -> int:
    edges = worker_edges(members, degree)
    sets = (each for size in range(colluding + 1) for each in combinations(range(len(members)), size))
    return max(learned(members, edges, each, prime) for each in sets)


SIZES = [*range(3, 8), *(pytest.param(count, marks=pytest.mark.slow) for count in range(8, 13))]


@pytest.mark.promise(
    "Colluding members, up to the number in the policy, learn the sum of a private sum and nothing else."
)
@pytest.mark.parametrize("count", SIZES)
def test_any_colluding_members_learn_the_sum_only(count: int) -> None:
    """Every set of up to t members, for every t. Masks are integers modulo 2**32: modulo 2 no more can be solved."""
    for colluding in range(1, count - 1):
        assert most_learned(ones_of(range(count)), colluding + 1, colluding, 2) == 1


@pytest.mark.parametrize("count", [4, 5, 6, 7])
def test_one_mask_less_would_let_them_learn_more(count: int) -> None:
    """The check above can fail: with a circulant graph of degree t, t members surround another."""
    for colluding in range(2, count - 1, 2):
        assert most_learned(ones_of(range(count)), colluding, colluding, 2**61 - 1) == 2


@pytest.mark.promise(
    "Colluding members, up to the number in the policy, learn the sum of a private sum and nothing else."
)
@pytest.mark.parametrize(
    "members",
    [
        [(0, 1), (2,), (3,)],
        [(0, 3), (1, 4), (2, 5)],
        [(0, 1, 2, 3), (4,), (5, 6), (7,)],
        [(0, 5), (1, 6), (2, 7), (3, 8), (4, 9)],
    ],
    ids=str,
)
@pytest.mark.parametrize("prime", [2, 2**61 - 1])
def test_workers_of_a_member_count_as_one(members: Sequence[Sequence[int]], prime: int) -> None:
    for colluding in range(1, len(members) - 1):
        assert most_learned(members, colluding + 1, colluding, prime) == 1


def test_without_paths_inside_members_layers_would_show() -> None:
    """Two workers of each member that share masks only with those of the same place give two sums."""
    members = [(0, 3), (1, 4), (2, 5)]
    layers = [(0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5)]
    assert learned(members, layers, (), 2) == 2


@pytest.mark.parametrize("count", range(2, 14))
def test_degrees_are_those_asked_for(count: int) -> None:
    for degree in range(1, count + 2):
        edges = member_edges(count, degree)
        assert edges == sorted(set(edges))
        assert all(low < high for low, high in edges)
        even = degree if degree % 2 == 0 or count % 2 == 0 else degree + 1  # no graph has an odd sum of degrees
        assert {sum(place in edge for edge in edges) for place in range(count)} == {min(even, count - 1)}


def test_masks_are_spread_over_the_workers_of_a_member() -> None:
    members = [(0, 1, 2), (3,), (4,), (5,), (6,), (7,)]
    edges = worker_edges(members, 3)
    outside = [sum(worker in edge and max(edge) > 2 for edge in edges) for worker in members[0]]
    assert outside == [1, 1, 1]
