"""Point-to-point transfers and tag matching. A payload is sent only after its receiver has asked for its tag.

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
from typing import Any, Protocol

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
from ringfence.runtime.connection import CollectiveLink, header_call
from ringfence.runtime.events import CollectiveScope, Events, LinkContext


class Transfer(Request):
    """A send or a recv: the bytes, the tag, and the number of segments done. A subclass stages device tensors."""

    __slots__ = ("_lease", "length", "memory", "ordinal", "position", "segments")

    def __init__(self, call: Call, deadline: float, keep: Any, memory: memoryview, length: int | None = None) -> None:
        super().__init__(call, deadline, keep)
        self.memory = memory
        self._lease = lease_of(memory)
        self.length = len(memory) if length is None else length
        self.ordinal = 0
        self.position = 0
        self.segments = segment_count(self.length)

    def requested(self, resume: Callable[[], None]) -> None:
        """Called when the receiver has asked for the payload. `resume` continues after `is_ready` was false."""

    def is_ready(self) -> bool:
        """Return whether the next segment can be sent."""
        return True

    def next_bytes(self) -> memoryview:
        """Return the memory of the next segment."""
        each = segment_bytes(self.length)
        return self.memory[self.position * each : (self.position + 1) * each]

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


class OfferMatcher(Protocol):
    """Matches offers with receives that accept any source."""

    def match_any(self, link: PointToPointLink, tag: int, /) -> None: ...


class PointToPointLink(CollectiveLink):
    """One point-to-point connection, as its sender or its receiver."""

    lane = Lane.POINT_TO_POINT
    served_always = True

    def __init__(self, context: LinkContext, scope: CollectiveScope, peer: int, tag_matcher: OfferMatcher) -> None:
        super().__init__(context, scope, peer)
        self._tag_matcher = tag_matcher
        self._controls: deque[tuple[Type, bytes, int]] = deque()  # OFFERs or WANTs to write
        self._payloads: deque[Transfer] = deque()  # requested by the peer, to write
        self.expected: dict[tuple[int, int], Transfer] = {}  # (tag, ordinal) -> requested, to read
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
        tag = header_call(header).tag
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
            raise ProtocolError(f"worker {self.worker} sent a payload that was not requested")
        target = transfer.next_bytes()
        if (theirs, header.segment, header.length) != (transfer.call, transfer.position, len(target)):
            self._authenticate(frame)
            raise MismatchError(
                f"worker {self.context.rank} receives {transfer.describe()} from worker {self.worker}, which sent "
                f"{describe_call(theirs, header.sequence)}. Both ends must name the same tag, dtype and element count."
            )
        transfer.check_memory()
        try:
            self.opener.open_into(bytes(frame[:HEADER_BYTES]), frame[HEADER_BYTES:], target)
        except AuthenticationError:
            raise self._forged() from None
        transfer.check_memory()
        self.payload_received += len(target)
        transfer.advance()
        if transfer.position == transfer.segments:
            del self.expected[theirs.tag, transfer.ordinal]
            transfer.complete(self.context.events)

    def _authenticate(self, frame: memoryview) -> None:
        plain = memoryview(bytearray(len(frame) - HOP_OVERHEAD))
        try:
            self.opener.open_into(bytes(frame[:HEADER_BYTES]), frame[HEADER_BYTES:], plain)
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
        else:
            transfer = next((each for each in self._payloads if each.is_ready()), None)
            if transfer is None:
                return False
            self._put_payload(transfer)
        return self.flush()

    def _put_payload(self, transfer: Transfer) -> None:
        payload = transfer.next_bytes()
        segment = self.context.queues.pool.take()
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
        transfer.advance()
        if transfer.position == transfer.segments:
            self._payloads.remove(transfer)
            transfer.complete(self.context.events)
        self.put(view[:end], segment)

    def _read_frame(self) -> bool:
        """Continue reading and handle a complete frame. Return True while there may be more."""
        if not self.readable or self.stream is None:
            return False
        if self._buffer is None:
            self._buffer = self.context.queues.pool.take()
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
            self.context.queues.pool.give(self._buffer)
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
        self.bye_received = True
        unfinished = [*self.expected.values(), *self._payloads, *(t for q in self._offered.values() for t in q)]
        if unfinished:
            raise PeerLostError(f"{self.departure_text()}, and {unfinished[0].describe()} waits for it")
        self.close()

    def _ended(self) -> None:
        self.context.events.suspect(self, f"worker {self.worker} closed its connection without a goodbye")
        self.close()


class TagMatcher:
    """The point-to-point links of a communicator, and the receives that accept any source."""

    def __init__(self, context: LinkContext, scope: CollectiveScope) -> None:
        self._context = context
        self._scope = scope
        self._senders: dict[int, PointToPointLink] = {}
        self._receivers: dict[int, PointToPointLink] = {}
        self._any: dict[int, deque[Transfer]] = {}

    def send(self, transfer: Transfer, peer: int) -> None:
        """Submit a send to a peer."""
        link = self._senders.get(peer)
        if link is None:
            link = self._senders[peer] = PointToPointLink(self._context, self._scope, peer, self)
            link.dial()
        link.post_send(transfer)

    def receive(self, transfer: Transfer, peer: int | None) -> None:
        """Submit a receive from a peer, or from any source if `peer` is None."""
        if peer is not None:
            self.receiver(peer).post_recv(transfer)
            return
        tag = transfer.call.tag
        self._any.setdefault(tag, deque()).append(transfer)
        for link in self._receivers.values():
            self.match_any(link, tag)
        self.check_senders()

    def check_senders(self) -> None:
        """Raise PeerLostError if a receive accepts any source and all other members have left.

        A worker that left has nothing on its way: its payloads would have been requested.
        """
        waiting = next((queue[0] for queue in self._any.values() if queue), None)
        others = {*self._scope.ranks} - {self._context.rank}
        if waiting is not None and others <= self._context.departed:
            raise PeerLostError(
                f"{waiting.describe()} accepts any source, and no other member of group {self._scope.name!r} is left"
            )

    def receiver(self, peer: int) -> PointToPointLink:
        """Return the link on which payloads of a peer arrive."""
        link = self._receivers.get(peer)
        if link is None:
            link = self._receivers[peer] = PointToPointLink(self._context, self._scope, peer, self)
        return link

    def match_any(self, link: PointToPointLink, tag: int) -> None:
        """Match unclaimed offers with receives that accept any source."""
        waiting = self._any.get(tag)
        while waiting and link.offers.get(tag, 0) > link.next_recv.get(tag, 0):
            link.post_recv(waiting.popleft())

    def links(self) -> list[PointToPointLink]:
        return [*self._senders.values(), *self._receivers.values()]
