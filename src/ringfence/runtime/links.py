"""Links at work: reading and writing the frames of one connection without ever blocking.

An `Outbox` is dialled by its sender and writes; an `Inbox` is what the other end reads. Each holds a FIFO of
(run, step): the order in which frames stand on the wire is the order in which both ends queued them.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Protocol

from ringfence import keys
from ringfence.errors import AuthenticationError, MismatchError, PeerLostError, ProtocolError
from ringfence.link.frames import (
    HEADER_BYTES,
    HOP_OVERHEAD,
    NO_ORIGIN,
    Call,
    Header,
    Type,
    frame_bytes,
    pack_header,
    read_header,
)
from ringfence.link.hello import REPLY_BYTES, Hello, Lane, LinkSecrets

if TYPE_CHECKING:
    from ringfence.runtime.engine import Engine
    from ringfence.runtime.group import Group
    from ringfence.runtime.memory import Segment
    from ringfence.runtime.run import Run

_COUNTER_AT = 40  # where a forwarded frame's own counter stands in the header
_COUNTER_END = 48


class Stream(Protocol):
    """A connected, non-blocking byte stream: a socket, or a pipe in memory."""

    def send(self, data: memoryview, /) -> int: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def close(self) -> None: ...


class Link:
    """One connection: its stream, whether it can be read or written now, and what is left of a frame half written."""

    lane = Lane.COLLECTIVE
    served_always = False

    def __init__(self, engine: Engine, group: Group, peer: int) -> None:
        self.engine = engine
        self.group = group
        self.peer = peer  # rank in the group
        self.worker = group.ranks[peer]  # rank in the world
        self.stream: Stream | None = None
        self.readable = False
        self.writable = False
        self.open = False
        self.ended = False
        self.lingering = False  # its group is gone: say goodbye when what is written has left
        self.farewell = False  # the peer said BYE
        self._dials = 0
        self.queued = False
        self.queue: deque[tuple[Run, int]] = deque()
        self._unsent: memoryview | None = None
        self._segment: Segment | None = None

    def poke(self) -> None:
        """Have the engine call `work` soon."""
        if not self.queued:
            self.queued = True
            self.engine.ready.append(self)

    def notify(self, readable: bool, writable: bool, ended: bool = False) -> None:
        """The stream's state changed. `ended`: no further change will be told, so read on until the end."""
        self.readable |= readable
        self.writable |= writable
        self.ended |= ended
        self.poke()

    def work(self) -> None:
        raise NotImplementedError

    # -- dialling ----------------------------------------------------------------------------------------------------

    def dial(self) -> None:
        """Begin the connection; `_shake_hands` goes on as the stream allows."""
        if self.engine.failure is not None or self.group.removed:
            return  # what it would have carried has ended
        self._dials += 1
        self._hello = Hello(
            sender=self.engine.rank,
            receiver=self.worker,
            lane=self.lane,
            group=self.group.digest,
            nonce=self.engine.random(keys.NONCE_BYTES),
        )
        self._greeting: memoryview | None = memoryview(self.engine.hello_bytes(self._hello))
        self._reply = memoryview(bytearray(REPLY_BYTES))
        self._reply_have = 0
        self.engine.network.dial(self)

    def _shake_hands(self) -> bool:
        """One step further as the dialler; True once frames may be sent."""
        assert self.stream is not None
        if self._greeting is not None:
            if not self.writable:
                return False
            sent = self.stream.send(self._greeting)
            self._greeting = self._greeting[sent:] if sent < len(self._greeting) else None
            if self._greeting is not None:
                return False
        while self._reply_have < REPLY_BYTES:
            try:
                got = self.stream.recv_into(self._reply[self._reply_have :])
            except BlockingIOError:
                return False
            except ConnectionResetError:
                got = 0
            if not got:
                self._redial()
                return False
            self._reply_have += got
        self._confirm(bytes(self._reply))
        return True

    def _redial(self) -> None:
        """The peer hung up before it answered: perhaps too many dialled at once. Try again, a few times."""
        self.close()
        self.readable = self.writable = False
        if self._dials < keys.LINK_DIALS and self.worker not in self.engine.departed:
            self.engine.after(keys.LINK_REDIAL_SECONDS * 2**self._dials, self._dial_again)
        else:
            self.engine.suspect(self.worker, f"worker {self.worker} closed a connection before answering it")

    def _dial_again(self) -> None:
        try:
            self.dial()
        except OSError as error:
            self.engine.suspect(self.worker, f"worker {self.worker} cannot be dialled: {error}")

    def _confirm(self, reply: bytes) -> None:
        nonce, confirmation = reply[: keys.NONCE_BYTES], reply[keys.NONCE_BYTES :]
        secrets = self.engine.link_secrets(self.worker, self._hello, nonce)
        if not keys.same(confirmation, secrets.acceptor_confirms):
            raise AuthenticationError(f"whoever answered for worker {self.worker} does not hold its key")
        self._unsent = memoryview(secrets.dialler_confirms)
        self._use(secrets, dialler=True)

    def attach(self, stream: Stream, secrets: LinkSecrets) -> None:
        """Take over an accepted connection whose dialler has been confirmed."""
        self.stream = stream
        self.readable = self.writable = True
        self._use(secrets, dialler=False)
        self.poke()

    def _use(self, secrets: LinkSecrets, dialler: bool) -> None:
        out, into = (secrets.forth, secrets.back) if dialler else (secrets.back, secrets.forth)
        self.sealer = self.engine.sealer(out)
        self.opener = self.engine.opener(into)
        self.open = True

    # -- writing -----------------------------------------------------------------------------------------------------

    def _flush(self) -> bool:
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
        if sent < len(unsent):
            self._unsent = unsent[sent:]
            self.writable = False  # the buffer is full: the next edge says when to go on
            self.engine.blocked.add(self)
            return False
        self._unsent = None
        self.engine.blocked.discard(self)
        if self._segment is not None:
            self.engine.pool.give(self._segment)
            self._segment = None
        if self.lingering:
            self.lingering = False
            self.say_bye()
        return True

    def control_frame(self, kind: Type, call: bytes, sequence: int = 0) -> memoryview:
        """A frame without payload."""
        header = pack_header(
            kind, self.sealer.upcoming_generation(), 0, 0, 0, 0, 0, NO_ORIGIN, sequence, 0, self.group.digest[:16], call
        )
        frame = bytearray(HOP_OVERHEAD)
        frame[:HEADER_BYTES] = header
        self.sealer.seal_into(header, b"", memoryview(frame)[HEADER_BYTES:])
        return memoryview(frame)

    def say_bye(self) -> None:
        """Tell the peer that nothing follows; then close. A frame that is half written is finished first."""
        self.drop()
        if self in self.engine.blocked and self.engine.failure is None and not self.lingering:
            self.lingering = True
            return
        with contextlib.suppress(OSError):  # the peer may have left first
            if self.open and self.stream is not None and self._flush():
                self._unsent = self.control_frame(Type.BYE, Call(0).pack())
                self._flush()
        self.close()

    def drop(self) -> None:
        """Begin nothing more: the memory of what is queued is about to be its caller's again."""
        self.queue.clear()

    def close(self) -> None:
        self.engine.blocked.discard(self)
        if self.stream is not None:
            self.engine.network.forget(self.stream)
            self.stream.close()
            self.stream = None
        self.open = False


