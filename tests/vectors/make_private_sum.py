"""Prints the vectors of spec/private-sum.md: `python -m tests.vectors.make_private_sum > tests/vectors/private-sum.json`."""

from __future__ import annotations

import json
from typing import Any, Final

import torch

from ringfence import keys
from ringfence.keys import Secret
from ringfence.private_sums.agreement import vote_of
from ringfence.private_sums.fixed_point import FixedPoint
from ringfence.private_sums.graph import member_edges, worker_edges
from ringfence.private_sums.masks import Keystreams, Pair
from ringfence.private_sums.pairs import layout_digest
from ringfence.private_sums.summing import terms_of
from ringfence.runtime.communicator import group_digest

MEMBERS: Final = {"clinic-a": (0, 3), "clinic-b": (1,), "clinic-c": (2, 4)}
COLLUDING: Final = 1
CALL: Final = 7
BOUNDS: Final = [(0.75, 5, torch.int32), (8.0, 3, torch.int32), (1e-30, 4, torch.int64), (0.3, 16, torch.int64)]
VALUES: Final = [[0.5, -0.75, 0.1], [0.25, 0.75, -0.1], [-0.125, 0.75, 0.2], [0.0, 0.75, 0.3], [0.75, 0.7, 1e-9]]


def fixed(name: str) -> bytes:
    """Reproducible bytes: SHA-256 of a name."""
    return keys.digest(b"ringfence test vector\0", name.encode())


def vectors() -> dict[str, Any]:
    ranks = tuple(sorted(rank for workers in MEMBERS.values() for rank in workers))
    group = group_digest("clinics", ranks)
    edges = worker_edges(list(MEMBERS.values()), COLLUDING + 1)
    layout = layout_digest(group, MEMBERS, edges)
    session_key = Secret(fixed("session key"))
    draws = {(low, high): fixed(f"draw of {low}") + fixed(f"draw of {high}") for low, high in edges}
    seeds = {pair: keys.private_sum_seed(session_key, drawn, layout, pair) for pair, drawn in draws.items()}
    form = FixedPoint.fit(torch.float32, torch.int32, 0.75, len(ranks))
    contributions = []
    for rank in ranks:
        pairs = [Pair(seed, rank == low) for (low, high), seed in seeds.items() if rank in (low, high)]
        found, within = form.encode(torch.tensor(VALUES[rank]), Keystreams(pairs, CALL))
        assert within
        contributions.append(found)
    terms = terms_of(CALL, torch.tensor(VALUES[0]), form)
    total = torch.stack(contributions).sum(0, dtype=torch.int32)
    return {
        "group_digest": group.hex(),
        "members": {name: list(workers) for name, workers in MEMBERS.items()},
        "colluding": COLLUDING,
        "pairs": [list(edge) for edge in edges],
        "circulant": {
            f"{count} members, degree {degree}": [list(edge) for edge in member_edges(count, degree)]
            for count, degree in ((3, 2), (6, 2), (6, 3), (7, 3), (8, 4), (5, 6))
        },
        "layout": layout.hex(),
        "session_key": session_key.reveal().hex(),
        "draws": [drawn.hex() for drawn in draws.values()],
        "seeds": [seed.reveal().hex() for seed in seeds.values()],
        "call": CALL,
        "mask_keys": [keys.private_sum_mask(seed, CALL)[0].hex() for seed in seeds.values()],
        "fixed_point": [
            {
                "bound": bound,
                "workers": count,
                "integers": str(dtype),
                "exponent": each.exponent,
                "largest": each.largest,
            }
            for bound, count, dtype in BOUNDS
            for each in [FixedPoint.fit(torch.float64, dtype, bound, count)]
        ],
        "bound": 0.75,
        "values": VALUES,
        "contributions": [each.tolist() for each in contributions],
        "sum_in_steps": total.tolist(),
        "sum": form.decode(total, torch.float32).tolist(),
        "terms": terms.hex(),
        "votes": {"agrees": vote_of(terms, 0), "group rank 2 refuses": vote_of(terms, 3)},
    }


if __name__ == "__main__":
    print(json.dumps(vectors(), indent=2))
