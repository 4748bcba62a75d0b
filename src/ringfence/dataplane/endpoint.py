"""One endpoint of a link: moves bytes between a stream and the executions that are queued on it.

This is the implementation in Python. The compiled data plane has the same names and the same behaviour.
"""

from __future__ import annotations

from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Protocol

from ringfence.errors import ProtocolError
from ringfence.keys import SEGMENT_BYTES
from ringfence.link.frames import HEADER_BYTES, HOP_OVERHEAD, Type

if TYPE_CHECKING:
    from ringfence.dataplane.buffers import Pool, Segment
    from ringfence.dataplane.regions import Region
    from ringfence.dataplane.request import Request
    from ringfence.link.unsealed import AnyOpener, AnySealer

_COUNTER_AT = 40  # offset of a forwarded frame's own counter in the header
_COUNTER_END = 48

SENDS, RECEIVES = 1, 2  # roles of an endpoint


class Stream(Protocol):
    """A connected, non-blocking byte stream: a socket, or a pipe in memory."""

    def send(self, data: memoryview, /) -> int: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def close(self) -> None: ...


class PassFrames(Protocol):
    """Produces and consumes the frames of an endpoint: one pass of a collective (execution.py)."""

    operation: Request

    @property
    def done(self) -> list[int]: ...
    @property
    def segments(self) -> list[int]: ...
    def ready(self, index: int, /) -> bool: ...
    def overhead(self, index: int, /) -> int: ...
    def seal_next(self, index: int, sealer: AnySealer, /) -> tuple[memoryview, Segment] | None: ...
    def is_shared(self, index: int, /) -> bool: ...
    def share_next(self, index: int, slot: int, target: memoryview, sealer: AnySealer, /) -> bytes: ...
    def open_shared(self, index: int, region: Region, slot: int, /) -> int: ...
    def expect(self, index: int, opener: AnyOpener, shared: bool, /) -> tuple[bytes, int] | None: ...
    def open_next(
        self, index: int, header: bytes, frame: memoryview, segment: Segment, opener: AnyOpener, /
    ) -> bool: ...


class Endpoint:
    """A stream, its readiness, a FIFO of (execution, step), and the unsent rest of a frame.

    Both endpoints of a link queue frames in the same order; that is their order on the wire.
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
        self.role = 0  # what `serve` does in place of `work`: SENDS, RECEIVES, or nothing
        self.lingering = False  # its communicator is gone: send BYE once everything is written
        self.bye_received = False
        self.queue: deque[tuple[PassFrames, int]] = deque()
        self.sealer: AnySealer
        self.opener: AnyOpener
        self._unsent: memoryview | None = None
        self._sending: Segment | None = None
        self._expected: bytes | None = None
        self._unexpected = False
        self._receiving: Segment | None = None
        self._have = 0
        self._total = 0
        self.shared: Region | None = None  # what this endpoint writes, or what the peer writes and this one reads
        self.goodbye = False  # a BYE was read on a sending endpoint
        self._lent: deque[int] = deque()  # slots that the peer has not returned
        self.reserved = 0  # only the compiled data plane writes sums to slots before they are lent
        self._returned = 0
        self._control = bytearray()
        self.far_end = -1
        self.wire_sent = self.wire_received = self.payload_sent = self.payload_received = 0
        self.waits = 0  # how often a frame was due and had not arrived
        self.waited = 0  # nanoseconds of those waits
        self._waiting_since = 0
        self.spent: tuple[int, ...] = (0,) * 6  # only the compiled data plane has clocks

    def wake(self) -> None:
        """Schedule a call of `work`."""
        if not self.queued:
            self.queued = True
            self._ready.append(self)

    def notify(self, readable: bool, writable: bool, ended: bool = False) -> None:
        """Record a change of the stream. After `ended` no further change is reported, so everything left is read."""
        self.readable |= readable
        self.writable |= writable
        self.ended |= ended
        self.wake()

    @property
    def lent(self) -> int:
        """Number of slots that the peer has not returned."""
        return len(self._lent)

    # -- writing -----------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether a part of a frame has not been written yet."""
        return self._unsent is not None

    def put(self, frame: memoryview, segment: Segment | None = None, /) -> None:
        """Write `frame` next; return `segment` to the pool afterwards."""
        if self._unsent is not None:
            raise RuntimeError("a frame is still being written")
        self._unsent, self._sending = frame, segment

    def flush(self) -> bool:
        """Write the rest of a frame. Return True if nothing is left."""
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
            self.writable = False  # the socket buffer is full: the next edge event resumes
            self._blocked.add(self)
            return False
        self._unsent = None
        self._blocked.discard(self)
        if self._sending is not None:
            self._pool.give(self._sending)
            self._sending = None
        return True

    # -- waiting, and hooks of the receiving endpoint of a collective link ---------------------------------------------

    def begin_to_wait(self) -> None:
        if not self._waiting_since:
            self._waiting_since = monotonic_ns()

    def end_wait(self) -> None:
        if self._waiting_since:
            self.waited += monotonic_ns() - self._waiting_since
            self.waits += 1
            self._waiting_since = 0

    def stream_ended(self) -> None:
        """Called when the peer has closed the stream."""
        raise NotImplementedError

    def length_of_other(self, header: bytes) -> int:
        """Return the length of an unexpected frame; raise AuthenticationError if the header is invalid."""
        raise NotImplementedError


