"""Links: how a connection between two workers is dialled, authenticated, closed, and how unexpected frames are refused.

The sender dials an `Outbox` and writes to it; its peer reads from an `Inbox`. `Endpoint` (dataplane/endpoint.py, or the
compiled data plane) moves their bytes. The compiled one calls methods of `Link` by name: `reject`, `length_of_other` and
`stream_ended`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import NamedTuple

from ringfence import keys
from ringfence.dataplane import choice
from ringfence.dataplane.endpoint import RECEIVES, SENDS, Stream
from ringfence.dataplane.shared import SharedMemory, peer_region
from ringfence.errors import AuthenticationError, MismatchError, PeerLostError, ProtocolError
from ringfence.link.frames import (
    HEADER_BYTES,
    HOP_OVERHEAD,
    NO_ORIGIN,
    Call,
    Type,
    frame_bytes,
    pack_header,
    read_header,
)
from ringfence.link.hello import LOCAL, REPLY_BYTES, Lane, LinkHello, LinkSecrets
from ringfence.link.unsealed import LocalOpener, LocalSealer
from ringfence.runtime.events import CollectiveScope, LinkContext, Scope
from ringfence.transport.outage import is_unanswered

_log = logging.getLogger(__name__)


class Arrival(NamedTuple):
    """An accepted connection whose dialler has been authenticated."""

    hello: LinkHello
    stream: Stream
    secrets: LinkSecrets
    memory: memoryview | None = None  # what the dialler shares, if it is on this machine


class Link(choice.Endpoint):
    """One connection to another worker, dialled or accepted."""

    lane = Lane.COLLECTIVE
    served_always = False
    is_local = False  # whether it is a Unix socket to a worker on this machine; the network sets it

    def __init__(self, context: LinkContext, scope: Scope, worker: int) -> None:
        super().__init__(context.ready, context.blocked, context.pool)
        self.context = context
        self.scope = scope
        self.worker = self.far_end = worker  # rank in the world
        self._dials = 0
        self._dial_until = 0.0  # the peer may be unreachable until then
        self._warned = False

    def work(self) -> None:
        """Continue, as far as the stream allows."""
        raise NotImplementedError

    @property
    def needed(self) -> bool:
        """Whether a request waits for the peer."""
        return bool(self.queue)

    @property
    def may_be_local(self) -> bool:
        """Whether it is dialled through a Unix socket if the worker is on this machine."""
        return self.lane in LOCAL and not self.context.channel

    # -- dialling ----------------------------------------------------------------------------------------------------

    def dial(self) -> None:
        """Start the connection, once both workers have verified each other."""
        if self.context.events.failed or self.scope.removed:
            return  # its requests have ended
        if self.context.events.may_dial(self):
            self._connect()

    def _connect(self) -> None:
        """Start to connect; `_shake_hands` continues as the stream allows."""
        context = self.context
        self._dials += 1
        self._dial_until = self._dial_until or context.platform.clock() + context.platform.outage
        self._reply = memoryview(bytearray(REPLY_BYTES))
        self._reply_have = 0
        try:
            context.network.dial(self)
        except PeerLostError as error:
            self._on_unreachable(error)
            return
        self._hello = LinkHello(
            sender=context.rank,
            receiver=self.worker,
            lane=LOCAL[self.lane] if self.is_local else self.lane,
            group=self.scope.digest,
            nonce=context.platform.random(keys.NONCE_BYTES),
            channel=context.channel,
        )
        self._greeting: memoryview | None = memoryview(context.keys.hello_bytes(self._hello))

    def _shake_hands(self) -> bool:
        """Continue the link handshake as the dialler. Return True once frames may be sent."""
        assert self.stream is not None
        if self._greeting is not None:
            if not self.writable:
                return False
            try:
                sent = self.stream.send(self._greeting)
            except OSError as error:  # the error of connecting
                self._on_unreachable(error)
                return False
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
        if self.ended:  # the peer answered and then closed: this worker was too slow, perhaps stopped
            self._redial()
            return False
        confirmation, secrets = self.context.keys.confirm(self._hello, bytes(self._reply))
        if self.is_local:
            self._confirm_locally(confirmation)
        else:
            self.put(memoryview(confirmation))
        self._install_keys(secrets, dialler=True)
        return True

    def _on_unreachable(self, error: OSError | PeerLostError) -> None:
        """Dial again until the outage timeout if there was no answer or no route; otherwise raise `error`."""
        if not is_unanswered(error):
            raise error
        context = self.context
        reason = error.strerror if isinstance(error, OSError) else error
        if context.platform.clock() >= self._dial_until:
            raise PeerLostError(f"{context.no_answer(self.worker)} ({reason})")
        if not self._warned:
            _log.warning("worker %d cannot reach worker %d and keeps trying: %s", context.rank, self.worker, reason)
        self._warned = True
        self._hang_up()
        self._dials -= 1  # the peer did not refuse it
        context.events.call_later(keys.OUTAGE_REDIAL_SECONDS, self.dial)

    def _redial(self) -> None:
        """Dial again, a few times: the peer closed the connection early, perhaps because too many were pending."""
        self._hang_up()
        if self._dials < keys.LINK_DIALS and self.worker not in self.context.departed:
            self.context.events.call_later(keys.LINK_REDIAL_SECONDS * 2**self._dials, self.dial)
        else:
            self.context.events.suspect(self, f"worker {self.worker} closed a connection before answering it")

    def _hang_up(self) -> None:
        self.close()
        self.readable = self.writable = self.ended = False

    def _confirm_locally(self, confirmation: bytes) -> None:
        """Confirm, and pass the memory on that this worker shares. An empty socket takes all of it."""
        memory = self._share_memory()
        assert isinstance(self.stream, socket.socket)
        sent = socket.send_fds(self.stream, [confirmation], [] if memory is None else [memory.descriptor])
        if sent != len(confirmation):
            raise PeerLostError(f"the connection to worker {self.worker} took only a part of a message")

    def _share_memory(self) -> SharedMemory | None:
        """Return the memory in which segments are passed to a worker on this machine, and use it."""
        return None

    def _read_memory(self, memory: memoryview) -> None:
        """Read segments from the memory of a worker on this machine."""
        raise ProtocolError(f"worker {self.worker} shares memory on a link that does not use any")

    def attach(self, arrival: Arrival) -> None:
        """Take over an accepted connection whose dialler has been authenticated."""
        self.stream = arrival.stream
        self.is_local = arrival.hello.lane in LOCAL.values()
        if arrival.memory is not None:
            self._read_memory(arrival.memory)
        self.readable = self.writable = True
        self._install_keys(arrival.secrets, dialler=False)
        self.wake()

    def _install_keys(self, secrets: LinkSecrets, dialler: bool) -> None:
        link_keys = self.context.keys
        if self.is_local:  # the kernel alone passes its frames on
            self.sealer, self.opener = LocalSealer(link_keys.alive), LocalOpener()
        else:
            out, into = (secrets.forth, secrets.back) if dialler else (secrets.back, secrets.forth)
            self.sealer, self.opener = link_keys.sealer(out), link_keys.opener(into)
            if link_keys.chains is not None:
                added = link_keys.chains.add(self.worker, secrets.connection, self.context.channel)
                self.sealer.chain, self.opener.chain = added
        self.open = True

    def _forged(self) -> AuthenticationError:
        return AuthenticationError(
            f"a frame from worker {self.worker} does not authenticate: it was changed, forged or replayed"
        )

    # -- closing -----------------------------------------------------------------------------------------------------

    def control_frame(self, kind: Type, call: bytes, sequence: int = 0, counter: int = 0) -> memoryview:
        """Return a sealed frame without payload."""
        phase, instance = self.sealer.upcoming_key_phase(), self.scope.digest[:16]
        header = pack_header(kind, phase, 0, 0, 0, 0, 0, NO_ORIGIN, sequence, counter, instance, call)
        frame = bytearray(HOP_OVERHEAD)
        frame[:HEADER_BYTES] = header
        self.sealer.seal_into(header, b"", memoryview(frame)[HEADER_BYTES:])
        return memoryview(frame)

    def send_bye(self) -> None:
        """Send BYE and close. If a frame is partly written, it is completed first."""
        self.discard_queue()
        events = self.context.events
        if events.is_current(self):  # called by a signal handler; the interrupted frame has used its counter
            self.close()
        elif self in self.context.blocked and not events.failed and not self.lingering:
            self.lingering = True
        else:
            self._close_with_bye()

    def _close_with_bye(self) -> None:
        with contextlib.suppress(OSError):  # the peer may have closed first
            if self.open and self.stream is not None and self.flush():
                self.put(self.control_frame(Type.BYE, Call(0).pack()))
                self.flush()
        self.close()

    def departure_text(self) -> str:
        """Return what a BYE on this link means. The BYE of the whole run may still be on its way on a control edge."""
        left = f"worker {self.worker} left the run"
        return left if self.worker in self.context.departed else f"{left} or destroyed group {self.scope.name!r}"

    def stream_ended(self) -> None:
        """The peer has closed the stream without a BYE."""
        self.context.events.suspect(self, f"worker {self.worker} closed its connection without a goodbye")
        self.close()

    def linger(self) -> None:
        """Write the rest, then send BYE and close."""
        if self.stream is not None and self.flush():
            self.lingering = False
            self._close_with_bye()

    def discard_queue(self) -> None:
        """Start no queued frame any more: its memory is about to be returned to the caller."""
        self.queue.clear()

    def close(self) -> None:
        """Close the stream and wipe the keys."""
        self.context.blocked.discard(self)
        if self.stream is not None:
            self.context.network.forget(self.stream)
            self.stream.close()
            self.stream = None
        self.open = False
        self.shared = None
        self.forget()

    def forget(self) -> None:
        """Wipe the keys of this connection; another connection derives new ones."""
        for half in (getattr(self, "sealer", None), getattr(self, "opener", None)):
            if half is not None:
                half.forget()


class CollectiveLink(Link):
    """A link between two members of a communicator."""

    def __init__(self, context: LinkContext, scope: CollectiveScope, peer: int) -> None:
        super().__init__(context, scope, scope.ranks[peer])
        self.communicator = scope
        self.peer = peer  # rank in the communicator


class Outbox(CollectiveLink):
    """The sending endpoint. The peer sends nothing on it but NOP and BYE, which are read when the stream ends."""

    def __init__(self, context: LinkContext, scope: CollectiveScope, peer: int) -> None:
        super().__init__(context, scope, peer)
        self.role = SENDS

    def _share_memory(self) -> SharedMemory | None:
        memory = self.communicator.shared_memory()
        self.shared = None if memory is None else memory.region
        return memory

    @property
    def lacks_slots(self) -> bool:
        """Whether the peer has to return a slot of shared memory before this link can send."""
        shared = self.shared  # another thread may ask while this one closes the link
        return shared is not None and self.lent + self.reserved >= shared.quota

    def work(self) -> None:
        if self.ended and self.open:
            self._read_goodbye()
        if self.bye_received:
            self._check_still_needed()
        if not self.open and (self.stream is None or not self._shake_hands()):
            return
        if self.lingering:
            self.linger()
        else:
            choice.send(self)

    def _read_goodbye(self) -> None:
        """The stream has ended. Only a BYE tells whether the peer has read everything that was written."""
        kind = Type.BYE if self.goodbye else self._next_frame_type()
        while kind in (Type.NOP, Type.RETURN):
            kind = self._next_frame_type()
        self.bye_received = kind == Type.BYE
        if self.bye_received:
            self.close()
        else:
            self.stream_ended()

    def _next_frame_type(self) -> int:
        """Return the type of the next frame, or 0 at the end of the stream."""
        assert self.stream is not None
        frame, have = memoryview(bytearray(HOP_OVERHEAD)), 0
        with contextlib.suppress(OSError):  # a reset ends the stream, too
            while have < HOP_OVERHEAD and (got := self.stream.recv_into(frame[have:])):
                have += got
        if have < HOP_OVERHEAD:
            return 0
        header = bytes(frame[:HEADER_BYTES])
        try:
            self.opener.open_into(header, frame[HEADER_BYTES:], memoryview(bytearray()))
        except AuthenticationError:
            raise self._forged() from None
        return read_header(header).type

    def _check_still_needed(self) -> None:
        """Raise PeerLostError if frames are to be sent to a peer that said BYE, or expected from it."""
        queue = self.queue or self.communicator.unreachable_frames(self.peer)
        if queue:
            needed_by = self.communicator.describe_execution(queue[0][0])
            raise PeerLostError(f"{self.departure_text()} while {needed_by} still needed it")


class Inbox(CollectiveLink):
    """The receiving endpoint: reads exactly the frame that the schedule expects next."""

    def __init__(self, context: LinkContext, scope: CollectiveScope, peer: int) -> None:
        super().__init__(context, scope, peer)
        self.role = RECEIVES

    def _read_memory(self, memory: memoryview) -> None:
        self.shared = peer_region(memory, self.worker, self.communicator.neighbours)

    def work(self) -> None:
        frame = choice.receive(self)
        if frame is not None:
            self.reject(frame)

    def send_nop(self) -> None:
        """Send a NOP: the peer has not answered for some seconds and may have missed that this end reads again."""
        if self.open and not self.pending and self.queue:
            self.put(self.control_frame(Type.NOP, Call(0).pack()))
            self.flush()

    def length_of_other(self, header: bytes) -> int:
        try:
            return frame_bytes(read_header(header))
        except ProtocolError:
            raise AuthenticationError("a frame does not authenticate") from None

    def reject(self, complete: bytes) -> None:
        """Raise the error for a frame that was not expected. Its contents are reported only if it authenticates."""
        execution, frame = self.queue[0][0], memoryview(complete)
        header = read_header(frame[:HEADER_BYTES])
        plain = bytearray(header.length)
        try:
            if header.type == Type.FORWARD:
                end = len(frame) - keys.TAG_BYTES
                self.opener.check(frame[:end], frame[end:])
            elif header.type != Type.SHARED or self.shared is None:  # a frame of that type has nothing but its header
                self.opener.open_into(bytes(frame[:HEADER_BYTES]), frame[HEADER_BYTES:], memoryview(plain))
        except AuthenticationError:
            raise AuthenticationError("a frame does not authenticate") from None
        if header.type == Type.BYE:
            self.bye_received = True
            needed_by = self.communicator.describe_execution(execution)
            raise PeerLostError(f"{self.departure_text()} while {needed_by} still needed it")
        raise MismatchError(self.communicator.describe_mismatch(execution, self.peer, header))
