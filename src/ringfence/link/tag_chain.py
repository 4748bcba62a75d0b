"""Hashes over the tags of the frames that passed, in which an auditor compares both endpoints (spec/record.md, 11)."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Final

from ringfence import keys
from ringfence.link.frames import Type

_UNCOUNTED: Final = frozenset((Type.BYE, Type.NOP))  # a peer need not read them


class TagChain:
    """One direction of a connection. Its link adds frames in the order of their counters; another thread takes the points.

    A point is a number of frames and the digest over their tags: at 1, 2, 4, … frames, from `RECORD_POINT_FRAMES` on at each
    multiple of it, and at the end. If nobody takes the points, later ones replace the oldest.
    """

    def __init__(self, worker: int, connection: bytes, channel: int, direction: int) -> None:
        self.place = worker, connection.hex(), channel, direction  # 0: sent; 1: received
        self.points: deque[tuple[int, str]] = deque(maxlen=keys.RECORD_POINTS)
        self.ended = False
        self._frames = self._marked = 0
        self._due = 1
        self._state = hashlib.sha256(keys.RECORD_FRAMES + connection)

    def add(self, kind: int, tag: bytes | bytearray | memoryview) -> None:
        """Count a frame of this type."""
        if kind in _UNCOUNTED:
            return
        self._state.update(tag)
        self._frames += 1
        if self._frames == self._due:
            self._due += min(self._frames, keys.RECORD_POINT_FRAMES)
            self._mark()

    def end(self) -> None:
        """Make the last point: no further frame is added."""
        self._mark()
        self.ended = True

    def _mark(self) -> None:
        if self._frames > self._marked:
            self._marked = self._frames
            self.points.append((self._frames, self._state.hexdigest()))


class TagChains:
    """The chains of a session. Links add theirs, in any thread; one thread takes the points."""

    def __init__(self) -> None:
        self._chains: deque[TagChain] = deque()

    def add(self, worker: int, connection: bytes, channel: int) -> tuple[TagChain, TagChain]:
        """Return the chains of what is sent and of what is received on a new connection."""
        sent, received = (TagChain(worker, connection, channel, direction) for direction in (0, 1))
        self._chains.extend((sent, received))
        return sent, received

    def take(self) -> list[list[int | str]]:
        """Return the points since the last call, in the form of a record, and drop the chains that have ended."""
        found: list[list[int | str]] = []
        for _ in range(len(self._chains)):
            chain = self._chains.popleft()
            if not chain.ended:  # before its points are taken: the last one comes first
                self._chains.append(chain)
            while chain.points:
                found.append([*chain.place, *chain.points.popleft()])
        return found
