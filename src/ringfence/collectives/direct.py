"""Direct exchanges: every part goes straight to where it belongs; the least bytes, but up to P - 1 links."""

from __future__ import annotations

from ringfence.collectives.builder import INPUT, OUTPUT, Draft, slice_of
from ringfence.collectives.schedule import Buffer


def gather(draft: Draft) -> None:
    """The root's OUTPUT part r becomes rank r's INPUT."""
    if draft.seat:
        draft.send(INPUT, draft.root, 0)
        return
    draft.copy(slice_of(Buffer.OUTPUT, draft.rank), INPUT)
    for seat in range(1, draft.size):
        draft.receive(slice_of(Buffer.OUTPUT, draft.seated(seat)), draft.seated(seat), 0)


def scatter(draft: Draft) -> None:
    """OUTPUT becomes this rank's part of the root's INPUT."""
    if draft.seat:
        draft.receive(OUTPUT, draft.root, 0)
        return
    for seat in range(1, draft.size):
        draft.send(slice_of(Buffer.INPUT, draft.seated(seat)), draft.seated(seat), 0)
    draft.copy(OUTPUT, slice_of(Buffer.INPUT, draft.rank))


def all_to_all(draft: Draft) -> None:
    """OUTPUT part r becomes rank r's INPUT part of this rank. Parts may be of any length, on any rank.

    At each turn all send to a different worker, so that nobody is met by all at once.
    """
    rank, size = draft.rank, draft.size
    for turn in range(1, size):
        target, source = (rank + turn) % size, (rank - turn) % size
        draft.send(slice_of(Buffer.INPUT, target), target, 0)
        draft.receive(slice_of(Buffer.OUTPUT, source), source, 0)
    draft.copy(slice_of(Buffer.OUTPUT, rank), slice_of(Buffer.INPUT, rank))
