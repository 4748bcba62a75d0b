"""What a forked child must not keep: sockets, keys and the right to seal.

DataLoader workers are forks of the training process. A child that kept a socket would hide its parent's death from the
peers; a child that sealed would use the parent's counters a second time. `os.register_at_fork` closes and forgets;
the canary is a page that the kernel zeroes in every child, also in one made behind Python's back.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Protocol

_MADV_WIPEONFORK = 18


class _Forgets(Protocol):
    def forget(self) -> None: ...


def canary() -> memoryview:
    """A byte that reads 1 in this process and 0 in every child of it. A child has its own for what it makes itself."""
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page.madvise(_MADV_WIPEONFORK)
    page[0] = 1
    return memoryview(page)


ALIVE = canary()

_holders: weakref.WeakSet[_Forgets] = weakref.WeakSet()


def register_fork_cleanup(holder: _Forgets) -> None:
    """`holder.forget()` is called in every forked child: close descriptors, drop keys, touch no lock."""
    _holders.add(holder)


def unregister_fork_cleanup(holder: _Forgets) -> None:
    """`holder` has let go of everything itself."""
    _holders.discard(holder)


def _after_fork() -> None:
    for holder in list(_holders):
        holder.forget()
    _holders.clear()


os.register_at_fork(after_in_child=_after_fork)


def in_child(alive: Sequence[int] = ALIVE) -> bool:
    """Whether this process is a fork of the one that made the canary."""
    return not alive[0]
