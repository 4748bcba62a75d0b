"""Links: how the ends of a connection come to be, say goodbye, and refuse what they did not expect.

An `Outbox` is dialled by its sender and writes; an `Inbox` is what the other end reads. What moves their bytes is `End`'s
(ends.py, or _core.c).
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from ringfence import keys
from ringfence.dataplane import choice
from ringfence.dataplane.endpoint import Stream
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
from ringfence.transport.outage import is_unanswered

if TYPE_CHECKING:
    from ringfence.runtime.communicator import Communicator
    from ringfence.runtime.engine import Engine


_log = logging.getLogger(__name__)


class Link(choice.Endpoint):
    """One connection: the worker at its other end, and how it came to be."""

    lane = Lane.COLLECTIVE
    served_always = False

    def __init__(self, engine: Engine, communicator: Communicator, peer: int) -> None:
        super().__init__(engine.ready, engine.blocked, engine.pool)
        self.engine = engine
        self.communicator = communicator
        self.peer = peer  # rank in the group
        self.worker = self.far_end = communicator.ranks[peer]  # rank in the world
        self.lingering = False  # its group is gone: say goodbye when what is written has left
        self.farewell = False  # the peer said BYE
        self._dials = 0
        self._dial_until = 0.0  # the peer may be out of reach until then
        self._warned = False

    def work(self) -> None:
        raise NotImplementedError

    @property
    def needed(self) -> bool:
        """Whether something waits for its peer."""
        return bool(self.queue)

    # -- dialling ----------------------------------------------------------------------------------------------------

    def dial(self) -> None:
        """Begin the connection, once the two workers have met."""
        if self.engine.failure is not None or self.communicator.removed:
            return  # what it would have carried has ended
        if self.engine.acceptor.is_verified(self):
            self._begin()

    def _begin(self) -> None:
        """`_shake_hands` goes on as the stream allows."""
        self._dials += 1
        self._dial_until = self._dial_until or self.engine.clock() + self.engine.outage
        self._hello = Hello(
            sender=self.engine.rank,
            receiver=self.worker,
            lane=self.lane,
            group=self.communicator.digest,
            nonce=self.engine.random(keys.NONCE_BYTES),
        )
        self._greeting: memoryview | None = memoryview(self.engine.hello_bytes(self._hello))
        self._reply = memoryview(bytearray(REPLY_BYTES))
        self._reply_have = 0
        try:
            self.engine.network.dial(self)
        except PeerLostError as error:
            self._out_of_reach(error)

    def _shake_hands(self) -> bool:
        """One step further as the dialler; True once frames may be sent."""
        assert self.stream is not None
        if self._greeting is not None:
            if not self.writable:
                return False
            try:
                sent = self.stream.send(self._greeting)
            except OSError as error:  # that of connecting
                self._out_of_reach(error)
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
        if self.ended:  # it answered, and did not wait for this worker, which may have been stopped
            self._redial()
            return False
        self._confirm(bytes(self._reply))
        return True

    def _out_of_reach(self, error: OSError | PeerLostError) -> None:
        """No answer, or no route: dial again until the outage timeout. Raises what is no outage."""
        if not is_unanswered(error):
            raise error
        reason = error.strerror if isinstance(error, OSError) else error
        if self.engine.clock() >= self._dial_until:
            raise PeerLostError(f"{self.engine.no_answer(self.worker)} ({reason})")
        if not self._warned:
            _log.warning("worker %d cannot reach worker %d and tries on: %s", self.engine.rank, self.worker, reason)
        self._warned = True
        self._hang_up()
        self._dials -= 1  # nobody turned it away
        self.engine.call_later(keys.OUTAGE_REDIAL_SECONDS, self.dial)

    def _redial(self) -> None:
        """The peer hung up before it was confirmed: perhaps too many dialled at once. Try again, a few times."""
        self._hang_up()
        if self._dials < keys.LINK_DIALS and self.worker not in self.engine.departed:
            self.engine.call_later(keys.LINK_REDIAL_SECONDS * 2**self._dials, self.dial)
        else:
            self.engine.suspect(self, f"worker {self.worker} closed a connection before answering it")

    def _hang_up(self) -> None:
        self.close()
        self.readable = self.writable = self.ended = False

    def _confirm(self, reply: bytes) -> None:
        nonce, confirmation = reply[: keys.NONCE_BYTES], reply[keys.NONCE_BYTES :]
        secrets = self.engine.link_secrets(self.worker, self._hello, nonce)
        if not keys.same(confirmation, secrets.acceptor_confirms):
            raise AuthenticationError(f"whoever answered for worker {self.worker} does not hold its key")
        self.put(memoryview(secrets.dialler_confirms))
        self._use(secrets, dialler=True)

    def attach(self, stream: Stream, secrets: LinkSecrets) -> None:
        """Take over an accepted connection whose dialler has been confirmed."""
        self.stream = stream
        self.readable = self.writable = True
        self._use(secrets, dialler=False)
        self.wake()

    def _use(self, secrets: LinkSecrets, dialler: bool) -> None:
        out, into = (secrets.forth, secrets.back) if dialler else (secrets.back, secrets.forth)
        self.sealer = self.engine.sealer(out)
        self.opener = self.engine.opener(into)
        self.open = True

    def _forged(self) -> AuthenticationError:
        return AuthenticationError(
            f"a frame from worker {self.worker} does not authenticate: it was changed, forged or replayed"
        )

    # -- the end -----------------------------------------------------------------------------------------------------

    def control_frame(self, kind: Type, call: bytes, sequence: int = 0) -> memoryview:
        """A frame without payload."""
        header = pack_header(
            kind,
            self.sealer.upcoming_key_phase(),
            0,
            0,
            0,
            0,
            0,
            NO_ORIGIN,
            sequence,
            0,
            self.communicator.digest[:16],
            call,
        )
        frame = bytearray(HOP_OVERHEAD)
        frame[:HEADER_BYTES] = header
        self.sealer.seal_into(header, b"", memoryview(frame)[HEADER_BYTES:])
        return memoryview(frame)

    def say_bye(self) -> None:
        """Tell the peer that nothing follows; then close. A frame that is half written is finished first."""
        self.drop()
        if self is self.engine.at_work:  # a signal handler leaves: the frame that it interrupted has its number already
            self.close()
        elif self in self.engine.blocked and self.engine.failure is None and not self.lingering:
            self.lingering = True
        else:
            self._last_word()

    def _last_word(self) -> None:
        with contextlib.suppress(OSError):  # the peer may have left first
            if self.open and self.stream is not None and self.flush():
                self.put(self.control_frame(Type.BYE, Call(0).pack()))
                self.flush()
        self.close()

    def parting(self) -> str:
        """What a goodbye on this link means. That of the whole run may still be on its way, on another connection."""
        left = f"worker {self.worker} left the run"
        return left if self.worker in self.engine.departed else f"{left} or destroyed group {self.communicator.name!r}"

    def linger(self) -> None:
        """Its group is gone: write what is left, then say goodbye."""
        if self.stream is not None and self.flush():
            self.lingering = False
            self._last_word()

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
        self.forget()

    def forget(self) -> None:
        """Its keys end with the connection; another one has new ones."""
        for half in (getattr(self, "sealer", None), getattr(self, "opener", None)):
            if half is not None:
                half.forget()


class Outbox(Link):
    """The sending end of a collective link. Nothing comes back on it but a goodbye, which is read when the stream ends."""

    def work(self) -> None:
        if self.ended and self.open:
            self._hear_out()
        if self.farewell:
            self._miss()
        if not self.open and (self.stream is None or not self._shake_hands()):
            return
        if self.lingering:
            self.linger()
        else:
            choice.send(self)

    def _hear_out(self) -> None:
        """The stream has ended. All may have been written, and read by nobody: only a goodbye says that nobody misses it."""
        while (kind := self._next_word()) == Type.NOP:
            pass
        self.farewell = kind == Type.BYE
        if not self.farewell:
            self.engine.suspect(self, f"worker {self.worker} closed its connection without saying goodbye")
        self.close()

    def _next_word(self) -> int:
        """The type of the next frame; 0 where there is none."""
        assert self.stream is not None
        frame, have = memoryview(bytearray(HOP_OVERHEAD)), 0
        with contextlib.suppress(OSError):  # a reset is an end like any other
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

    def _miss(self) -> None:
        """The peer has said goodbye: fail if something is to be written to it, or was to come on a link of its own."""
        inbox = self.communicator.inboxes.get(self.peer)
        queue = self.queue or (inbox.queue if inbox is not None and self.communicator.never_comes(inbox) else ())
        if queue:
            execution = queue[0][0]
            raise PeerLostError(
                f"{self.parting()} while {self.communicator.describe_execution(execution)} still needed it"
            )


class Inbox(Link):
    """The receiving end of a collective link: reads exactly the frame that the schedule expects next."""

    def work(self) -> None:
        try:
            frame = choice.receive(self)
        except AuthenticationError as error:
            raise AuthenticationError(
                f"{error} (from worker {self.worker}): it was changed, forged or replayed"
            ) from None
        if frame is not None:
            self._surprise(memoryview(frame))

    def prompt(self) -> None:
        """The peer has not answered for some seconds, and may have missed that this end reads again: tell it by a frame."""
        if self.open and not self.pending and self.queue:
            self.put(self.control_frame(Type.NOP, Call(0).pack()))
            self.flush()

    def length_of_other(self, header: bytes) -> int:
        try:
            return frame_bytes(read_header(header))
        except ProtocolError:
            raise AuthenticationError("a frame does not authenticate") from None

    def _surprise(self, frame: memoryview) -> None:
        """A frame that is not the expected one: only once it authenticates is it believed, and then it is named."""
        execution = self.queue[0][0]
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
            raise self._forged() from None
        if header.type == Type.BYE:
            self.farewell = True
            raise PeerLostError(
                f"{self.parting()} while {self.communicator.describe_execution(execution)} still needed it"
            )
        raise MismatchError(self.communicator.describe_mismatch(execution, self.peer, header))

    def stream_ended(self) -> None:
        assert self.stream is not None
        self.engine.suspect(self, f"worker {self.worker} closed its connection without saying goodbye")
        self.close()


def header_call(header: Header) -> Call:
    """The call that an authenticated header names."""
    return Call.unpack(header.call)
