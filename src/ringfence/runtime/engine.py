"""The engine: one worker's part in one session. It wires communicators, acceptor and requests, and aborts on a failure.

It owns no thread and no socket. Its driver (`progress.ProgressLoop` over TCP, or a test in memory) calls `run_ready` after
streams have changed and `expire` when time has passed. A failure of any link ends the session on this worker and, through
the control edges, on every other worker.

The way of a collective, with its four queues (docs/concepts/architecture.md follows it from torch to the socket):

    1. any thread      ProgressLoop._submitted   what other threads ask the driving thread to do
    2. driving thread  Communicator._waiting     the collectives of a group, in the order of the calls
    3. driving thread  Endpoint.queue            executions of passes, one queue for each link and direction
    4. driving thread  Engine.ready              links with something to do; `run_ready` serves them until none is left

A link that its socket blocks waits in `Engine.blocked` until epoll reports it. Exactly one thread drives: the one that holds
`ProgressLoop._lock`. Everything here runs in it, and takes no other lock. Channels have engines and threads of their own.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from ringfence.admission.renewal import Challenge, Renewal
from ringfence.collectives import Thresholds
from ringfence.dataplane import choice
from ringfence.dataplane.choice import Pool
from ringfence.dataplane.request import CollectiveRequest, Request
from ringfence.errors import (
    AbortedError,
    AuthenticationError,
    CollectiveTimeoutError,
    PeerLostError,
    ProtocolError,
    RingfenceError,
    TensorChangedError,
)
from ringfence.keys import SUSPICION_SECONDS
from ringfence.runtime.aborts import Edge, abort_message, abort_text, flood
from ringfence.runtime.acceptor import Acceptor
from ringfence.runtime.communicator import Communicator, GroupChannel
from ringfence.runtime.control import Abort, Bye, Closed
from ringfence.runtime.counters import Counters, add_totals, summarise
from ringfence.runtime.events import LinkContext, Network, PeerLink, Platform, SharedBudget
from ringfence.runtime.link_keys import LinkKeys
from ringfence.runtime.links import Arrival, Inbox, Link
from ringfence.runtime.peer_verification import LinkVerifier
from ringfence.runtime.point_to_point import Transfer
from ringfence.runtime.registry import Communicators
from ringfence.runtime.requests import Requests
from ringfence.runtime.reverification import Reverification
from ringfence.runtime.timers import Timers
from ringfence.transport.outage import is_unanswered
from ringfence.transport.tcp import refusal

# How long a destroyed group may finish its collectives, and slow peers may accept what is written; longer during an outage.
DRAIN_SECONDS = 60.0

_SYSTEM = Platform()


class _Task:
    """Work that belongs to no link."""

    __slots__ = ("queued", "work", "worker")

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.queued = True
        self.worker = -1


class FurtherChannel(Protocol):
    """A channel above 0 as channel 0 sees it (channels.py). It has a driver of its own, which `post` and `settle` reach."""

    @property
    def communicators(self) -> Communicators: ...
    @property
    def blocked(self) -> set[Link]: ...
    @property
    def post(self) -> Callable[[Callable[[], None]], None]: ...
    @property
    def settle(self) -> Callable[[Callable[[], None]], None]: ...
    def add_channel(self, name: str, ranks: tuple[int, ...], /) -> GroupChannel: ...
    def adopt(self, arrival: Arrival, /) -> None: ...
    def on_departed(self, worker: int, /) -> None: ...
    def leave(self) -> None: ...
    def end(self, error: RingfenceError, /) -> None: ...


class Engine:
    """One worker in one session. Implements `events.Events`."""

    channel = 0

    def __init__(
        self,
        rank: int,
        world_size: int,
        keys: LinkKeys,
        network: Network,
        table: Thresholds,
        edges: Sequence[Edge] = (),
        peer_verifier: LinkVerifier | None = None,
        platform: Platform = _SYSTEM,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.keys = keys
        self.table = table
        self.edges = list(edges)
        self.clock = platform.clock
        self.outage = platform.outage
        self.drain_timeout = max(DRAIN_SECONDS, platform.outage)
        self.departed: set[int] = set()
        self.ready: deque[Any] = deque()
        self.blocked: set[Link] = set()
        self.pool = Pool()
        self.context = LinkContext(
            rank=rank,
            world_size=world_size,
            keys=keys,
            network=network,
            events=self,
            departed=self.departed,
            ready=self.ready,
            blocked=self.blocked,
            pool=self.pool,
            platform=platform,
            machines=network.machines,
            memory=SharedBudget(),
            channel=self.channel,
        )
        self.communicators = Communicators()
        self.requests = Requests(rank, platform.clock)
        self.acceptor = Acceptor(self.context, self.communicators, peer_verifier)
        self.channels: Sequence[FurtherChannel] = ()  # above this one
        # How other threads have work done by the driving thread; `settle` waits for it. The progress loop replaces them.
        self.post: Callable[[Callable[[], None]], None] = self.call_soon
        self.settle: Callable[[Callable[[], None]], None] = operator.call
        self.failure: RingfenceError | None = None
        self.blamed: int | None = None  # by a failure: a worker, or -1; None after a regular end
        self.reverification: Reverification | None = None  # set if the policy has workers verified again
        self.note = ""  # appended to the text of a failure
        self.current: Any = None  # the link or task whose `work` is being called, or was when an interrupt came
        self._unsent_abort: Abort | None = None  # set until the neighbours have been sent it
        self._timers = Timers(platform.clock)
        self._unanswered: frozenset[int] = frozenset()  # workers that owe an answer

    # -- communicators and requests ----------------------------------------------------------------------------------

    def add_communicator(self, name: str, ranks: tuple[int, ...]) -> Communicator:
        """Create the communicator of a process group and accept the connections of members that dialled it early."""
        communicator = Communicator(self.context, self.table, name, ranks)
        self.communicators.add(communicator)
        if not communicator.machines and communicator.size > 1:
            communicator.channels = [channel.add_channel(name, ranks) for channel in self.channels]
        self.acceptor.open(communicator)
        return communicator

    def open_channels(self, channels: Sequence[FurtherChannel]) -> None:
        """Use further channels for groups in which no two members share a machine. Call it before any group is added."""
        self.channels = channels
        self.acceptor.pass_on([channel.adopt for channel in channels])

    def destroy_communicator(self, communicator: Communicator) -> None:
        """Accept no further request; remove the communicator when its collectives have ended, or after the drain timeout."""
        if not self.requests.collectives(communicator):
            self.remove_communicator(communicator)
        elif not communicator.destroyed:
            communicator.destroyed = True
            communicator.removal = lambda: self.remove_communicator(communicator)
            self.call_later(self.drain_timeout, communicator.removal)

    def remove_communicator(self, communicator: Communicator) -> None:
        """Fail the pending requests and close the links, after what is already written has been sent."""
        if communicator.removed:
            return
        self.communicators.remove(communicator)
        communicator.destroyed = communicator.removed = True
        self._timers.cancel(communicator.removal)
        for channel in communicator.channels:
            channel.remove()
        communicator.close()
        self.requests.fail_removed(communicator)

    def submit(self, communicator: Communicator, request: CollectiveRequest) -> None:
        """Start a collective, after those submitted before it."""
        if self._accepts(communicator, request):
            self.guard(partial(communicator.submit, request), -1)

    def send(self, communicator: Communicator, transfer: Transfer, peer: int) -> None:
        """Start a send to a rank of the communicator."""
        if self._accepts(communicator, transfer):
            self.guard(lambda: communicator.tag_matcher.send(transfer, peer), communicator.ranks[peer])

    def receive(self, communicator: Communicator, transfer: Transfer, peer: int | None) -> None:
        """Start a receive from a rank of the communicator, or from any rank if `peer` is None."""
        if self._accepts(communicator, transfer):
            self.guard(lambda: communicator.tag_matcher.receive(transfer, peer), -1)

    def _accepts(self, communicator: Communicator, request: Request) -> bool:
        request.worker = self.rank
        if self.failure is not None:
            request.finish(self.failure)
            return False
        if communicator.destroyed:
            request.finish(ProtocolError(f"group {communicator.name!r} was destroyed: make a new one"))
            return False
        self.requests.add(request, communicator)
        return True

    def finish(self, request: Request) -> None:
        """Complete a request successfully."""
        communicator = self.requests.complete(request)
        if communicator is not None and communicator.destroyed:
            self.call_soon(lambda: self.destroy_communicator(communicator))

    def counters(self) -> Counters:
        """Return the counters of this worker. Any thread may call it."""
        requests = self.requests
        totals = self.communicators.totals()
        for channel in self.channels:
            totals = add_totals(totals, channel.communicators.totals())
        return summarise(self.rank, totals, requests.completed, requests.oldest_wait())

    # -- driving -----------------------------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether the session has failed or ended."""
        return self.failure is not None

    def call_soon(self, work: Callable[[], None]) -> None:
        """Call `work` from the driving thread, outside the current call."""
        self.ready.append(_Task(work))

    def call_later(self, seconds: float, work: Callable[[], None]) -> None:
        """Call `work` from the driving thread after so many seconds."""
        self._timers.add(seconds, work)

    def run_ready(self) -> None:
        """Do everything that can be done now."""
        ready = self.ready
        while ready:
            try:
                if self.failure is None:
                    choice.serve(self, ready)  # links that only send and receive
                if ready:
                    self._run_next()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                self._on_error(self.current, error)
            self.current = None

    def _run_next(self) -> None:
        self.current = link = self.ready.popleft()
        link.queued = False
        if link.worker < 0 or self.failure is None:  # after a failure, memory and stream are no longer the link's
            link.work()

    def _on_error(self, link: Any, error: BaseException) -> None:
        if isinstance(error, TensorChangedError):  # caused by this worker's program, not by the link's peer
            self.fail(error, self.rank)
        elif isinstance(error, AuthenticationError) and isinstance(link, Inbox):  # the data plane knows no worker
            text = f"{error} (from worker {link.worker}): it was changed, forged or replayed"
            self.fail(AuthenticationError(text), link.worker)
        elif isinstance(error, RingfenceError):
            self.fail(error, link.worker)
        elif isinstance(error, OSError) and link.worker < 0:
            self.fail_on_os_error(error)
        elif isinstance(error, OSError):
            self._on_stream_error(link, error)
        else:  # a bug ends the session, not the driving thread
            failure = RingfenceError(f"worker {self.rank}: internal error {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.fail(failure, self.rank)

    def is_current(self, link: object) -> bool:
        """Return whether the call of this link's `work` has not returned."""
        return link is self.current

    def guard(self, work: Callable[[], None], worker: int) -> None:
        """Do work that fails the session, and not its caller, if it raises; `worker` is suspected then."""
        try:
            work()
        except RingfenceError as error:
            self.fail(error, worker)
        except OSError as error:
            self.fail_on_os_error(error)

    def _on_stream_error(self, link: Any, error: OSError) -> None:
        failed = f"the connection to worker {link.worker} failed: {error.strerror or error}"
        self.suspect(link, self.context.no_answer(link.worker) if is_unanswered(error) else failed)
        link.close()

    def busy(self) -> bool:
        """Return whether the engine waits for the network or for time to pass."""
        return bool(
            self.requests.unfinished or self.ready or self.blocked or self.acceptor.pending or self._timers.waiting
        )

    def next_deadline(self) -> float:
        """Return when `expire` has something to do."""
        if not self.acceptor.pending and not self._timers.waiting:
            return self.requests.next_check
        moments = [self.requests.next_check, self._timers.next_deadline()]
        moments.extend(connection.deadline for connection in self.acceptor.pending)
        return min(moments)

    def expire(self) -> None:
        """Call due timers, close silent pending connections, warn of long waits, and fail on an overdue request."""
        now = self.clock()
        if self.acceptor.pending:
            self.acceptor.expire(now)
        for work in self._timers.take_due(now):
            self.call_soon(work)
        if self.requests.next_check <= now and self.failure is None:
            overdue = self.requests.overdue(now)
            if overdue is not None:
                self.fail(CollectiveTimeoutError(self._overdue_text(overdue)))
            self.requests.warn(now)

    def _overdue_text(self, request: Request) -> str:
        active = self.communicators.active.values()
        waiting = sorted({link.worker for communicator in active for link in communicator.waiting_for()})
        late = f"; it waits for worker {', '.join(map(str, waiting))}" if waiting else ""
        return f"worker {self.rank}: {request.describe()} did not finish within its timeout{late}"

    # -- connections -------------------------------------------------------------------------------------------------

    def may_dial(self, link: PeerLink) -> bool:
        """Return whether a link may be dialled now, or only after its worker has been verified."""
        return self.acceptor.may_dial(link)

    def is_connecting(self, worker: int, lane: int, digest: bytes) -> bool:
        """Return whether a pending connection is for this worker, lane and group."""
        return self.acceptor.is_connecting(worker, lane, digest)

    def suspect(self, link: PeerLink, text: str) -> None:
        """Fail because a data connection ended, unless an abort or a BYE that explains it arrives within a moment.

        The message that explains it may be held up by an outage, and so may be the cause: while workers owe an answer, the
        verdict waits for them, at most for the outage timeout.
        """
        limit = self.clock() + self.outage

        def check() -> None:
            if self.unanswered() - {link.worker} and link.worker not in self.departed and self.clock() < limit:
                self.call_later(SUSPICION_SECONDS, check)
            elif link.worker not in self.departed:  # its abort does not arrive by way of a worker that has left
                left = ", ".join(map(str, sorted(self.departed)))
                self.fail(PeerLostError(f"{text}, after worker {left} left the run" if left else text), link.worker)
            elif link.needed:
                self.fail(PeerLostError(f"worker {link.worker} left the run and is still needed"), link.worker)

        if self.failure is None:
            self.call_later(0.0 if link.worker in self.departed else SUSPICION_SECONDS, check)

    def on_outage(self, link: Inbox) -> None:
        """Called while the peer of a link does not answer."""
        try:
            link.send_nop()
        except OSError as error:
            self._on_stream_error(link, error)

    def on_unanswered(self, workers: frozenset[int]) -> None:
        """Called with the workers that owe an answer, when they change."""
        self._unanswered = workers

    def unanswered(self) -> frozenset[int]:
        """Return the workers that owe an answer. Any thread may call it."""
        return self._unanswered

    def on_silence(self, worker: int) -> None:
        """Called when a worker has not answered for the outage timeout."""
        if worker not in self.departed:
            self.fail(PeerLostError(self.context.no_answer(worker)), worker)

    def on_control(self, edge: Edge) -> None:
        """Handle the messages of a neighbour in the admission tree."""
        for message in edge.receive():
            match message:
                case Abort():
                    if self.failure is None:
                        flood(self.edges, message, heard_from=edge)
                    text = abort_text(message, self.rank, self.requests.oldest())
                    self.fail(AbortedError(text), message.suspect, heard_from=edge)
                case Bye():
                    flood(self.edges, message, heard_from=edge)
                    if message.rank not in self.departed:
                        self.departed.add(message.rank)
                        self.check_departed(message.rank)
                case Challenge() | Renewal():
                    if self.failure is None and self.reverification is not None:
                        self.guard(partial(self.reverification.take, edge, message), edge.peer)
                case Closed():
                    self.edges = [other for other in self.edges if other is not edge]
                    if edge.peer not in self.departed:
                        gone = f"worker {edge.peer} is gone: its control connection ended without a goodbye"
                        text = self.context.no_answer(edge.peer) if message.unanswered else gone
                        self.fail(PeerLostError(text), edge.peer)

    def verify_again(self) -> None:
        """Challenge the neighbours, and fail if one has not passed since the last time."""
        for edge in list(self.edges):
            self.on_control(edge)  # an answer may have arrived while this worker was stopped
        if self.failure is None and self.reverification is not None:
            self.reverification.tick([edge.peer for edge in self.edges if edge.peer not in self.departed])

    def check_departed(self, worker: int) -> None:
        """Fail if a request needs a worker that has left the run and has nothing more on its way."""
        if worker not in self.departed or self.failure is not None:
            return
        for communicator in self.communicators.active.values():
            for link in communicator.waiting_for():
                if link.worker != worker or link.open or link.context is not self.context:
                    continue  # other channels check theirs
                if not self.is_connecting(worker, link.lane, communicator.digest):
                    self.fail(PeerLostError(f"worker {worker} left the run and is still needed"), worker)
            self.guard(communicator.tag_matcher.check_senders, worker)
        for channel in self.channels:
            channel.post(partial(channel.on_departed, worker))

    # -- failure and the end -----------------------------------------------------------------------------------------

    def fail(self, error: RingfenceError, suspect: int = -1, heard_from: Edge | None = None) -> None:
        """Abort the session: fail every request, send the error to every other worker, and close all links."""
        if self.failure is None:
            if heard_from is None:
                self._unsent_abort = abort_message(self.rank, error, suspect, self.requests.oldest())
            if self.note:
                error.args = (f"{error}{self.note}",)
            self.failure, self.blamed = error, suspect
        self._shut_down()

    def fail_on_os_error(self, error: OSError) -> None:
        """Abort because the operating system refuses what the run needs, such as another socket."""
        self.fail(RingfenceError(f"worker {self.rank}: {refusal(error)}"), self.rank)

    def _shut_down(self) -> None:
        """Close everything. A second call completes an interrupted first one.

        Links are closed before requests end: from then on the memory of a request is the caller's.
        """
        self._timers.clear()
        assert self.failure is not None
        for link in self.communicators.links():
            link.close()
        for channel in self.channels:
            channel.settle(partial(channel.end, self.failure))
        self.acceptor.close()
        if self._unsent_abort is not None:
            flood(self.edges, self._unsent_abort)
            self._unsent_abort = None
        self._forget_keys()
        self.requests.fail_all(self.failure)

    def leave(self) -> None:
        """Send BYE to all workers and close everything, without waiting for what has not been sent."""
        if self.failure is None:
            flood(self.edges, Bye(self.rank))
            for communicator in self.communicators.active.values():
                communicator.close()
            for channel in self.channels:
                channel.settle(channel.leave)
            self.failure = ProtocolError("this worker has left the run; initialise the process group again")
        self._shut_down()

    def forget(self) -> None:
        """Drop descriptors and keys in a forked child, without touching the parent's epoll instance."""
        self.failure = ProtocolError("this is a forked child: the process group belongs to its parent")
        links = self.communicators.links()
        streams = self.acceptor.forget()
        streams += [link.stream for link in links if link.stream is not None]
        for stream in streams:
            stream.close()
        for link in links:
            link.stream = None  # its descriptor number will be reused
        self._forget_keys()
        self.communicators.clear()
        self.ready.clear()
        self.requests.unfinished.clear()
        self.edges.clear()

    def _forget_keys(self) -> None:
        """Wipe the session's keys, so that recorded traffic cannot be decrypted from this process later.

        In place: process groups, requests and interrupted C code may still refer to these objects.
        """
        for communicator in self.communicators.all():
            communicator.forget()
        self.keys.forget()
