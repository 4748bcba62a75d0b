"""Trees below the root: binomial ones for few bytes, chains for many, binary ones for many in a large group.

A worker's *seat* is its rank counted from the root. Binomial: seat v has the children v + 1, v + 2, v + 4, ... below
its lowest set bit, so the root talks to log P others. Chain and binary tree are pipelined by segment and their
messages down are sealed once, by the root. Reductions take the children in a fixed order.
"""

from __future__ import annotations

from ringfence.collectives.builder import DATA, INPUT, OUTPUT, Draft, rounds, scratch
from ringfence.collectives.schedule import Place

_UP = 0  # labels
_DOWN = 1


def broadcast_binomial(draft: Draft) -> None:
    """DATA becomes the root's; the largest subtree is served first."""
    if draft.seat:
        draft.receive(DATA, draft.seated(binomial_parent(draft.seat)), _DOWN)
    for child in reversed(binomial_children(draft.seat, draft.size)):
        draft.send(DATA, draft.seated(child), _DOWN)


def group_opening(draft: Draft) -> None:
    """DATA becomes the reduction of all: up a binomial tree to rank 0 and down again, sealed for each hop."""
    parent, children = binomial_parent(draft.seat), binomial_children(draft.seat, draft.size)
    for child in children:
        draft.reduce(DATA, draft.seated(child), _UP, DATA, received_first=False)
    if draft.seat:
        draft.send(DATA, draft.seated(parent), _UP)
    broadcast_binomial(draft)


def broadcast_chain(draft: Draft) -> None:
    _pass_down(draft, *_chain(draft))


def broadcast_tree(draft: Draft) -> None:
    _pass_down(draft, *_binary(draft))


def all_reduce_tree(draft: Draft) -> None:
    """DATA becomes the reduction of all: up a binary tree to rank 0 and down again."""
    parent, children = _binary(draft)
    for child in children:
        draft.reduce(DATA, draft.seated(child), _UP, DATA, received_first=False)
    if draft.seat:
        draft.send(DATA, draft.seated(parent), _UP)
    else:
        draft.divide(DATA)
    _pass_down(draft, parent, children)


def reduce_binomial(draft: Draft) -> None:
    """The root's OUTPUT becomes the reduction of every INPUT; elsewhere INPUT stays as it is."""
    _pass_up(draft, binomial_parent(draft.seat), binomial_children(draft.seat, draft.size))


def reduce_chain(draft: Draft) -> None:
    _pass_up(draft, *_chain(draft))


def reduce_tree(draft: Draft) -> None:
    _pass_up(draft, *_binary(draft))


def binomial_parent(seat: int) -> int:
    return seat & (seat - 1)


def binomial_children(seat: int, size: int) -> list[int]:
    """Nearest first. The subtree of seat + 2**k is the 2**k seats from there, as far as they exist."""
    levels = (seat & -seat).bit_length() - 1 if seat else rounds(size)
    return [seat + (1 << level) for level in range(levels) if seat + (1 << level) < size]


def subtree(seat: int, size: int) -> int:
    """How many seats a binomial subtree holds, its own included: those from `seat` on."""
    return min(seat & -seat, size - seat) if seat else size


def _chain(draft: Draft) -> tuple[int, list[int]]:
    return draft.seat - 1, [draft.seat + 1] if draft.seat + 1 < draft.size else []


def _binary(draft: Draft) -> tuple[int, list[int]]:
    first = 2 * draft.seat + 1
    return (draft.seat - 1) // 2, [child for child in (first, first + 1) if child < draft.size]


def _pass_down(draft: Draft, parent: int, children: list[int]) -> None:
    origin = draft.forwarded(draft.root)
    if draft.seat:
        draft.receive(DATA, draft.seated(parent), _DOWN, origin)
    for child in children:
        draft.send(DATA, draft.seated(child), _DOWN, origin)


def _pass_up(draft: Draft, parent: int, children: list[int]) -> None:
    # The root's OUTPUT may be its INPUT: each segment of INPUT is read by the step that first writes it, not later.
    mine = INPUT
    for child in children:
        sums = _sums(draft) if mine == INPUT else mine
        draft.reduce(sums, draft.seated(child), _UP, mine, received_first=False)
        mine = sums
    if draft.seat:
        draft.send(mine, draft.seated(parent), _UP)
    elif children:
        draft.divide(OUTPUT)
    else:
        draft.copy(OUTPUT, INPUT)


def _sums(draft: Draft) -> Place:
    return scratch(draft.scratch([INPUT])) if draft.seat else OUTPUT
