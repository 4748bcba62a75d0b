"""The engine: one worker's part in one session. Its groups and links, what is unfinished, and how it fails.

It owns no thread and no socket: whoever drives it (`loop.Loop` over TCP, a test over memory) calls `run_ready` when
streams changed and `expire` when time passed. A failure of any link ends the session, here and, through the control
edges, on every other worker.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from ringfence.collectives import Table
from ringfence.control import Abort, Bye, Closed, ControlMessage
from ringfence.dataplane.choice import Pool
from ringfence.dataplane.endpoint import Stream
from ringfence.dataplane.request import POINT_TO_POINT, CollectiveRequest, Request, first_check
from ringfence.errors import (
    AbortedError,
    AdmissionError,
    AuthenticationError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    RingfenceError,
    TensorChangedError,
)
from ringfence.keys import OUTAGE_SECONDS, SUSPICION_SECONDS, Secret
from ringfence.link.hello import Hello, LinkSecrets, link_secrets, write_hello
from ringfence.link.seal import Opener, OriginKeys, Sealer
from ringfence.runtime.acceptor import Acceptor
from ringfence.runtime.communicator import Communicator
from ringfence.runtime.connection import Inbox, Link
from ringfence.runtime.counters import Totals, add_links
from ringfence.runtime.peer_verification import PeerVerifier
from ringfence.runtime.point_to_point import Transfer
from ringfence.transport.fork import ALIVE
from ringfence.transport.outage import is_unanswered
from ringfence.transport.tcp import refusal

_log = logging.getLogger("ringfence")

ABORT_CODES: tuple[type[RingfenceError], ...] = (
    RingfenceError,
    AuthenticationError,
    MismatchError,
    PeerLostError,
    CollectiveTimeoutError,
    AbortedError,
    ProtocolError,
    AdmissionError,
)


# For what is under way when a group is destroyed, and for slow peers to take what is written; longer if an outage may be.
FAREWELL_SECONDS = 60.0


class Network(Protocol):
    """Moves opaque bytes."""

    def dial(self, link: Link) -> None:
        """Begin to connect `link.worker` and set `link.stream`; `link.notify` says when it can be written."""

    def watch(self, stream: Stream, handler: Any) -> None:
        """From now on tell `handler` when the stream changes."""

    def forget(self, stream: Stream) -> None:
        """Tell nobody any more."""


class Edge(Protocol):
    """A control connection to a neighbour in the admission tree."""

    @property
    def peer(self) -> int: ...
    def send(self, message: Abort | Bye) -> None: ...
    def receive(self) -> list[ControlMessage]: ...


class _Task:
    """Work that belongs to no link."""

    __slots__ = ("queued", "work", "worker")

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.queued = True
        self.worker = -1


class Engine:
    """One worker in one session."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        session_key: Secret,
        private_key: X25519PrivateKey,
        public_keys: Sequence[bytes],
        network: Network,
        table: Table,
        edges: Sequence[Edge] = (),
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[int], bytes] = os.urandom,
        alive: Sequence[int] = ALIVE,
        peer_verifier: PeerVerifier | None = None,
        outage: float = OUTAGE_SECONDS,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.session_key = session_key
        self.network = network
        self.table = table
        self.edges = list(edges)
        self.clock = clock
        self.random = random
        self.alive = alive
        self.outage = outage  # seconds without an answer until a worker is given up
        self.farewell = max(FAREWELL_SECONDS, outage)
        self.names: Sequence[str] = ()  # the workers, for people: identity and address
        self.pool = Pool()
        self.ready: deque[Any] = deque()
        self.at_work: Any = None  # the one of them whose turn it is, or was when an interrupt came
        self.communicators: dict[bytes, Communicator] = {}
        self.acceptor = Acceptor(self, peer_verifier)
        self.blocked: set[Link] = set()  # links with bytes that the kernel has not taken yet
        self.departed: set[int] = set()
        self.failure: RingfenceError | None = None
        self._report: Abort | None = None  # the failure as the neighbours still have to be told it
        # What links counted that are gone, and destroyed groups, whose last bytes may be on their way. Replaced as a whole:
        # others read it at any time.
        self.past_links: tuple[Totals, tuple[Communicator, ...]] = ({}, ())
        self.ended = [0] * (POINT_TO_POINT + 1)  # by operation code: how many have ended well
        self.past: set[bytes] = set()  # the digests of all that were destroyed: whoever dials one is told
        self.unfinished: dict[Request, None] = {}
        self._soonest = float("inf")
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._private_key: X25519PrivateKey | None = private_key
        self._public_keys = public_keys
        self._shared: dict[int, bytes] = {}

    # -- groups and operations ---------------------------------------------------------------------------------------

    def add_communicator(self, name: str, ranks: tuple[int, ...]) -> Communicator:
        communicator = Communicator(self, name, ranks)
        self.communicators[communicator.digest] = communicator
        self.acceptor.open(communicator)
        return communicator

    def destroy_communicator(self, communicator: Communicator) -> None:
        """It takes nothing more. Collectives under way are finished first, within bounds: others may be waiting for them."""
        if not self.collectives(communicator):
            self.remove_communicator(communicator)
        elif not communicator.destroyed:
            communicator.destroyed = True
            communicator.give_up = lambda: self.remove_communicator(communicator)
            self.call_later(self.farewell, communicator.give_up)

    def collectives(self, communicator: Communicator | None = None) -> list[Request]:
        """Those under way, of one group or of all."""
        unfinished = [each for each in self.unfinished if isinstance(each, CollectiveRequest)]
        return [each for each in unfinished if communicator is None or each.communicator is communicator]

    def under_way(self) -> bool:
        """Whether something has begun and not ended: a collective, or a transfer of which a part has moved."""
        transfers = (each for each in self.unfinished if isinstance(each, Transfer))
        return bool(self.collectives()) or any(each.position for each in transfers)

    def remove_communicator(self, communicator: Communicator) -> None:
        """End what it had pending and close its links; what is written already is given the time it needs to leave."""
        if communicator.removed:
            return
        self._retire(communicator)
        self.communicators.pop(communicator.digest, None)
        self.past.add(communicator.digest)
        communicator.destroyed = communicator.removed = True
        self._timers = [timer for timer in self._timers if timer[1] is not communicator.give_up]
        communicator.close()
        for request in [each for each in self.unfinished if each.communicator is communicator]:
            request.finish(ProtocolError(f"{request.describe()} was pending when its group was destroyed"))
            self.unfinished.pop(request, None)

    def _retire(self, communicator: Communicator) -> None:
        """Keep a destroyed group while a link of it is open, and after that what its links have counted."""
        totals, removed = self.past_links
        gone = [each for each in removed if not any(link.open for link in each.links())]
        kept = [each for each in removed if each not in gone]
        totals = add_links(dict(totals), [link for each in gone for link in each.links()])
        self.past_links = (totals, (*kept, communicator))

    @property
    def _removed(self) -> tuple[Communicator, ...]:
        return self.past_links[1]

    def submit(self, communicator: Communicator, request: CollectiveRequest) -> None:
        if self._accepts(communicator, request):
            try:
                communicator.submit(request)
            except RingfenceError as error:
                self.fail(error)
            except OSError as error:
                self.fail_on_os_error(error)

    def send(self, communicator: Communicator, transfer: Transfer, peer: int) -> None:
        if self._accepts(communicator, transfer):
            self._guard(lambda: communicator.tag_matcher.send(transfer, peer), communicator.ranks[peer])

    def receive(self, communicator: Communicator, transfer: Transfer, peer: int | None) -> None:
        if self._accepts(communicator, transfer):
            self._guard(lambda: communicator.tag_matcher.receive(transfer, peer), -1)

    def _accepts(self, communicator: Communicator, request: Request) -> bool:
        request.communicator = communicator
        if self.failure is not None:
            request.finish(self.failure)
            return False
        if communicator.destroyed:
            request.finish(ProtocolError(f"group {communicator.name!r} was destroyed: make a new one"))
            return False
        self.unfinished[request] = None
        if request.next_check < self._soonest:
            self._soonest = request.next_check
        return True

    def limit(self, request: Request, deadline: float, timeout: float) -> None:
        """Somebody waits for an operation that had all the time in the world."""
        request.deadline, request.timeout = deadline, timeout
        request.next_check = deadline - timeout + first_check(timeout)
        self._soonest = min(self._soonest, request.next_check)

    def finish(self, request: Request) -> None:
        """It has ended before it is taken off the list: an interrupt in between must not make it nobody's."""
        if request in self.unfinished:
            request.finish()
            self.unfinished.pop(request, None)
            self.ended[request.call.operation] += 1
            if request.communicator.destroyed:
                self.call_soon(lambda: self.destroy_communicator(request.communicator))

    # -- being driven ------------------------------------------------------------------------------------------------

    def call_soon(self, work: Callable[[], None]) -> None:
        self.ready.append(_Task(work))

    def call_later(self, seconds: float, work: Callable[[], None]) -> None:
        self._timers.append((self.clock() + seconds, work))

    def run_ready(self) -> None:
        """Do everything that can be done now."""
        ready = self.ready
        while ready:
            link = ready.popleft()
            link.queued = False
            if link.worker >= 0 and self.failure is not None:
                continue  # whatever it would read or write is no longer ours
            self.at_work = link
            try:
                link.work()
            except TensorChangedError as error:  # this worker's program did it, whatever the link's peer
                self.fail(error, self.rank)
            except RingfenceError as error:
                self.fail(error, link.worker)
            except OSError as error:
                if link.worker < 0:
                    self.fail_on_os_error(error)
                else:
                    self._broken(link, error)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a mistake of ours must end the session, not the thread that drives it
                failure = RingfenceError(f"worker {self.rank}: internal error {type(error).__name__}: {error}")
                failure.__cause__ = error
                self.fail(failure, self.rank)
            self.at_work = None

    def _guard(self, work: Callable[[], None], worker: int) -> None:
        try:
            work()
        except RingfenceError as error:
            self.fail(error, worker)
        except OSError as error:
            self.fail_on_os_error(error)

    def fail_on_os_error(self, error: OSError) -> None:
        """This machine refuses what the run needs, such as one more socket: nobody else's fault, and the end of it."""
        self.fail(RingfenceError(f"worker {self.rank}: {refusal(error)}"), self.rank)

    def _broken(self, link: Any, error: OSError) -> None:
        failed = f"the connection to worker {link.worker} failed: {error.strerror or error}"
        self.suspect(link, self.no_answer(link.worker) if is_unanswered(error) else failed)
        link.close()

    def busy(self) -> bool:
        """Whether time or the network still has to bring something."""
        return bool(self.unfinished or self.ready or self.blocked or self.acceptor.pending or self._timers)

    def next_deadline(self) -> float:
        moments = [self._soonest, *(timer[0] for timer in self._timers)]
        moments.extend(connection.deadline for connection in self.acceptor.pending)
        return min(moments)

    def expire(self) -> None:
        """Act on what is overdue."""
        now = self.clock()
        self.acceptor.expire(now)
        if self._timers:
            due = [work for moment, work in self._timers if moment <= now]
            self._timers = [timer for timer in self._timers if timer[0] > now]
            for work in due:
                self.call_soon(work)
        if self._soonest <= now and self.failure is None:
            overdue = [request for request in self.unfinished if request.deadline <= now]
            if overdue:
                self.fail(CollectiveTimeoutError(self._overdue_text(overdue[0])))
            self._warn_of_waits(now)
            self._soonest = min((request.next_check for request in self.unfinished), default=float("inf"))

    def _warn_of_waits(self, now: float) -> None:
        """Tell people of what waits: the first operation of each group, and again when it has waited twice as long."""
        told = set()
        for request in self.unfinished:
            if request.next_check <= now:
                waited = now - request.deadline + request.timeout
                request.next_check = min(request.deadline, now + waited)
                if request.communicator not in told:
                    told.add(request.communicator)
                    _log.warning("worker %d: %s", self.rank, self._waiting_text(request, waited))

    def _waiting_text(self, request: Request, waited: float) -> str:
        name, _, details = request.describe().partition(" (")
        late = sorted({link.worker for link in request.communicator.waiting_for()})
        return (
            f"{name} has waited {waited:.0f} s for {', '.join(map(self._name_of, late)) or 'earlier calls'} in group "
            f"{request.communicator.name!r} ({details}; it fails after {request.timeout:.0f} s"
        )

    def _name_of(self, worker: int) -> str:
        return f"worker {worker} ({self.names[worker]})" if self.names else f"worker {worker}"

    def _overdue_text(self, request: Request) -> str:
        waiting = sorted(
            {link.worker for communicator in self.communicators.values() for link in communicator.waiting_for()}
        )
        who = f"; it waits for worker {', '.join(map(str, waiting))}" if waiting else ""
        return f"worker {self.rank}: {request.describe()} did not finish within its timeout{who}"

    # -- links -------------------------------------------------------------------------------------------------------

    def hello_bytes(self, hello: Hello) -> bytes:
        return write_hello(self.session_key, hello)

    def link_secrets(self, worker: int, hello: Hello, acceptor_nonce: bytes) -> LinkSecrets:
        shared = self._shared.get(worker)
        if shared is None:
            shared = self._shared[worker] = self._agree(worker)
        return link_secrets(self.session_key, shared, hello, acceptor_nonce)

    def _agree(self, worker: int) -> bytes:
        if self._private_key is None:
            raise ProtocolError("the keys of this session are forgotten")
        try:
            return self._private_key.exchange(X25519PublicKey.from_public_bytes(self._public_keys[worker]))
        except ValueError:  # a point of low order: the result would be zero, whoever it is agreed with
            raise AuthenticationError(
                f"worker {worker} has a key of low order, which agrees on nothing secret: find out what runs there"
            ) from None

    def sealer(self, secret: Secret) -> Sealer:
        return Sealer(secret, self.alive)

    def opener(self, secret: Secret) -> Opener:
        return Opener(secret)

    def origin_keys(self, instance: Secret, rank: int) -> OriginKeys:
        return OriginKeys(instance, rank, self.alive)

    # -- failure -----------------------------------------------------------------------------------------------------

    def suspect(self, link: Link, text: str) -> None:
        """A data connection ended. If somebody aborted or left, word of it arrives within a moment, and says why."""

        def verify() -> None:
            if link.worker not in self.departed:
                self.fail(PeerLostError(text), link.worker)
            elif link.needed:
                self.fail(PeerLostError(f"worker {link.worker} left the run and is still needed"), link.worker)

        if self.failure is None:
            self.call_later(0.0 if link.worker in self.departed else SUSPICION_SECONDS, verify)

    def fail(self, error: RingfenceError, suspect: int = -1, heard_from: Edge | None = None) -> None:
        """End the session: every unfinished operation raises, every other worker is told, nothing more is sent."""
        if self.failure is None:
            self.failure = error
            if heard_from is None:
                self._report = self._abort(error, suspect)
        self._wind_down()

    def _abort(self, error: RingfenceError, suspect: int) -> Abort:
        pending = next(iter(self.unfinished), None)
        return Abort(
            reporter=self.rank,
            suspect=suspect,
            code=ABORT_CODES.index(type(error)) if type(error) in ABORT_CODES else 0,
            pending=pending.describe() if pending else "",
            text=str(error),
        )

    def _wind_down(self) -> None:
        """What the end of a session entails. Done again it does the rest, in case an interrupt came in between.

        Links are closed before operations end: from then on their memory is the caller's again.
        """
        self._timers.clear()
        for communicator in (*self.communicators.values(), *self._removed):
            for link in communicator.links():
                link.close()
        self.acceptor.close()
        if self._report is not None:
            self._flood(self._report)
            self._report = None
        self._forget_keys()
        assert self.failure is not None
        self._finish_all(self.failure)

    def _finish_all(self, error: RingfenceError) -> None:
        while self.unfinished:
            request = next(iter(self.unfinished))
            request.finish(error)
            self.unfinished.pop(request, None)

    def _flood(self, message: Abort | Bye, heard_from: Edge | None = None) -> None:
        for edge in self.edges:
            if edge is not heard_from:
                edge.send(message)

    def on_control(self, edge: Edge) -> None:
        """A neighbour in the tree has something to say."""
        for message in edge.receive():
            match message:
                case Abort():
                    if self.failure is None:
                        self._flood(message, heard_from=edge)
                    self.fail(AbortedError(self._abort_text(message)), message.suspect, heard_from=edge)
                case Bye():
                    self._flood(message, heard_from=edge)
                    self._on_departure(message.rank)
                case Closed():
                    self.edges = [other for other in self.edges if other is not edge]
                    if edge.peer not in self.departed:
                        gone = f"worker {edge.peer} is gone: its control connection ended without a goodbye"
                        self.fail(PeerLostError(self.no_answer(edge.peer) if message.unanswered else gone), edge.peer)

    def no_answer(self, worker: int) -> str:
        return (
            f"worker {worker}: no answer for {self.outage:g} s. Its machine or the network to it is down; "
            "RINGFENCE_OUTAGE_TIMEOUT is how long to wait for it"
        )

    def on_outage(self, link: Inbox) -> None:
        """Its peer does not answer at the moment."""
        try:
            link.prompt()
        except OSError as error:
            self._broken(link, error)

    def on_silence(self, worker: int) -> None:
        """A worker has not answered for the outage timeout."""
        if worker not in self.departed:
            self.fail(PeerLostError(self.no_answer(worker)), worker)

    def _abort_text(self, message: Abort) -> str:
        pending = next(iter(self.unfinished), None)
        mine = f"; worker {self.rank} was in {pending.describe()}" if pending else ""
        theirs = f"; worker {message.reporter} was in {message.pending}" if message.pending else ""
        kind = ABORT_CODES[message.code].__name__ if message.code < len(ABORT_CODES) else f"code {message.code}"
        return f"worker {message.reporter} reported {kind}: {message.text}{theirs}{mine}"

    def _on_departure(self, worker: int) -> None:
        if worker in self.departed:
            return
        self.departed.add(worker)
        self.miss(worker)

    def miss(self, worker: int) -> None:
        """Of a worker that has left there is only what it wrote before: fail if an operation waits for more."""
        if worker not in self.departed or self.failure is not None:
            return
        for communicator in self.communicators.values():
            for link in communicator.waiting_for():
                if link.worker == worker and not link.open and not self.acceptor.hears(link):
                    self.fail(PeerLostError(f"worker {worker} left the run and is still needed"), worker)
            self._guard(communicator.tag_matcher.expect_senders, worker)

    def leave(self) -> None:
        """Say goodbye to everybody and close everything. What did not leave by now is not waited for."""
        if self.failure is None:
            self._flood(Bye(self.rank))
            for communicator in self.communicators.values():
                communicator.close()
            self.failure = ProtocolError("this worker has left the run; initialise the process group again")
        self._wind_down()

    def forget(self) -> None:
        """In a forked child: hold no descriptor and no key, answer nothing. The parent's epoll is not touched."""
        self.failure = ProtocolError("this is a forked child: the process group belongs to its parent")
        links = [
            link for communicator in (*self.communicators.values(), *self._removed) for link in communicator.links()
        ]
        streams = self.acceptor.forget()
        streams += [link.stream for link in links if link.stream is not None]
        for stream in streams:
            stream.close()
        for link in links:
            link.stream = None  # its number will be somebody else's
        self._forget_keys()
        self.communicators.clear()
        self.past_links = ({}, ())
        self.ready.clear()
        self.unfinished.clear()
        self.edges.clear()

    def _forget_keys(self) -> None:
        """A session's keys end with it, or what was recorded of it could be opened by who reads this process later.

        Emptied where they lie: process groups, operations and C code that was interrupted still hold these objects.
        """
        for communicator in (*self.communicators.values(), *self._removed):
            communicator.forget()
        self.session_key = Secret(b"")
        self._private_key = None
        self._shared.clear()
