"""Point-to-point: a payload leaves only after its receiver has asked for its tag, so nothing ever blocks the lane.

    sender                              receiver
    send(tag)  -> OFFER tag, n          kept, for a recv from any source
                  WANT tag, n   <-      recv(tag), whichever came first
               -> PAYLOAD tag, n, segments

The n-th send with a tag to a peer is the n-th recv with that tag from it. One connection for each direction of payload,
dialled by the sender.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from ringfence.dataplane.buffers import lease_of
from ringfence.dataplane.request import Request, describe_call
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
from ringfence.link.hello import Lane
from ringfence.link.segments import segment_bytes, segment_count
from ringfence.runtime.connection import Link, header_call

if TYPE_CHECKING:
    from ringfence.runtime.communicator import Communicator
    from ringfence.runtime.engine import Engine


class Transfer(Request):
    """A send or a recv: the bytes, the tag, and how far it has come."""

    __slots__ = ("_lease", "memory", "ordinal", "position", "segments")

    def __init__(self, call: Call, deadline: float, keep: Any, memory: memoryview) -> None:
        super().__init__(call, deadline, keep)
        self.memory = memory
        self._lease = lease_of(memory)
        self.ordinal = 0
        self.position = 0
        self.segments = segment_count(len(memory))

    def next_bytes(self) -> memoryview:
        each = segment_bytes(len(self.memory))
        return self.memory[self.position * each : (self.position + 1) * each]

    def check_memory(self) -> None:
        """Refuse memory that its storage no longer has: before each use, and after, because ciphers give up the lock."""
        if self._lease is not None and not self._lease.is_intact():
            self.memory_changed(self._lease)


class PointToPointLink(Link):
    """One point-to-point connection, at either end."""

    lane = Lane.POINT_TO_POINT
    served_always = True

    def __init__(self, engine: Engine, communicator: Communicator, peer: int, tag_matcher: TagMatcher) -> None:
        super().__init__(engine, communicator, peer)
        self._tag_matcher = tag_matcher
        self._controls: deque[tuple[Type, bytes, int]] = deque()  # OFFERs or WANTs to write
        self._payloads: deque[Transfer] = deque()  # asked for, to write
        self.expected: dict[tuple[int, int], Transfer] = {}  # (tag, ordinal) -> asked for, to read
        self._buffer: Any = None
        self._have = 0
        self._total = HOP_OVERHEAD
        # as the sender
        self.sends = 0
        self._next_send: dict[int, int] = {}
        self._offered: dict[int, deque[Transfer]] = {}
        self._wanted: dict[int, int] = {}
        # as the receiver
        self.next_recv: dict[int, int] = {}
        self.offers: dict[int, int] = {}  # tag -> how many payloads have been offered

    @property
    def needed(self) -> bool:
        """Whether a transfer waits for the peer: for its payload, or for being asked."""
        return bool(self.expected or self._payloads or any(self._offered.values()))

    # -- sender ------------------------------------------------------------------------------------------------------

    def post_send(self, transfer: Transfer) -> None:
        if self.farewell or (self.stream is None and self.worker in self.engine.departed):
            raise PeerLostError(f"{self.parting()}, and {transfer.describe()} is for it")
        tag = transfer.call.tag
        transfer.ordinal = transfer.sequence = self._next_send.get(tag, 0)
        self._next_send[tag] = transfer.ordinal + 1
        if self._wanted.get(tag, 0) > transfer.ordinal:
            self._payloads.append(transfer)
        else:
            self._offered.setdefault(tag, deque()).append(transfer)
            self._controls.append((Type.OFFER, transfer.call.pack(), transfer.ordinal))
        self.wake()

    def _on_want(self, header: Header) -> None:
        tag = header_call(header).tag
        if header.sequence != self._wanted.get(tag, 0):
            raise ProtocolError(f"worker {self.worker} asked for payloads of tag {tag} out of order")
        self._wanted[tag] = header.sequence + 1
        waiting = self._offered.get(tag)
        if waiting:
            self._payloads.append(waiting.popleft())

    # -- receiver ----------------------------------------------------------------------------------------------------

    def post_recv(self, transfer: Transfer) -> None:
        tag = transfer.call.tag
        transfer.ordinal = transfer.sequence = self.next_recv.get(tag, 0)
        self.next_recv[tag] = transfer.ordinal + 1
        transfer.source = self.peer
        self.expected[tag, transfer.ordinal] = transfer
        self._controls.append((Type.WANT, transfer.call.pack(), transfer.ordinal))
        if self.farewell or (self.stream is None and self.worker in self.engine.departed):
            raise PeerLostError(f"{self.parting()}, and {transfer.describe()} waits for it")
        self.wake()

    def _on_offer(self, header: Header) -> None:
        tag = header_call(header).tag
        if header.sequence < self.offers.get(tag, 0):
            raise ProtocolError(f"worker {self.worker} offered a payload of tag {tag} twice")
        self.offers[tag] = header.sequence + 1
        self._tag_matcher.match_any(self, tag)

    def _on_payload(self, header: Header, frame: memoryview) -> None:
        theirs = header_call(header)
        transfer = self.expected.get((theirs.tag, header.sequence))
        if transfer is None:
            self._authenticate(frame)
            raise ProtocolError(f"worker {self.worker} sent a payload that nobody asked for")
        target = transfer.next_bytes()
        if (theirs, header.segment, header.length) != (transfer.call, transfer.position, len(target)):
            self._authenticate(frame)
            raise MismatchError(
                f"worker {self.engine.rank} receives {transfer.describe()} from worker {self.worker}, which sent "
                f"{describe_call(theirs, header.sequence)}. Both ends must name the same tag, dtype and element count."
            )
        transfer.check_memory()
        try:
            self.opener.open_into(bytes(frame[:HEADER_BYTES]), frame[HEADER_BYTES:], target)
        except AuthenticationError:
            raise self._forged() from None
        transfer.check_memory()
        self.payload_received += len(target)
        transfer.position += 1
        if transfer.position == transfer.segments:
            del self.expected[theirs.tag, transfer.ordinal]
            self.engine.finish(transfer)

    def _authenticate(self, frame: memoryview) -> None:
        plain = memoryview(bytearray(len(frame) - HOP_OVERHEAD))
        try:
            self.opener.open_into(bytes(frame[:HEADER_BYTES]), frame[HEADER_BYTES:], plain)
        except AuthenticationError:
            raise self._forged() from None

    def drop(self) -> None:
        self._controls.clear()
        self._payloads.clear()
        self.expected.clear()
        self._offered.clear()

    # -- the connection ----------------------------------------------------------------------------------------------

    def work(self) -> None:
        if not self.open and (self.stream is None or not self._dialling() or not self._shake_hands()):
            return
        if self.lingering:
            self.linger()
            return
        progress = self._read_frame()
        if self.stream is not None and self.flush():
            progress |= self._write_frame()
        if progress:
            self.wake()

    def _dialling(self) -> bool:
        return hasattr(self, "_hello")

    def _write_frame(self) -> bool:
        if self._controls:
            kind, call, ordinal = self._controls.popleft()
            self.put(self.control_frame(kind, call, ordinal))
        elif self._payloads:
            self._put_payload(self._payloads[0])
        else:
            return False
        return self.flush()

    def _put_payload(self, transfer: Transfer) -> None:
        payload = transfer.next_bytes()
        segment = self.engine.pool.take()
        view = segment.view
        header = pack_header(
            Type.PAYLOAD,
            self.sealer.upcoming_key_phase(),
            0,
            0,
            len(payload),
            0,
            transfer.position,
            NO_ORIGIN,
            transfer.ordinal,
            0,
            self.communicator.digest[:16],
            transfer.call.pack(),
        )
        end = len(payload) + HOP_OVERHEAD
        view[:HEADER_BYTES] = header
        transfer.check_memory()
        self.sealer.seal_into(header, payload, view[HEADER_BYTES:end])
        transfer.check_memory()
        self.payload_sent += len(payload)
        transfer.position += 1
        if transfer.position == transfer.segments:
            self._payloads.popleft()
            self.engine.finish(transfer)
        self.put(view[:end], segment)

    def _read_frame(self) -> bool:
        """Read on; handle a frame that is complete. True while there may be more."""
        if not self.readable or self.stream is None:
            return False
        if self._buffer is None:
            self._buffer = self.engine.pool.take()
        view = self._buffer.view
        wanted = self._total - self._have
        try:
            got = self.stream.recv_into(view[self._have : self._total])
        except BlockingIOError:
            self.readable = False
            return False
        if not got:
            self._ended()
            return False
        self._have += got
        self.wire_received += got
        if got < wanted:
            self.readable = self.ended
            return self.ended
        header = self._header(view)
        self._total = frame_bytes(header)
        if self._have < self._total:
            return True
        self._handle(header, view[: self._total])
        self._have, self._total = 0, HOP_OVERHEAD
        if not self.expected:
            self.engine.pool.give(self._buffer)
            self._buffer = None
        return True

    def _header(self, view: memoryview) -> Header:
        try:
            header = read_header(view[:HEADER_BYTES])
        except ProtocolError:
            raise self._forged() from None
        if header.type not in (Type.OFFER, Type.WANT, Type.PAYLOAD, Type.BYE):
            raise self._forged()
        return header

    def _handle(self, header: Header, frame: memoryview) -> None:
        if header.type == Type.PAYLOAD:
            self._on_payload(header, frame)
            return
        self._authenticate(frame)
        if header.type == Type.OFFER:
            self._on_offer(header)
        elif header.type == Type.WANT:
            self._on_want(header)
        else:
            self._on_bye()

    def _on_bye(self) -> None:
        self.farewell = True
        unfinished = [*self.expected.values(), *self._payloads, *(t for q in self._offered.values() for t in q)]
        if unfinished:
            raise PeerLostError(f"{self.parting()}, and {unfinished[0].describe()} waits for it")
        self.close()

    def _ended(self) -> None:
        self.engine.suspect(self, f"worker {self.worker} closed its connection without saying goodbye")
        self.close()


class TagMatcher:
    """The point-to-point side of a group: who sends to whom, and the recvs that take any source."""

    def __init__(self, engine: Engine, communicator: Communicator) -> None:
        self._engine = engine
        self._communicator = communicator
        self._senders: dict[int, PointToPointLink] = {}
        self._receivers: dict[int, PointToPointLink] = {}
        self._any: dict[int, deque[Transfer]] = {}

    def send(self, transfer: Transfer, peer: int) -> None:
        link = self._senders.get(peer)
        if link is None:
            link = self._senders[peer] = PointToPointLink(self._engine, self._communicator, peer, self)
            link.dial()
        link.post_send(transfer)

    def receive(self, transfer: Transfer, peer: int | None) -> None:
        if peer is not None:
            self.receiver(peer).post_recv(transfer)
            return
        tag = transfer.call.tag
        self._any.setdefault(tag, deque()).append(transfer)
        for link in self._receivers.values():
            self.match_any(link, tag)
        self.expect_senders()

    def expect_senders(self) -> None:
        """A recv from any source needs somebody who could send. Who left has nothing on its way: it would have been asked."""
        waiting = next((queue[0] for queue in self._any.values() if queue), None)
        others = {*self._communicator.ranks} - {self._engine.rank}
        if waiting is not None and others <= self._engine.departed:
            raise PeerLostError(
                f"{waiting.describe()} takes any source, and nobody is left in group {self._communicator.name!r} to send"
            )

    def receiver(self, peer: int) -> PointToPointLink:
        link = self._receivers.get(peer)
        if link is None:
            link = self._receivers[peer] = PointToPointLink(self._engine, self._communicator, peer, self)
        return link

    def match_any(self, link: PointToPointLink, tag: int) -> None:
        """Give an offer that no recv has claimed to a recv that takes any source."""
        waiting = self._any.get(tag)
        while waiting and link.offers.get(tag, 0) > link.next_recv.get(tag, 0):
            link.post_recv(waiting.popleft())

    def links(self) -> list[PointToPointLink]:
        return [*self._senders.values(), *self._receivers.values()]