def serve(engine: object, ready: deque[Any]) -> None:
    """Send and receive for the endpoints that are first in `ready`; only the compiled data plane does."""


def send(endpoint: Endpoint) -> None:
    """Continue writing; when nothing is left, seal and write the next segment that is ready."""
    if endpoint.shared is not None:
        _read_returns(endpoint, endpoint.shared)
    if not endpoint.flush() or not endpoint.queue:
        return
    execution, index = endpoint.queue[0]
    if endpoint.shared is not None and execution.is_shared(index):
        sealed: tuple[memoryview, Segment | None] | None = _share(endpoint, endpoint.shared, execution, index)
    else:
        sealed = execution.seal_next(index, endpoint.sealer)
        endpoint.payload_sent += 0 if sealed is None else len(sealed[0]) - execution.overhead(index)
    if sealed is None:
        return
    if execution.done[index] == execution.segments[index]:
        endpoint.queue.popleft()
    endpoint.put(*sealed)
    if endpoint.flush() and endpoint.queue:
        endpoint.wake()


def _share(
    endpoint: Endpoint, region: Region, execution: PassFrames, index: int
) -> tuple[memoryview, Segment | None] | None:
    """Pass the next segment through shared memory; None if it is not ready, or no slot is free until the peer returns one."""
    slot = region.take() if execution.ready(index) and len(endpoint._lent) < region.quota else -1
    if slot < 0:
        return None
    endpoint._lent.append(slot)
    header = execution.share_next(index, slot, region.slot(slot, SEGMENT_BYTES), endpoint.sealer)
    endpoint.payload_sent += int.from_bytes(header[16:20], "big")
    return memoryview(header), None


def _read_returns(endpoint: Endpoint, region: Region) -> None:
    """On a sending endpoint: read which slots the peer has returned."""
    while endpoint.readable and not endpoint.goodbye and endpoint.stream is not None:
        part = memoryview(bytearray(HOP_OVERHEAD - len(endpoint._control)))
        try:
            got = endpoint.stream.recv_into(part)
        except BlockingIOError:
            got = 0
        if not got:
            endpoint.readable = False
            return
        endpoint._control += part[:got]
        if len(endpoint._control) == HOP_OVERHEAD:
            frame, endpoint._control = bytes(endpoint._control), bytearray()
            _handle_control(endpoint, region, frame)


def _handle_control(endpoint: Endpoint, region: Region, frame: bytes) -> None:
    count = int.from_bytes(frame[_COUNTER_AT:_COUNTER_END], "big") - endpoint._returned
    if frame[0] == Type.BYE:
        endpoint.goodbye = True
    elif frame[0] == Type.RETURN and 0 <= count <= len(endpoint._lent):
        endpoint._returned += count
        for _ in range(count):
            region.give(endpoint._lent.popleft())
    elif frame[0] != Type.NOP:
        raise ProtocolError("a peer returned shared memory that it was not lent")


