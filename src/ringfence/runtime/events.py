"""What the connections and communicators of a worker are given: shared values, and a protocol for what they report.

Connections, pending connections and communicators know nothing of the engine that owns them. They report through `Events`,
which the engine implements, and share the values of a `LinkContext`.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ringfence.dataplane.choice import Pool
from ringfence.dataplane.endpoint import PassFrames, Stream
from ringfence.dataplane.request import Request
from ringfence.dataplane.shared import OwnMemory, SharedMemory
from ringfence.errors import RingfenceError
from ringfence.keys import OUTAGE_SECONDS, SHARED_LIMIT_BYTES
from ringfence.link.frames import Header
from ringfence.machines import Machines
from ringfence.runtime.link_keys import LinkKeys

_log = logging.getLogger(__name__)
_Memory = TypeVar("_Memory", bound=SharedMemory)


class PeerLink(Protocol):
    """A link as the engine sees it in a report."""

    @property
    def worker(self) -> int: ...
    @property
    def needed(self) -> bool: ...
    def dial(self) -> None: ...


class Events(Protocol):
    """Receives the reports of connections and communicators, and schedules their work."""

    @property
    def failed(self) -> bool:
        """Whether the session has failed or ended; then nothing more is sent or received."""

    def call_soon(self, work: Callable[[], None], /) -> None:
        """Call `work` from the driving thread, outside the current call."""

    def call_later(self, seconds: float, work: Callable[[], None], /) -> None:
        """Call `work` after so many seconds."""

    def fail(self, error: RingfenceError, suspect: int = -1, /) -> None:
        """Abort the session on every worker, naming the suspected worker."""

    def suspect(self, link: PeerLink, text: str, /) -> None:
        """Fail because a connection ended, unless an abort or a goodbye explains it within a moment."""

    def finish(self, request: Request, /) -> None:
        """Complete a request successfully."""

    def may_dial(self, link: PeerLink, /) -> bool:
        """Return whether a link may be dialled now. If not, it is dialled once its worker has been verified."""

    def is_connecting(self, worker: int, lane: int, digest: bytes, /) -> bool:
        """Return whether a pending connection is for this worker, lane and group."""

    def check_departed(self, worker: int, /) -> None:
        """Fail if a request needs a worker that has left the run and has nothing more on its way."""

    def is_current(self, link: object, /) -> bool:
        """Return whether the call of this link's `work` has not returned: a signal handler asks."""


class Network(Protocol):
    """Moves opaque bytes."""

    @property
    def machines(self) -> Machines:
        """Which workers may share a machine, by the roster."""

    def dial(self, link: Any) -> None:
        """Start to connect to `link.worker` and set `link.stream`; report through `link.notify` when it is writable."""

    def watch(self, stream: Stream, handler: Any) -> None:
        """Report changes of the stream to `handler.notify`."""

    def forget(self, stream: Stream) -> None:
        """Stop reporting changes of the stream."""


class Scope(Protocol):
    """What a link belongs to: a communicator, or a pair of workers outside any communicator."""

    @property
    def digest(self) -> bytes: ...
    @property
    def name(self) -> str: ...
    @property
    def removed(self) -> bool: ...


class CollectiveScope(Scope, Protocol):
    """A communicator as its links see it: its members, and the words for their errors."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def neighbours(self) -> int:
        """The number of other members on this machine, by the roster."""

    def shared_memory(self) -> OwnMemory | None:
        """Return the memory that this worker shares with members on its machine; None if it has shared enough already."""

    def unreachable_frames(self, peer: int, /) -> Sequence[tuple[PassFrames, int]]:
        """Return what waits for frames of a peer that will never connect."""

    def describe_execution(self, execution: PassFrames, /) -> str: ...
    def describe_mismatch(self, execution: PassFrames, peer: int, header: Header, /) -> str: ...


@dataclass(frozen=True)
class Platform:
    """Time, entropy and patience of a worker; tests replace them."""

    clock: Callable[[], float] = time.monotonic
    random: Callable[[int], bytes] = os.urandom
    outage: float = OUTAGE_SECONDS  # seconds without an answer until a worker is given up


class SharedBudget:
    """Limits the memory that a worker shares over all of its groups."""

    def __init__(self) -> None:
        self._left = SHARED_LIMIT_BYTES

    def take(self, size: int) -> bool:
        """Return whether this many bytes may be shared, and count them."""
        if size > self._left:
            return False
        self._left -= size
        return True

    def make(self, size: int, factory: Callable[[], _Memory]) -> _Memory | None:
        """Make memory of this size. None: enough is shared, or a sandbox or an old kernel has none: the socket carries all."""
        if not self.take(size):
            return None
        try:
            return factory()
        except OSError as error:
            self.give(size)
            _log.info("this worker shares no memory: %s", error)
            return None

    def give(self, size: int) -> None:
        self._left += size


@dataclass(frozen=True)
class LinkContext:
    """What all connections and communicators of a worker share."""

    rank: int
    world_size: int
    keys: LinkKeys
    network: Network
    events: Events
    departed: AbstractSet[int]  # workers that have left the run
    ready: deque[Any]  #         links and tasks whose `work` is due
    blocked: set[Any]  #         links with bytes that the kernel has not accepted yet
    pool: Pool
    platform: Platform
    machines: Machines  # which workers may share a machine, by the roster
    memory: SharedBudget
    channel: int = 0

    def no_answer(self, worker: int) -> str:
        """Return the message for a worker that has not answered for the outage timeout."""
        return (
            f"worker {worker}: no answer for {self.platform.outage:g} s. Its machine or the network to it is down; "
            "RINGFENCE_OUTAGE_TIMEOUT is how long to wait for it"
        )
