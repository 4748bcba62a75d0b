"""ringfence with one schedule for all-reduces of every size, to check the choices of the selection table and of the planner."""

from __future__ import annotations

from typing import Final

from ringfence.collectives import Table
from ringfence.session import Session

_ALWAYS: Final = 1 << 62  # bytes


class RingSession(Session):
    table = Table(small=0, ring_slice=0)


class TreeSession(Session):
    table = Table(small=0, ring_slice=_ALWAYS >> 20)  # it is multiplied by the group's size


class DoublingSession(Session):
    table = Table(small=_ALWAYS)