def _return_slot(endpoint: Endpoint) -> None:
    """On a receiving endpoint: tell the peer that it may use a slot again."""
    assert endpoint.stream is not None
    endpoint._returned += 1
    frame = bytearray(HOP_OVERHEAD)
    frame[0], frame[28:32] = Type.RETURN, b"\xff" * 4
    frame[_COUNTER_AT:_COUNTER_END] = endpoint._returned.to_bytes(8, "big")
    try:
        sent = endpoint.stream.send(memoryview(frame))
    except (BrokenPipeError, ConnectionResetError):  # it has closed the link and needs none
        return
    if sent != HOP_OVERHEAD:
        raise ProtocolError("a peer has not read what it was returned")


def receive(endpoint: Endpoint) -> bytes | None:
    """Continue reading; open a complete segment. Return a complete frame that is not the expected one, else None."""
    if not endpoint.queue:
        return None
    execution, index = endpoint.queue[0]
    if not endpoint.open or not endpoint.readable:
        if endpoint._expected is not None or execution.ready(index):
            endpoint.begin_to_wait()
        return None
    if endpoint._expected is None:
        expected = execution.expect(index, endpoint.opener, endpoint.shared is not None)
        if expected is None:
            return None
        endpoint._expected, endpoint._total = expected
        endpoint._have = 0
        endpoint._receiving = endpoint._pool.take()
    segment = endpoint._receiving
    assert segment is not None
    if not _read_more(endpoint, segment.view):
        return None
    frame = segment.view[: endpoint._total]
    if endpoint._unexpected:
        return bytes(frame)
    header, endpoint._expected, endpoint._receiving = endpoint._expected, None, None
    if execution.done[index] + 1 == execution.segments[index]:
        endpoint.queue.popleft()
    if header[0] == Type.SHARED:
        assert endpoint.shared is not None
        slot = int.from_bytes(frame[_COUNTER_AT:_COUNTER_END], "big")
        endpoint.payload_received += execution.open_shared(index, endpoint.shared, slot)
        _return_slot(endpoint)
        endpoint._pool.give(segment)
        if endpoint.queue:
            endpoint.wake()
        return None
    endpoint.payload_received += endpoint._total - execution.overhead(index)
    if not execution.open_next(index, header, frame, segment, endpoint.opener):
        endpoint._pool.give(segment)
    if endpoint.queue:
        endpoint.wake()
    return None


def _read_more(endpoint: Endpoint, view: memoryview) -> bool:
    """Read more of a frame. Return True if it is complete."""
    assert endpoint.stream is not None
    before = endpoint._have
    wanted = endpoint._total - before
    try:
        got = endpoint.stream.recv_into(view[before : endpoint._total])
    except BlockingIOError:
        endpoint.readable = False
        endpoint.begin_to_wait()
        return False
    if not 0 <= got <= wanted:
        raise ValueError("a stream read more bytes than there was room for, or a negative number of them")
    if not got:
        endpoint.stream_ended()
        return False
    endpoint._have = before + got
    endpoint.wire_received += got
    endpoint.end_wait()
    if before < HEADER_BYTES <= endpoint._have:
        endpoint._unexpected = not _as_expected(view, endpoint._expected)
        if endpoint._unexpected:
            endpoint._total = endpoint.length_of_other(bytes(view[:HEADER_BYTES]))
    if endpoint._have >= endpoint._total:
        return True
    if got < wanted and not endpoint.ended:
        endpoint.readable = False  # drained: the next edge event resumes
        endpoint.begin_to_wait()
    else:
        endpoint.wake()
    return False


def _as_expected(view: memoryview, expected: bytes | None) -> bool:
    """Return whether the header is the expected one; a forwarded frame carries its own counter."""
    assert expected is not None
    if view[:HEADER_BYTES] == expected:
        return True
    own_counter = expected[0] in (Type.FORWARD, Type.SHARED)
    fore = view[:_COUNTER_AT] == expected[:_COUNTER_AT]
    return own_counter and fore and view[_COUNTER_END:HEADER_BYTES] == expected[_COUNTER_END:]
