"""What a join waits for, in words: for a warning while it waits, and for its error at the deadline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ringfence.admission.entry import Entry, format_address
from ringfence.admission.tree import Tree
from ringfence.join.parent import Search

# Workers that cannot find each other try in silence: say what is amiss.
FIRST_WARNING: Final = 15.0  # seconds; longer than the longest attempt of an unauthenticated peer without evidence
NEXT_WARNING: Final = 60.0
_NAMED: Final = 16  # ranks in a text


def explain(
    entry: Entry,
    address: tuple[str, int],
    tree: Tree,
    search: Search | None,
    refused: Mapping[int, str],
    now: float,
) -> str:
    """Who is missing, why, as far as it is known here, and, where it is not, what to look at.

    `address` is where others reach this worker. `refused`: why workers that claimed these ranks were refused, or this one was.
    """
    waiting = tree.waiting
    ranks = list(waiting.ranks) if waiting else tree.missing()
    missing = waiting.missing if waiting else len(ranks)
    parts = []
    if search is not None:
        parts.append(f"rank {entry.rank} did not get to its parent, rank {search.parent}: {search.trouble(now)}")
    if missing:
        named = ", ".join(map(str, ranks[:_NAMED])) + (", ..." if missing > _NAMED else "")
        parts.append(f"{missing} of {entry.world_size} workers are missing: rank {named}")
    elif search is None:
        parts.append(tree.awaited())
    parts += [f"rank {entry.rank} {text}" for _, text in sorted(refused.items())]
    parts.append(f"rank {entry.rank} itself is at {format_address(address)}")
    searched = [search.parent] if search is not None else ranks if len(ranks) == missing else []
    cause_is_known = entry.rank in refused or (searched and refused.keys() >= set(searched))
    if not cause_is_known:
        parts.append(
            "see that all run, have the same RINGFENCE_RUN_ID and RINGFENCE_GENERATION, hold the same secret or policy and can "
            "reach each other (RINGFENCE_INTERFACE)"
        )
    return "; ".join(parts)
