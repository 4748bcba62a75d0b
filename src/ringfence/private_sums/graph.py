"""Which workers share a mask: a circulant graph of members, and a path inside each member (spec/private-sum.md, 3).

A member is one organisation, and may have several workers. With at most t members colluding, the workers of all others stay
connected: the graph of members is (t + 1)-connected, and a path connects the workers of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Edge = tuple[int, int]  # two ranks, the lower one first


def member_edges(members: int, degree: int) -> list[Edge]:
    """Return the edges of a circulant graph of least this degree, by the places of members.

    With an odd degree and an odd number of members there is none of that degree, and the next one is taken. A degree of
    `members` - 1 or more gives all pairs.
    """
    offsets = list(range(1, min(degree // 2, members // 2) + 1))
    if degree % 2 and len(offsets) < members // 2:
        offsets.append(len(offsets) + 1 if members % 2 else members // 2)
    edges = {tuple(sorted((place, (place + offset) % members))) for offset in offsets for place in range(members)}
    return sorted((low, high) for low, high in edges)


def worker_edges(members: Sequence[Sequence[int]], degree: int) -> list[Edge]:
    """Return the pairs of workers that share a mask. `members`: the ranks of each member's workers.

    The edges of a member are spread over its workers in turn, so that each computes about as many masks.
    """
    found: list[Edge] = []
    used = [0] * len(members)
    for places in member_edges(len(members), degree):
        ends = []
        for place in places:
            workers = members[place]
            ends.append(workers[used[place] % len(workers)])
            used[place] += 1
        found.append((min(ends), max(ends)))
    found += [(min(pair), max(pair)) for workers in members for pair in pairwise(workers)]
    return sorted(found)
