"""Passes: a large collective is executed piece by piece, which bounds the memory for ciphertext, sums and staging.

Each pass runs the whole schedule. The rule depends only on values that all ranks share, so all divide a collective alike,
wherever their tensors are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, overload

from ringfence.collectives.schedule import Collective

PASS_BYTES: Final = 16 << 20  # the most memory of a pass: of a tensor, or of all parts together
PASSES_AT_ONCE: Final = 4  # of one group and channel, of one or of several collectives
SEGMENTS_PER_PASS: Final = 64  # the most segments of a message in a pass: segment numbers of pass p begin at 64 p
_ALIGNED: Final = 64  # a pass begins at a multiple of every element's size
_ALL: Final = 1 << 62  # bytes of the only pass
OF_ONE_TENSOR: Final = (Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST)
_OF_PARTS: Final = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.GATHER, Collective.SCATTER)


class Passes(NamedTuple):
    """How a collective is divided: pass p covers bytes [each * p, each * (p + 1)) of the tensor, or of every part."""

    number: int
    each: int
    channels: int = 1  # pass p runs on channel p % channels


def passes(kind: Collective, size: int, longest: int, channels: int = 1, single: int = 0) -> Passes:
    """Divide a collective among `size` ranks; `longest` is the bytes of its tensor, or of its longest part.

    `channels` share the passes if there are more than `single` bytes. Not of an all-to-all: a rank does not know whether
    the parts of others are large.
    """
    if kind in OF_ONE_TENSOR:
        most = PASS_BYTES
    elif kind in _OF_PARTS:  # a rank has one part more than the group has ranks: its own
        most = max(_ALIGNED, PASS_BYTES // (size + 1) // _ALIGNED * _ALIGNED)
    else:
        return Passes(1, _ALL)
    used = channels if longest > single else 1
    number = -(-longest // (most * used)) * used or used
    each = max(_ALIGNED, -(-longest // (number * _ALIGNED)) * _ALIGNED)  # as equal as possible
    return Passes(-(-longest // (each * used)) * used or used, each, used)


class Parts(Sequence[memoryview]):
    """Parts of one memory, which have the same length; the last ones may be shorter, or empty."""

    __slots__ = ("_count", "_each", "_start", "_stop", "_whole")

    def __init__(self, whole: memoryview, count: int, each: int, start: int = 0, stop: int | None = None) -> None:
        self._whole = whole
        self._count = count
        self._each = each
        self._start = start
        self._stop = each if stop is None else min(stop, each)

    @classmethod
    def divided(cls, whole: memoryview, count: int, element: int) -> Parts:
        """Divide memory into `count` parts of whole elements."""
        return cls(whole, count, -(-len(whole) // (count * element)) * element)

    def cut(self, start: int, stop: int) -> Parts:
        """Return these bytes of every part."""
        return Parts(self._whole, self._count, self._each, start, stop)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, part: int) -> memoryview: ...
    @overload
    def __getitem__(self, part: slice) -> list[memoryview]: ...
    def __getitem__(self, part: int | slice) -> memoryview | list[memoryview]:
        if isinstance(part, slice):
            return [self[index] for index in range(*part.indices(self._count))]
        if not 0 <= part < self._count:
            raise IndexError(f"part {part} of {self._count}")
        return self._whole[part * self._each + self._start : part * self._each + self._stop]

    def span(self, part: int, parts: int) -> memoryview:
        """Return several parts as one, which they are only where they are whole."""
        if self._stop - self._start < self._each:
            raise ValueError("slices of parts are not adjacent")
        return self._whole[part * self._each : (part + parts) * self._each]


Views = Parts | list[memoryview]  # the memory of a buffer's parts


def in_pass(kind: int, tensors: list[memoryview], parts: int, element: int, start: int, stop: int) -> Views:
    """Return the memory of a buffer in a pass that covers these bytes; `parts`: how many the schedule divides it into."""
    if len(tensors) == 1 and parts > 1:
        if kind in OF_ONE_TENSOR:
            return Parts.divided(tensors[0][start:stop], parts, element)
        return Parts.divided(tensors[0], parts, element).cut(start, stop)
    return [tensor[start:stop] for tensor in tensors]
