"""All ranks go on, or all refuse, before anything of a tensor is sent (spec/private-sum.md, 6)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ringfence import keys
from ringfence.errors import PrivateSumError


def agree(group: Any, terms: bytes, refusal: Exception | None) -> None:
    """Compare terms with all ranks of a group, and learn whether one of them objects.

    An all-reduce of three integers: the highest rank that objects, and whether all have the same terms. Peers see which rank
    objects, and nothing else of its values. `refusal` is any error of this rank, so that none waits for one that has failed.

    Raises:
        PrivateSumError: A rank objects, or two have different terms; on every rank.
    """
    vote = torch.tensor(vote_of(terms, group.rank() + 1 if refusal else 0), dtype=torch.int64, device="cpu")
    group.allreduce([vote], op=dist.ReduceOp.MAX).wait()  # a coalescing manager would put dist.all_reduce off
    objecting, most, least = (int(each) for each in vote)
    if isinstance(refusal, PrivateSumError):
        raise refusal
    if refusal:
        raise PrivateSumError(f"{type(refusal).__name__}: {refusal}. Nothing was sent") from refusal
    if objecting:
        worker = group._ranks[objecting - 1]
        raise PrivateSumError(f"worker {worker} refused this private sum, and its error says why; nothing was sent")
    if most != -least:
        raise PrivateSumError(
            "the ranks call private sums with different arguments (dtype, number of elements, bound, fixed), or one has made "
            "another number of them; nothing was sent"
        )


def vote_of(terms: bytes, objecting: int) -> list[int]:
    """Return what a rank sends: its own number, counted from 1, or 0; a short digest of the terms, and its negative."""
    short = int.from_bytes(keys.digest(keys.PRIVATE_SUM_TERMS, terms)[:7], "big")
    return [objecting, short, -short]