class Outbox(Link):
    """The sending end of a collective link."""

    def work(self) -> None:
        if not self.open and (self.stream is None or not self._shake_hands()):
            return
        if self._unsent is not None and not self._flush():
            return
        if not self.queue:
            return
        run, index = self.queue[0]
        sealed = run.seal_next(index, self.sealer)
        if sealed is None:
            return
        if run.done[index] == run.segments[index]:
            self.queue.popleft()
        self._unsent, self._segment = sealed
        if self._flush() and self.queue:
            self.poke()


class Inbox(Link):
    """The receiving end of a collective link: reads exactly the frame that the schedule expects next."""

    def __init__(self, engine: Engine, group: Group, peer: int) -> None:
        super().__init__(engine, group, peer)
        self._have = 0
        self._total = 0
        self._expected: bytes | None = None
        self._surprising = False

    def work(self) -> None:
        if not self.open or not self.queue or not self.readable:
            return
        run, index = self.queue[0]
        if self._expected is None:
            expected = run.expect(index, self.opener)
            if expected is None:
                return
            self._expected, self._total = expected
            self._have = 0
            self._segment = self.engine.pool.take()
        if not self._read():
            return
        self._deliver(run, index)
        if self.queue:
            self.poke()

    def _read(self) -> bool:
        """Read on; True when the frame is complete."""
        assert self.stream is not None and self._segment is not None
        view, before = self._segment.view, self._have
        wanted = self._total - before
        try:
            got = self.stream.recv_into(view[before : self._total])
        except BlockingIOError:
            self.readable = False
            return False
        if not got:
            self._ended()
            return False
        self._have = before + got
        if before < HEADER_BYTES <= self._have:
            self._surprising = not self._as_expected(view)
            if self._surprising:
                self._total = self._length_of_other(view)
        if self._have >= self._total:
            return True
        if got < wanted and not self.ended:
            self.readable = False  # drained: the next edge says when to go on
        else:
            self.poke()
        return False

    def _as_expected(self, view: memoryview) -> bool:
        """Whether the header is the expected one; a forwarded frame brings its own counter."""
        expected = self._expected
        assert expected is not None
        if view[:HEADER_BYTES] == expected:
            return True
        own_counter = expected[0] == Type.FORWARD
        fore = view[:_COUNTER_AT] == expected[:_COUNTER_AT]
        return own_counter and fore and view[_COUNTER_END:HEADER_BYTES] == expected[_COUNTER_END:]

    def _length_of_other(self, view: memoryview) -> int:
        try:
            return frame_bytes(read_header(view[:HEADER_BYTES]))
        except ProtocolError:
            raise AuthenticationError(f"a frame from worker {self.worker} does not authenticate") from None

    def _deliver(self, run: Run, index: int) -> None:
        segment, expected = self._segment, self._expected
        assert segment is not None and expected is not None
        frame = segment.view[: self._total]
        if self._surprising:
            self._surprise(run, frame)
            return
        self._expected = self._segment = None
        if run.done[index] + 1 == run.segments[index]:
            self.queue.popleft()
        try:
            kept = run.open_next(index, expected, frame, segment, self.opener)
        except AuthenticationError as error:
            raise AuthenticationError(
                f"{error} (from worker {self.worker}): it was changed, forged or replayed"
            ) from None
        if not kept:
            self.engine.pool.give(segment)

    def _surprise(self, run: Run, frame: memoryview) -> None:
        """A frame that is not the expected one: only once it authenticates is it believed, and then it is named."""
        header = read_header(frame[:HEADER_BYTES])
        plain = bytearray(header.length)
        try:
            if header.type == Type.FORWARD:
                end = len(frame) - keys.TAG_BYTES
                origin_tag = bytes(frame[end - keys.TAG_BYTES : end])
                self.opener.check(bytes(frame[:HEADER_BYTES]) + origin_tag, frame[end:])
            else:
                self.opener.open_into(bytes(frame[:HEADER_BYTES]), frame[HEADER_BYTES:], memoryview(plain))
        except AuthenticationError:
            raise AuthenticationError(
                f"a frame from worker {self.worker} does not authenticate: it was changed, forged or replayed"
            ) from None
        if header.type == Type.BYE:
            self.farewell = True
            raise PeerLostError(
                f"worker {self.worker} left the run while {self.group.describe_run(run)} still needed it"
            )
        raise MismatchError(self.group.describe_mismatch(run, self.peer, header))

    def _ended(self) -> None:
        assert self.stream is not None
        self.engine.suspect(self.worker, f"worker {self.worker} closed its connection without saying goodbye")
        self.close()


def header_call(header: Header) -> Call:
    """The call that an authenticated header names."""
    return Call.unpack(header.call)
