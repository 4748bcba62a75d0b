"""Trees below the root: binomial ones for few bytes, chains for many, binary ones for many in a large group.

A worker's *seat* is its rank counted from the root. Binomial: seat v has the children v + 1, v + 2, v + 4, ... below
its lowest set bit, so the root talks to log P others. Chain and binary tree are pipelined by segment and their
messages down are sealed once, by the root. Reductions take the children in a fixed order.
"""

from __future__ import annotations

from ringfence.collectives.builder import DATA, INPUT, OUTPUT, Builder, rounds, scratch
from ringfence.collectives.schedule import Place

_UP = 0  # labels
_DOWN = 1


def broadcast_binomial(builder: Builder) -> None:
    """DATA becomes the root's; the largest subtree is served first."""
    if builder.seat:
        builder.receive(DATA, builder.seated(binomial_parent(builder.seat)), _DOWN)
    for child in reversed(binomial_children(builder.seat, builder.size)):
        builder.send(DATA, builder.seated(child), _DOWN)


def group_opening(builder: Builder) -> None:
    """DATA becomes the reduction of all: up a binomial tree to rank 0 and down again, sealed for each hop."""
    parent, children = binomial_parent(builder.seat), binomial_children(builder.seat, builder.size)
    for child in children:
        builder.reduce(DATA, builder.seated(child), _UP, DATA, received_first=False)
    if builder.seat:
        builder.send(DATA, builder.seated(parent), _UP)
    broadcast_binomial(builder)


def broadcast_chain(builder: Builder) -> None:
    _pass_down(builder, *_chain(builder))


def broadcast_tree(builder: Builder) -> None:
    _pass_down(builder, *_binary(builder))


def all_reduce_tree(builder: Builder) -> None:
    """DATA becomes the reduction of all: up a binary tree to rank 0 and down again."""
    parent, children = _binary(builder)
    for child in children:
        builder.reduce(DATA, builder.seated(child), _UP, DATA, received_first=False)
    if builder.seat:
        builder.send(DATA, builder.seated(parent), _UP)
    else:
        builder.divide(DATA)
    _pass_down(builder, parent, children)


def reduce_binomial(builder: Builder) -> None:
    """The root's OUTPUT becomes the reduction of every INPUT; elsewhere INPUT stays as it is."""
    _pass_up(builder, binomial_parent(builder.seat), binomial_children(builder.seat, builder.size))


def reduce_chain(builder: Builder) -> None:
    _pass_up(builder, *_chain(builder))


def reduce_tree(builder: Builder) -> None:
    _pass_up(builder, *_binary(builder))


def binomial_parent(seat: int) -> int:
    return seat & (seat - 1)


def binomial_children(seat: int, size: int) -> list[int]:
    """Nearest first. The subtree of seat + 2**k is the 2**k seats from there, as far as they exist."""
    levels = (seat & -seat).bit_length() - 1 if seat else rounds(size)
    return [seat + (1 << level) for level in range(levels) if seat + (1 << level) < size]


def subtree(seat: int, size: int) -> int:
    """How many seats a binomial subtree holds, its own included: those from `seat` on."""
    return min(seat & -seat, size - seat) if seat else size


def _chain(builder: Builder) -> tuple[int, list[int]]:
    return builder.seat - 1, [builder.seat + 1] if builder.seat + 1 < builder.size else []


def _binary(builder: Builder) -> tuple[int, list[int]]:
    first = 2 * builder.seat + 1
    return (builder.seat - 1) // 2, [child for child in (first, first + 1) if child < builder.size]


def _pass_down(builder: Builder, parent: int, children: list[int]) -> None:
    origin = builder.forwarded(builder.root)
    if builder.seat:
        builder.receive(DATA, builder.seated(parent), _DOWN, origin)
    for child in children:
        builder.send(DATA, builder.seated(child), _DOWN, origin)


def _pass_up(builder: Builder, parent: int, children: list[int]) -> None:
    # The root's OUTPUT may be its INPUT: each segment of INPUT is read by the step that first writes it, not later.
    mine = INPUT
    for child in children:
        sums = _sums(builder) if mine == INPUT else mine
        builder.reduce(sums, builder.seated(child), _UP, mine, received_first=False)
        mine = sums
    if builder.seat:
        builder.send(mine, builder.seated(parent), _UP)
    elif children:
        builder.divide(OUTPUT)
    else:
        builder.copy(OUTPUT, INPUT)


def _sums(builder: Builder) -> Place:
    return scratch(builder.scratch([INPUT])) if builder.seat else OUTPUT
