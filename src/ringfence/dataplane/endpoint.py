"""One end of a link, the part that moves bytes: what is half written, and the frame that is expected next.

This is the data plane's other half beside run.py, in Python. _core.c has the same names and does the same.
"""

from __future__ import annotations

from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Protocol

from ringfence.link.frames import HEADER_BYTES, Type

if TYPE_CHECKING:
    from ringfence.dataplane.buffers import Pool, Segment
    from ringfence.dataplane.execution import Run
    from ringfence.link.seal import Opener, Sealer

_COUNTER_AT = 40  # where a forwarded frame's own counter stands in the header
_COUNTER_END = 48


class Stream(Protocol):
    """A connected, non-blocking byte stream: a socket, or a pipe in memory."""

    def send(self, data: memoryview, /) -> int: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def close(self) -> None: ...


class End:
    """A stream, whether it can be read or written now, a FIFO of (run, step), and what is left of a frame half written.

    The order in which frames stand on the wire is the order in which both ends queued them.
    """

    def __init__(self, ready: deque[Any], blocked: set[Any], pool: Pool) -> None:
        self._ready = ready
        self._blocked = blocked
        self._pool = pool
        self.stream: Stream | None = None
        self.readable = False
        self.writable = False
        self.ended = False
        self.open = False
        self.queued = False
        self.queue: deque[tuple[Run, int]] = deque()
        self.sealer: Sealer
        self.opener: Opener
        self._unsent: memoryview | None = None
        self._sending: Segment | None = None
        self._expected: bytes | None = None
        self._surprising = False
        self._receiving: Segment | None = None
        self._have = 0
        self._total = 0
        self.far_end = -1
        self.wire_sent = self.wire_received = self.payload_sent = self.payload_received = 0
        self.waits = self.waited = self._waiting_since = (
            0  # how often, and how many nanoseconds, for a frame that is due
        )
        self.spent: tuple[int, ...] = (0,) * 6  # only the compiled data plane has clocks

    def wake(self) -> None:
        """Have the engine call `work` soon."""
        if not self.queued:
            self.queued = True
            self._ready.append(self)

    def notify(self, readable: bool, writable: bool, ended: bool = False) -> None:
        """The stream's state changed. `ended`: no further change will be told, so read on until the end."""
        self.readable |= readable
        self.writable |= writable
        self.ended |= ended
        self.wake()

    # -- writing -----------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether a frame is half written."""
        return self._unsent is not None

    def put(self, frame: memoryview, segment: Segment | None = None, /) -> None:
        """Write this next; `segment` goes back to the pool afterwards."""
        if self._unsent is not None:
            raise RuntimeError("a frame is still being written")
        self._unsent, self._sending = frame, segment

    def flush(self) -> bool:
        """Write what is left of a frame. True when nothing is left."""
        unsent = self._unsent
        if unsent is None:
            return True
        if not self.writable:
            return False
        assert self.stream is not None
        try:
            sent = self.stream.send(unsent)
        except BlockingIOError:
            sent = 0
        if not 0 <= sent <= len(unsent):
            raise ValueError("a stream took more bytes than it was given, or a negative number of them")
        self.wire_sent += sent
        if sent < len(unsent):
            self._unsent = unsent[sent:]
            self.writable = False  # the buffer is full: the next edge says when to go on
            self._blocked.add(self)
            return False
        self._unsent = None
        self._blocked.discard(self)
        if self._sending is not None:
            self._pool.give(self._sending)
            self._sending = None
        return True

    # -- waiting, and what the receiving end of a collective link adds -------------------------------------------------

    def begin_to_wait(self) -> None:
        if not self._waiting_since:
            self._waiting_since = monotonic_ns()

    def end_wait(self) -> None:
        if self._waiting_since:
            self.waited += monotonic_ns() - self._waiting_since
            self.waits += 1
            self._waiting_since = 0

    def stream_ended(self) -> None:
        """The peer closed the stream."""
        raise NotImplementedError

    def length_of_other(self, header: bytes) -> int:
        """The length of a frame that was not expected; raises where there is no such frame."""
        raise NotImplementedError


def send(end: End) -> None:
    """Write on; when nothing is left, seal and write the next segment that may leave."""
    if not end.flush() or not end.queue:
        return
    run, index = end.queue[0]
    sealed = run.seal_next(index, end.sealer)
    if sealed is None:
        return
    end.payload_sent += len(sealed[0]) - run.overhead(index)
    if run.done[index] == run.segments[index]:
        end.queue.popleft()
    end.put(*sealed)
    if end.flush() and end.queue:
        end.wake()


def receive(end: End) -> bytes | None:
    """Read on; open a segment that is complete. Returns a frame that is complete and not the expected one."""
    if not end.queue:
        return None
    run, index = end.queue[0]
    if not end.open or not end.readable:
        if end._expected is not None or run.ready(index):
            end.begin_to_wait()
        return None
    if end._expected is None:
        expected = run.expect(index, end.opener)
        if expected is None:
            return None
        end._expected, end._total = expected
        end._have = 0
        end._receiving = end._pool.take()
    segment = end._receiving
    assert segment is not None
    if not _read_on(end, segment.view):
        return None
    frame = segment.view[: end._total]
    if end._surprising:
        return bytes(frame)
    header, end._expected, end._receiving = end._expected, None, None
    if run.done[index] + 1 == run.segments[index]:
        end.queue.popleft()
    end.payload_received += end._total - run.overhead(index)
    if not run.open_next(index, header, frame, segment, end.opener):
        end._pool.give(segment)
    if end.queue:
        end.wake()
    return None


def _read_on(end: End, view: memoryview) -> bool:
    """True when the frame is complete."""
    assert end.stream is not None
    before = end._have
    wanted = end._total - before
    try:
        got = end.stream.recv_into(view[before : end._total])
    except BlockingIOError:
        end.readable = False
        end.begin_to_wait()
        return False
    if not 0 <= got <= wanted:
        raise ValueError("a stream read more bytes than there was room for, or a negative number of them")
    if not got:
        end.stream_ended()
        return False
    end._have = before + got
    end.wire_received += got
    end.end_wait()
    if before < HEADER_BYTES <= end._have:
        end._surprising = not _as_expected(view, end._expected)
        if end._surprising:
            end._total = end.length_of_other(bytes(view[:HEADER_BYTES]))
    if end._have >= end._total:
        return True
    if got < wanted and not end.ended:
        end.readable = False  # drained: the next edge says when to go on
        end.begin_to_wait()
    else:
        end.wake()
    return False


def _as_expected(view: memoryview, expected: bytes | None) -> bool:
    """Whether the header is the expected one; a forwarded frame brings its own counter."""
    assert expected is not None
    if view[:HEADER_BYTES] == expected:
        return True
    own_counter = expected[0] == Type.FORWARD
    fore = view[:_COUNTER_AT] == expected[:_COUNTER_AT]
    return own_counter and fore and view[_COUNTER_END:HEADER_BYTES] == expected[_COUNTER_END:]
