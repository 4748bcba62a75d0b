"""Point-to-point transfers and their links. A payload is sent only after its receiver has asked for its tag.

    sender                              receiver
    send(tag)  -> OFFER tag, n          recorded, for a recv from any source
                  WANT tag, n   <-      recv(tag), before or after the OFFER
               -> PAYLOAD tag, n, segments

So no payload blocks another one. The n-th send with a tag to a peer matches the n-th recv with that tag from it. Each
direction of payload has its own connection, which the sender dials.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from ringfence.dataplane.buffers import lease_of
from ringfence.dataplane.link_memory import ReceiveSlots, SendSlots
from ringfence.dataplane.request import Request, describe_call
from ringfence.dataplane.shared import SharedMemory
from ringfence.errors import AuthenticationError, MismatchError, PeerLostError, ProtocolError
from ringfence.keys import SEGMENT_BYTES, SHARED_FROM_BYTES, SHARED_LINK_SLOTS
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
from ringfence.runtime.events import CollectiveScope, Events, LinkContext
from ringfence.runtime.links import CollectiveLink

_NO_CALL = Call(0).pack()
_FRAMES_AT_ONCE = 4  # with shared memory, before other links have their turn


class Transfer(Request):
    """A send or a recv: the bytes, the tag, and the number of segments done. A subclass stages device tensors."""

    __slots__ = ("_each", "_lease", "length", "memory", "ordinal", "position", "segments")

    def __init__(self, call: Call, deadline: float, keep: Any, memory: memoryview, length: int | None = None) -> None:
        super().__init__(call, deadline, keep)
        self.memory = memory
        self._lease = lease_of(memory)
        self.length = len(memory) if length is None else length
        self.ordinal = 0
        self.position = 0
        self.segments = segment_count(self.length)
        self._each = segment_bytes(self.length)

    def requested(self, resume: Callable[[], None]) -> None:
        """Called when the receiver has asked for the payload. `resume` continues after `is_ready` was false."""

    def is_ready(self) -> bool:
        """Return whether the next segment can be sent."""
        return True

    def next_bytes(self) -> memoryview:
        """Return the memory of the next segment."""
        return self.memory[self.position * self._each : (self.position + 1) * self._each]

    def advance(self) -> None:
        """Count the next segment as sent or received."""
        self.position += 1

    def complete(self, events: Events) -> None:
        """Called after the last segment."""
        events.finish(self)

    def check_memory(self) -> None:
        """Raise TensorChangedError if the storage was resized or moved.

        Called before and after each use of the memory, because ciphers release the interpreter's lock.
        """
        if self._lease is not None and not self._lease.is_intact():
            self.memory_changed(self._lease)


class PointToPointLink(CollectiveLink):
    """One point-to-point connection, as its sender or its receiver."""

    lane = Lane.POINT_TO_POINT
    served_always = True

    def __init__(
        self,
        context: LinkContext,
        scope: CollectiveScope,
        peer: int,
        match_any: Callable[[PointToPointLink, int], None],
    ) -> None:
        """`match_any`: called with a tag that was offered, for receives that accept any source."""
        super().__init__(context, scope, peer)
        self._match_any = match_any
        self._controls: deque[tuple[Type, bytes, int]] = deque()  # OFFERs or WANTs to write
        self._payloads: deque[Transfer] = deque()  # requested by the peer, to write
        self.expected: dict[tuple[int, int], Transfer] = {}  # (tag, ordinal) -> requested, to read
        self._buffer: Any = None
        self._have = 0
        self._first = self._total = HOP_OVERHEAD  # the shortest frame that can come
        # as the sender
        self._outgoing: SendSlots | None = None
        self.sends = 0
        self._next_send: dict[int, int] = {}
        self._offered: dict[int, deque[Transfer]] = {}
        self._wanted: dict[int, int] = {}
        # as the receiver
        self._incoming: ReceiveSlots | None = None
        self.next_recv: dict[int, int] = {}
        self.offers: dict[int, int] = {}  # tag -> number of payloads offered

    @property
    def needed(self) -> bool:
        """Whether a transfer waits for the peer: for its payload, or for its request."""
        return bool(self.expected or self._payloads or any(self._offered.values()))

    # -- sender ------------------------------------------------------------------------------------------------------

    def post_send(self, transfer: Transfer) -> None:
        """Offer a payload, or send it if the receiver has asked for it. Raises PeerLostError if the peer has left."""
        if self.bye_received or (self.stream is None and self.worker in self.context.departed):
            raise PeerLostError(f"{self.departure_text()}, and {transfer.describe()} is for it")
        tag = transfer.call.tag
        transfer.ordinal = transfer.sequence = self._next_send.get(tag, 0)
        self._next_send[tag] = transfer.ordinal + 1
        if self._wanted.get(tag, 0) > transfer.ordinal:
            self._request_payload(transfer)
        else:
            self._offered.setdefault(tag, deque()).append(transfer)
            self._controls.append((Type.OFFER, transfer.call.pack(), transfer.ordinal))
        self.wake()

    def _on_want(self, header: Header) -> None:
        tag = Call.unpack(header.call).tag
        if header.sequence != self._wanted.get(tag, 0):
            raise ProtocolError(f"worker {self.worker} asked for payloads of tag {tag} out of order")
        self._wanted[tag] = header.sequence + 1
        waiting = self._offered.get(tag)
        if waiting:
            self._request_payload(waiting.popleft())

    def _request_payload(self, transfer: Transfer) -> None:
        self._payloads.append(transfer)
        transfer.requested(self.wake)

    # -- receiver ----------------------------------------------------------------------------------------------------

    def post_recv(self, transfer: Transfer) -> None:
        """Ask for a payload. Raises PeerLostError if the peer has left."""
        tag = transfer.call.tag
        transfer.ordinal = transfer.sequence = self.next_recv.get(tag, 0)
        self.next_recv[tag] = transfer.ordinal + 1
        transfer.source = self.peer
        self.expected[tag, transfer.ordinal] = transfer
        self._controls.append((Type.WANT, transfer.call.pack(), transfer.ordinal))
        if self.bye_received or (self.stream is None and self.worker in self.context.departed):
            raise PeerLostError(f"{self.departure_text()}, and {transfer.describe()} waits for it")
        self.wake()

    def _on_offer(self, header: Header) -> None:
        tag = Call.unpack(header.call).tag
        if header.sequence < self.offers.get(tag, 0):
            raise ProtocolError(f"worker {self.worker} offered a payload of tag {tag} twice")
        self.offers[tag] = header.sequence + 1
        self._match_any(self, tag)

    def _on_payload(self, header: Header, frame: memoryview) -> None:
        theirs = Call.unpack(header.call)
        transfer = self.expected.get((theirs.tag, header.sequence))
        if transfer is None:
            self._authenticate(frame)
            raise ProtocolError(f"worker {self.worker} sent a payload that was not requested")
        target = transfer.next_bytes()
        if (theirs, header.segment, header.length) != (transfer.call, transfer.position, len(target)):
            self._authenticate(frame)
            raise MismatchError(
                f"worker {self.context.rank} receives {transfer.describe()} from worker {self.worker}, which sent "
                f"{describe_call(theirs, header.sequence)}. Both ends must name the same tag, dtype and element count."
            )
        transfer.check_memory()
        if header.type == Type.SHARED:
            assert self._incoming is not None
            self._incoming.read(header.counter, target)
        else:
            self._open(frame, target)
            transfer.check_memory()
        self.payload_received += len(target)
        transfer.advance()
        if transfer.position == transfer.segments:
            del self.expected[theirs.tag, transfer.ordinal]
            transfer.complete(self.context.events)

    def _authenticate(self, frame: memoryview) -> None:
        if len(frame) > HEADER_BYTES:  # the frame of a segment in shared memory has nothing else
            self._open(frame, memoryview(bytearray(len(frame) - HOP_OVERHEAD)))

    def _open(self, frame: memoryview, target: memoryview) -> None:
        try:
            self.opener.open_into(bytes(frame[:HEADER_BYTES]), frame[HEADER_BYTES:], target)
        except AuthenticationError:
            raise self._forged() from None

    def discard_queue(self) -> None:
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
        for _ in range(_FRAMES_AT_ONCE if self._incoming or self._outgoing else 1):
            progress = self._read_frame()
            self._return_slots()
            if self.stream is not None and self.flush():
                progress |= self._write_frame()
            if not progress:
                return
        self.wake()

    def _dialling(self) -> bool:
        return hasattr(self, "_hello")

    def _write_frame(self) -> bool:
        if self._controls:
            kind, call, ordinal = self._controls.popleft()
            self.put(self.control_frame(kind, call, ordinal))
        else:
            transfer = next((each for each in self._payloads if each.is_ready()), None)
            if transfer is None:
                return False
            payload = transfer.next_bytes()
            if self._outgoing is None or len(payload) < SHARED_FROM_BYTES:
                self._put_payload(transfer, payload)
            elif self._outgoing.has_room:
                self._put_shared(transfer, payload, self._outgoing)
            else:
                return False  # until the receiver returns a slot
        return self.flush()

    def _put_payload(self, transfer: Transfer, payload: memoryview) -> None:
        segment = self.context.pool.take()
        view = segment.view
        header = self._payload_header(Type.PAYLOAD, transfer, len(payload))
        end = len(payload) + HOP_OVERHEAD
        view[:HEADER_BYTES] = header
        transfer.check_memory()
        self.sealer.seal_into(header, payload, view[HEADER_BYTES:end])
        transfer.check_memory()
        self._count_sent(transfer, len(payload))
        self.put(view[:end], segment)

    def _put_shared(self, transfer: Transfer, payload: memoryview, slots: SendSlots) -> None:
        """Write a segment to shared memory; its frame is a header."""
        transfer.check_memory()
        frame = self._payload_header(Type.SHARED, transfer, len(payload), slots.write(payload))
        self._count_sent(transfer, len(payload))
        self.put(memoryview(frame))

    def _payload_header(self, kind: Type, transfer: Transfer, length: int, slot: int = 0) -> bytes:
        return pack_header(
            kind,
            self.sealer.upcoming_key_phase(),
            0,
            0,
            length,
            0,
            transfer.position,
            NO_ORIGIN,
            transfer.ordinal,
            slot,
            self.communicator.digest[:16],
            transfer.call.pack(),
        )

    def _count_sent(self, transfer: Transfer, length: int) -> None:
        self.payload_sent += length
        transfer.advance()
        if transfer.position == transfer.segments:
            self._payloads.remove(transfer)
            transfer.complete(self.context.events)

    def _read_frame(self) -> bool:
        """Continue reading and handle a complete frame. Return True while there may be more."""
        if not self.readable or self.stream is None:
            return False
        if self._buffer is None:
            self._buffer = self.context.pool.take()
        view = self._buffer.view
        wanted = self._total - self._have
        try:
            got = self.stream.recv_into(view[self._have : self._total])
        except BlockingIOError:
            self.readable = False
            return False
        if not got:
            self.stream_ended()
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
        self._have, self._total = 0, self._first
        if not self.expected:
            self.context.pool.give(self._buffer)
            self._buffer = None
        return True

    def _header(self, view: memoryview) -> Header:
        try:
            header = read_header(view[:HEADER_BYTES])
        except ProtocolError:
            raise self._forged() from None
        shared = header.type == Type.SHARED
        if header.type == Type.RETURN:
            known = self._outgoing is not None
        elif shared or header.type == Type.PAYLOAD:
            known = shared == (self._incoming is not None and header.length >= SHARED_FROM_BYTES)
        else:
            known = header.type in (Type.OFFER, Type.WANT, Type.BYE)
        if not known:
            raise self._forged()
        return header

    def _handle(self, header: Header, frame: memoryview) -> None:
        if header.type in (Type.PAYLOAD, Type.SHARED):
            self._on_payload(header, frame)
            return
        self._authenticate(frame)
        if header.type == Type.OFFER:
            self._on_offer(header)
        elif header.type == Type.WANT:
            self._on_want(header)
        elif header.type == Type.RETURN:
            assert self._outgoing is not None
            self._outgoing.take_back(header.counter)
        else:
            self._on_bye()

    def _on_bye(self) -> None:
        self.bye_received = True
        unfinished = [*self.expected.values(), *self._payloads, *(t for q in self._offered.values() for t in q)]
        if unfinished:
            raise PeerLostError(f"{self.departure_text()}, and {unfinished[0].describe()} waits for it")
        self.close()

    # -- shared memory -----------------------------------------------------------------------------------------------

    def _share_memory(self) -> SharedMemory | None:
        self._outgoing = self.context.memory.make(SHARED_LINK_SLOTS * SEGMENT_BYTES, SendSlots)
        return self._outgoing

    def _read_memory(self, memory: memoryview) -> None:
        self._incoming = ReceiveSlots(memory)
        self._first = self._total = HEADER_BYTES

    def _return_slots(self) -> None:
        """Tell the sender which slots it may use again. One that has closed the link needs none."""
        if self._incoming is None or self.stream is None or self.pending or not self._incoming.due:
            return
        total = self._incoming.due
        frame = self.control_frame(Type.RETURN, _NO_CALL, counter=total)
        try:
            sent = self.stream.send(frame)
        except BlockingIOError:
            return  # the stream wakes this link when the sender has read
        except (BrokenPipeError, ConnectionResetError):
            sent = len(frame)
        if sent != len(frame):
            raise ProtocolError(f"the connection to worker {self.worker} took only a part of a message")
        self._incoming.reported(total)

    def forget(self) -> None:
        super().forget()
        self._incoming = None
        if self._outgoing is not None:
            self._outgoing.close()
            self.context.memory.give(self._outgoing.size)
            self._outgoing = None
