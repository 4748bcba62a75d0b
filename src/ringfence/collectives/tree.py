"""Trees: binomial for small messages, chains for large ones, binary trees for large ones in a large group.

Ranks are relative to the root. Binomial: relative rank v has the children v + 1, v + 2, v + 4, ... below its lowest set
bit, so the root has links to log P others. Chain and binary tree are pipelined by segment, and the root seals their
messages downwards once. Reductions take the children in a fixed order.
"""

from __future__ import annotations

from ringfence.collectives.builder import DATA, INPUT, OUTPUT, Builder, rounds, scratch
from ringfence.collectives.schedule import Place

_UP = 0  # labels
_DOWN = 1


def broadcast_binomial(builder: Builder) -> None:
    """DATA becomes the root's; the largest subtree is sent to first."""
    if builder.relative_rank:
        builder.receive(DATA, builder.rank_at(binomial_parent(builder.relative_rank)), _DOWN)
    for child in reversed(binomial_children(builder.relative_rank, builder.size)):
        builder.send(DATA, builder.rank_at(child), _DOWN)


def group_opening(builder: Builder) -> None:
    """DATA becomes the reduction of all: up a binomial tree to rank 0 and down again, sealed for each hop."""
    parent, children = binomial_parent(builder.relative_rank), binomial_children(builder.relative_rank, builder.size)
    for child in children:
        builder.reduce(DATA, builder.rank_at(child), _UP, DATA, received_first=False)
    if builder.relative_rank:
        builder.send(DATA, builder.rank_at(parent), _UP)
    broadcast_binomial(builder)


def broadcast_chain(builder: Builder) -> None:
    _send_down(builder, *_chain(builder))


def broadcast_tree(builder: Builder) -> None:
    _send_down(builder, *_binary(builder))


def reduce_binomial(builder: Builder) -> None:
    """The root's OUTPUT becomes the reduction of every INPUT; INPUT is unchanged."""
    _reduce_up(builder, binomial_parent(builder.relative_rank), binomial_children(builder.relative_rank, builder.size))


def reduce_chain(builder: Builder) -> None:
    _reduce_up(builder, *_chain(builder))


def reduce_tree(builder: Builder) -> None:
    _reduce_up(builder, *_binary(builder))


def binomial_parent(relative_rank: int) -> int:
    return relative_rank & (relative_rank - 1)


def binomial_children(relative_rank: int, size: int) -> list[int]:
    """The children, nearest first. The subtree at relative_rank + 2**k has the 2**k relative ranks from there that exist."""
    levels = (relative_rank & -relative_rank).bit_length() - 1 if relative_rank else rounds(size)
    return [relative_rank + (1 << level) for level in range(levels) if relative_rank + (1 << level) < size]


def subtree_size(relative_rank: int, size: int) -> int:
    """The size of a binomial subtree: it has the relative ranks from `relative_rank` on."""
    return min(relative_rank & -relative_rank, size - relative_rank) if relative_rank else size


def _chain(builder: Builder) -> tuple[int, list[int]]:
    return builder.relative_rank - 1, [builder.relative_rank + 1] if builder.relative_rank + 1 < builder.size else []


def _binary(builder: Builder) -> tuple[int, list[int]]:
    first = 2 * builder.relative_rank + 1
    return (builder.relative_rank - 1) // 2, [child for child in (first, first + 1) if child < builder.size]


def _send_down(builder: Builder, parent: int, children: list[int]) -> None:
    origin = builder.forwarded(builder.root)
    if builder.relative_rank:
        builder.receive(DATA, builder.rank_at(parent), _DOWN, origin)
    for child in children:
        builder.send(DATA, builder.rank_at(child), _DOWN, origin)


def _reduce_up(builder: Builder, parent: int, children: list[int]) -> None:
    reduce_up(builder, builder.rank_at(parent), [builder.rank_at(child) for child in children])


def reduce_up(builder: Builder, parent: int, children: list[int]) -> None:
    """Reduce what the children send, and this rank's INPUT, to the root's OUTPUT or to what the parent is sent."""
    # The root's OUTPUT may be its INPUT: the step that first writes a segment also reads INPUT; later steps do not.
    mine = INPUT
    for child in children:
        sums = _sum_place(builder) if mine == INPUT else mine
        builder.reduce(sums, child, _UP, mine, received_first=False)
        mine = sums
    if builder.relative_rank:
        builder.send(mine, parent, _UP)
    elif children:
        builder.divide(OUTPUT)
    else:
        builder.copy(OUTPUT, INPUT)


def _sum_place(builder: Builder) -> Place:
    return scratch(builder.scratch([INPUT])) if builder.relative_rank else OUTPUT
