"""Channels: further connections of a group's links, each with a thread, keys and counters of its own (spec/link.md, 14).

    caller, channel 0   queues collectives, cuts large ones into passes: pass p belongs to channel p modulo the channels
    channel 1, 2, ...   execute their passes on their own connections, and report to channel 0 when one is done

Only channel 0 accepts, verifies peers, keeps deadlines and hears of aborts. A failure of any channel ends the session; a
request ends when no channel uses its memory any more.

Where nothing is set, rank 0 gives the run two channels or one (`config.cores.default_channels`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ringfence.dataplane.choice import Execution, make_execution
from ringfence.dataplane.execution import Pass
from ringfence.dataplane.program import Program
from ringfence.dataplane.request import Request
from ringfence.errors import RingfenceError
from ringfence.runtime.aborts import Edge
from ringfence.runtime.communicator import Communicator
from ringfence.runtime.engine import Engine
from ringfence.runtime.events import Network, PeerLink
from ringfence.runtime.links import Arrival


class _Due(NamedTuple):
    """A pass that channel 0 has assigned to a channel."""

    program: Program
    work: Pass
    operation: Request
    finished: Callable[[], None]


class _Unverified(NamedTuple):
    """A link of a channel that is dialled once channel 0 has verified its worker."""

    channel: ChannelEngine
    link: PeerLink

    @property
    def worker(self) -> int:
        return self.link.worker

    @property
    def needed(self) -> bool:
        return self.link.needed

    def dial(self) -> None:
        self.channel.post(partial(self.channel.guard, self.link.dial, self.worker))


class ChannelCommunicator(Communicator):
    """The links of a group on one channel. Channel 0 calls `execute` and `remove`; its own thread does the rest."""

    def __init__(self, channel: ChannelEngine, name: str, ranks: tuple[int, ...]) -> None:
        super().__init__(channel.context, channel.table, name, ranks)
        self._channel = channel
        self._due: deque[_Due] = deque()
        self._passes = 0  # that are not done

    def execute(self, program: Program, work: Pass, operation: Request, finished: Callable[[], None]) -> None:
        """Execute a pass, after those before it; then call `finished` in the thread of channel 0."""
        due = _Due(program, work, operation, finished)
        self._channel.post(partial(self._channel.guard, partial(self._add, due), -1))

    def remove(self) -> None:
        """Close the links. On return nothing of this channel uses the memory of a request."""
        self._channel.settle(partial(self._channel.remove_communicator, self))

    def _add(self, due: _Due) -> None:
        if not self.removed:
            self._count(1)
            self._due.append(due)
            self._start_passes()

    def _count(self, change: int) -> None:
        self._passes += change
        self._channel.passes += change

    def close(self) -> None:
        """End the passes, and send BYE on every link."""
        self._due.clear()
        self._count(-self._passes)
        super().close()

    def _start_passes(self) -> None:
        if self._may_start():
            while self._due:
                self._execute(self._due.popleft())

    def _execute(self, due: _Due) -> None:
        execution: Execution

        def finished() -> None:
            self._active.remove(execution)
            self._count(-1)
            self._channel.report(due.finished)

        execution = make_execution(self, due.program, due.work, finished)
        execution.operation = due.operation
        self._active.append(execution)
        execution.start()


class ChannelEngine(Engine):
    """The engine of a channel above 0. `post` and `settle` are for channel 0; all else is for its own driver."""

    def __init__(self, primary: Engine, channel: int, network: Network) -> None:
        self.channel = channel
        self._primary = primary
        self.passes = 0  # of all groups, that are not done
        self._arriving: list[Arrival] = []  # that channel 0 has passed on and this channel has not taken over
        context = primary.context
        super().__init__(
            primary.rank, primary.world_size, primary.keys, network, primary.table, platform=context.platform
        )

    def add_channel(self, name: str, ranks: tuple[int, ...]) -> ChannelCommunicator:
        """Create the links of a group on this channel. For the thread of channel 0."""
        communicator = ChannelCommunicator(self, name, ranks)
        self.post(partial(self._open, communicator))
        return communicator

    def _open(self, communicator: Communicator) -> None:
        self.communicators.add(communicator)
        self.acceptor.open(communicator)

    def adopt(self, arrival: Arrival) -> None:
        """Take over a connection that channel 0 has authenticated. For the thread of channel 0."""
        self._arriving.append(arrival)
        self.post(partial(self.guard, partial(self._adopt, arrival), arrival.hello.sender))

    def _adopt(self, arrival: Arrival) -> None:
        try:
            self.acceptor.adopt(arrival)
        finally:
            self._arriving.remove(arrival)

    def on_departed(self, worker: int) -> None:
        """Called when a worker has left the run, and when it may be missed since."""
        self.departed.add(worker)
        self.check_departed(worker)

    def report(self, work: Callable[[], None]) -> None:
        """Call `work` in the thread of channel 0, outside of any other call there."""
        self._primary.post(partial(self._primary.call_soon, work))

    # -- what differs from channel 0 ---------------------------------------------------------------------------------

    def busy(self) -> bool:
        return (self.failure is None and bool(self.passes)) or super().busy()

    def may_dial(self, link: PeerLink) -> bool:
        """Return whether channel 0 has verified the worker, or need not; if not, the link is dialled afterwards."""
        acceptor = self._primary.acceptor
        if acceptor.needs_no_verification(link.worker):
            return True
        waiting = _Unverified(self, link)

        def verify() -> None:
            if acceptor.may_dial(waiting):
                waiting.dial()

        self.report(partial(self._primary.guard, verify, link.worker))
        return False

    def is_connecting(self, worker: int, lane: int, digest: bytes) -> bool:
        if self._primary.acceptor.is_connecting(worker, lane, digest, self.channel):
            return True
        hellos = [arrival.hello for arrival in tuple(self._arriving)]  # after the above, from where they come
        return any((hello.sender, hello.lane, hello.group) == (worker, lane, digest) for hello in hellos)

    def unanswered(self) -> frozenset[int]:
        """Return the workers that owe an answer on this channel or on channel 0, which has more connections."""
        return super().unanswered() | self._primary.unanswered()

    def fail(self, error: RingfenceError, suspect: int = -1, heard_from: Edge | None = None) -> None:
        """Close the links of this channel; channel 0 aborts the session."""
        if self.failure is None:
            self.report(partial(self._primary.fail, error, suspect))
        super().fail(error, suspect, heard_from)

    def end(self, error: RingfenceError) -> None:
        """Close the links after channel 0 has failed or left."""
        self.failure = self.failure or error
        self._shut_down()

    def forget(self) -> None:
        for arrival in self._arriving:
            arrival.stream.close()
        self._arriving.clear()
        super().forget()

    def _forget_keys(self) -> None:
        """Wipe the keys of this channel's connections. Channel 0 wipes those of the session."""
        for communicator in self.communicators.all():
            communicator.forget()
