"""Cleanup in forked children, which must not keep sockets, keys or the ability to seal.

DataLoader workers are forks of the training process. A child that kept a socket would hide its parent's death from the
peers; a child that sealed would reuse the parent's counters. `os.register_at_fork` closes sockets and deletes keys. The
canary is a page that the kernel zeroes in every child, including children forked without Python's knowledge.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Protocol

_MADV_WIPEONFORK = 18


class _Holder(Protocol):
    def forget(self) -> None: ...


def canary() -> memoryview:
    """Return a byte that reads 1 in this process and 0 in its children. A child creates its own for its own objects."""
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page.madvise(_MADV_WIPEONFORK)
    page[0] = 1
    return memoryview(page)


ALIVE = canary()

_holders: weakref.WeakSet[_Holder] = weakref.WeakSet()


def register_fork_cleanup(holder: _Holder) -> None:
    """Call `holder.forget()` in every forked child. It must close descriptors, delete keys and take no lock."""
    _holders.add(holder)


def unregister_fork_cleanup(holder: _Holder) -> None:
    """Stop calling `holder.forget()`, because it has released everything."""
    _holders.discard(holder)


def _after_fork() -> None:
    for holder in list(_holders):
        holder.forget()
    _holders.clear()


os.register_at_fork(after_in_child=_after_fork)


def in_child(alive: Sequence[int] = ALIVE) -> bool:
    """Whether this process is a fork of the one that created the canary."""
    return not alive[0]
