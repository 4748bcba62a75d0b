"""A communicator: the links of a process group, its queue of collectives, and the opening that agrees on an instance secret."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ringfence import keys
from ringfence.collectives import Collective, Thresholds, choose
from ringfence.collectives.passes import PASSES_AT_ONCE, Views
from ringfence.collectives.schedule import Buffer
from ringfence.dataplane.choice import Execution, make_execution
from ringfence.dataplane.endpoint import PassFrames
from ringfence.dataplane.execution import Pass
from ringfence.dataplane.program import Program, program
from ringfence.dataplane.request import CollectiveRequest, Request, describe_call
from ringfence.dataplane.shared import OwnMemory, shared_bytes
from ringfence.errors import PeerLostError
from ringfence.link.frames import INSTANCE_BYTES, Call, Header
from ringfence.link.hello import Lane, LinkHello
from ringfence.link.seal import OriginKeys, instance_identifier, wipe
from ringfence.machines import within
from ringfence.runtime.events import LinkContext
from ringfence.runtime.links import Inbox, Link, Outbox
from ringfence.runtime.tag_matching import TagMatcher


def group_digest(name: str, ranks: tuple[int, ...]) -> bytes:
    """Return the digest that identifies a group on the wire before its instance secret is agreed on."""
    return keys.digest(keys.GROUP, name.encode(), b"".join(rank.to_bytes(4, "big") for rank in ranks))


class GroupChannel(Protocol):
    """A further channel of a group (channels.py), which has a thread of its own."""

    def execute(self, program: Program, work: Pass, operation: Request, finished: Callable[[], None], /) -> None: ...
    def waiting_for(self) -> list[Link]: ...
    def remove(self) -> None: ...


@dataclass(eq=False)
class _Elsewhere:
    """A pass that another channel executes."""

    operation: Request


class Communicator:
    """The state of one process group on this worker."""

    def __init__(self, context: LinkContext, table: Thresholds, name: str, ranks: tuple[int, ...]) -> None:
        self.context = context
        self.table = table
        self.name = name
        self.ranks = ranks
        self.size = len(ranks)
        self._memory: OwnMemory | None = None
        self.rank = ranks.index(context.rank)
        self.machines = within(context.machines, ranks)
        self.neighbours = next((len(each) - 1 for each in self.machines if self.rank in each), 0)  # on this machine
        self.digest = group_digest(name, ranks)
        self.instance = self.digest[:INSTANCE_BYTES]  # replaced by the opening
        self.pool = context.pool
        self.origin: OriginKeys
        self.seeds: list[keys.Secret] = []  # of the masks of its private sums
        self.sequence = 0
        self.destroyed = False  # accepts no further request
        self.removed = False  # and has no request in progress
        self.removal: Callable[[], None] | None = None  # the timer that removes it if its last collectives do not end
        self.outboxes: dict[int, Outbox] = {}
        self.inboxes: dict[int, Inbox] = {}
        self.tag_matcher = TagMatcher(context, self)
        self._waiting: deque[CollectiveRequest] = deque()
        self._active: list[Execution | _Elsewhere] = []
        self.channels: Sequence[GroupChannel] = ()  # above this one
        self._opened = self.size == 1
        self._opening = False
        self._drawn = bytearray(keys.SECRET_BYTES)  # during the opening: the XOR of what the members drew

    # -- links -------------------------------------------------------------------------------------------------------

    def outbox(self, peer: int) -> Outbox:
        """Return the link for sending to a peer, dialling it on first use. Raises PeerLostError if the peer has left."""
        if self.ranks[peer] in self.context.departed:
            raise PeerLostError(f"worker {self.ranks[peer]} left the run and is still needed")
        link = self.outboxes.get(peer)
        if link is None:
            link = self.outboxes[peer] = Outbox(self.context, self, peer)
            link.dial()
        return link

    def inbox(self, peer: int) -> Inbox:
        """Return the link for receiving from a peer. Raises PeerLostError if the peer has left without dialling it."""
        link = self._inbox(peer)
        if link.stream is None and self._is_unreachable(link):
            raise PeerLostError(f"{link.departure_text()} and is still needed")
        return link

    def unreachable_frames(self, peer: int) -> Sequence[tuple[PassFrames, int]]:
        """Return what waits for frames of a peer that will never connect."""
        link = self.inboxes.get(peer)
        return link.queue if link is not None and self._is_unreachable(link) else ()

    def _is_unreachable(self, link: Inbox) -> bool:
        """Return whether the peer has not dialled this link, and has left the run or sent BYE on the outbox to it."""
        outbox = self.outboxes.get(link.peer)
        gone = link.worker in self.context.departed or (outbox is not None and outbox.bye_received)
        if not gone or link.stream is not None:
            return False
        return not self.context.events.is_connecting(link.worker, link.lane, self.digest)

    def shared_memory(self) -> OwnMemory | None:
        """Return the memory that this worker shares with members on its machine; None if it has shared enough already."""
        if self._memory is None:
            memory = self.context.memory
            self._memory = memory.make(shared_bytes(self.neighbours), partial(OwnMemory, self.neighbours))
        return self._memory

    def _inbox(self, peer: int) -> Inbox:
        link = self.inboxes.get(peer)
        if link is None:
            link = self.inboxes[peer] = Inbox(self.context, self, peer)
        return link

    def reached_by(self, hello: LinkHello) -> Link:
        """Return the link that an authenticated dialler reached. It may have left since; what it wrote before counts."""
        peer = self.ranks.index(hello.sender)
        one_to_one = hello.lane in (Lane.POINT_TO_POINT, Lane.POINT_TO_POINT_LOCAL)
        return self.tag_matcher.receiver(peer) if one_to_one else self._inbox(peer)

    def links(self) -> list[Link]:
        """Return all links."""
        return [*self.outboxes.values(), *self.inboxes.values(), *self.tag_matcher.links()]

    def waiting_for(self) -> list[Link]:
        """Return the links to workers that a request waits for. Any thread may call it."""
        inboxes = [link for link in tuple(self.inboxes.values()) if link.queue]
        blocked = self.context.blocked
        dialled = tuple(self.outboxes.values())
        outboxes = [link for link in dialled if link in blocked or (link.queue and (not link.open or link.lacks_slots))]
        others = [link for channel in self.channels for link in channel.waiting_for()]
        return [*inboxes, *outboxes, *(link for link in self.tag_matcher.links() if link.needed), *others]

    # -- collectives, first in first out -----------------------------------------------------------------------------

    def submit(self, request: CollectiveRequest) -> None:
        """Queue a collective and start what can be started."""
        self.sequence += 1
        request.sequence = self.sequence
        self._waiting.append(request)
        self._start_passes()

    def _start_passes(self) -> None:
        """Start passes in order, up to the limit of concurrent ones."""
        if not self._may_start():
            return
        limit = PASSES_AT_ONCE * (1 + len(self.channels))
        while self._waiting and len(self._active) < limit:
            request = self._waiting[0]
            index = request.next_pass
            if not index:
                if self._active and self._shares_memory(request):
                    return
                if request.copy_in is not None:
                    request.copy_in()
            parts = request.slices(index)
            if parts is None:
                return  # `resume` continues
            request.next_pass += 1
            request.running += 1
            if request.next_pass == request.passes:
                self._waiting.popleft()
            self._start(request, index, parts)

    def _may_start(self) -> bool:
        """Return whether passes may start; if the instance secret is not agreed on, agree on it first."""
        if self.context.events.failed or self.removed:  # waiting requests have ended; their memory is the caller's
            return False
        if not self._opened:
            self._open()
        return self._opened

    def resume(self) -> None:
        """Continue after a pass has been copied from a device."""
        self._start_passes()

    def _shares_memory(self, request: CollectiveRequest) -> bool:
        """Return whether an active request uses the same memory: such requests are executed one after the other."""
        earlier = (execution.operation for execution in self._active)
        return any(isinstance(each, CollectiveRequest) and request.follows(each) for each in earlier)

    def _start(self, request: CollectiveRequest, index: int, parts: Mapping[Buffer, Views]) -> None:
        execution: Execution | _Elsewhere

        def finished() -> None:
            self._active.remove(execution)
            request.running -= 1
            if request.pass_staging is not None:
                request.pass_staging.pass_done(index)  # completes the request after the last copy
            elif not request.running and request.next_pass == request.passes:
                self.context.events.finish(request)
            if self._waiting:
                self.context.events.call_soon(self._start_passes)

        work = Pass(
            sequence=request.sequence,
            call=request.call.pack(),
            parts=parts,
            dtype=request.dtype,
            combine=request.combine,
            first_segment=request.first_segment(index),
            keep=request.keep,
        )
        channel = request.channel(index)
        if channel:
            execution = _Elsewhere(request)
            self._active.append(execution)
            self.channels[channel - 1].execute(request.program, work, request, finished)
            return
        execution = make_execution(self, request.program, work, finished)
        execution.operation = request
        self._active.append(execution)
        execution.start()

    def _open(self) -> None:
        """Agree on the instance secret before the first collective: every member draws 32 bytes, all get the XOR."""
        if self._opening:
            return
        self._opening = True
        import torch  # for the reduction

        self._drawn[:] = self.context.platform.random(keys.SECRET_BYTES)
        schedule = choose(
            *(Collective.GROUP_OPENING, self.size, self.rank, 0, keys.SECRET_BYTES, self.table), machines=self.machines
        )
        call = Call(Collective.GROUP_OPENING, schedule=schedule.identifier)
        execution: Execution

        def finished() -> None:
            self._active.remove(execution)
            instance = self.context.keys.group_secret(bytes(self._drawn), self.digest, self.context.channel)
            wipe(memoryview(self._drawn))
            self.origin = self.context.keys.origin_keys(instance, self.rank)
            self.instance = instance_identifier(instance, self.digest)
            self._opened = True
            self.context.events.call_soon(self._start_passes)

        parts = {Buffer.DATA: [memoryview(self._drawn)]}
        work = Pass(sequence=0, call=call.pack(), parts=parts, dtype=torch.uint8, combine=torch.bitwise_xor)
        execution = make_execution(self, program(schedule), work, finished)
        execution.operation = Request(call, float("inf"))
        self._active.append(execution)
        execution.start()

    # -- words for errors --------------------------------------------------------------------------------------------

    def describe_execution(self, execution: PassFrames) -> str:
        """Return the call that an execution belongs to, and its group."""
        return f"{execution.operation.describe()} in group {self.name!r}"

    def describe_mismatch(self, execution: PassFrames, peer: int, header: Header) -> str:
        """Return the message for a frame that belongs to another collective than the expected one."""
        call, mine = Call.unpack(header.call), execution.operation.describe()
        theirs = describe_call(call, header.sequence)
        where = f" ({header.length} bytes, step {header.step}, segment {header.segment})" if theirs == mine else ""
        return (
            f"the ranks of group {self.name!r} run different collectives: worker {self.context.rank} is in {mine}, "
            f"worker {self.ranks[peer]} sent {theirs}{where}. Every rank must call the same collectives in the same order."
        )

    # -- closing -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send BYE on every link. A frame that is partly written is completed first."""
        for link in self.links():
            link.send_bye()
        self._forget_instance()
        if self._memory is not None:
            self._memory.close()
            self.context.memory.give(self._memory.size)
            self._memory = None

    def forget(self) -> None:
        """Wipe all keys in place: process groups and requests may still refer to this object."""
        for link in self.links():
            link.forget()
        self._forget_instance()
        if self._memory is not None:
            self._memory.close()

    def _forget_instance(self) -> None:
        wipe(memoryview(self._drawn))
        for seed in self.seeds:
            seed.forget()
        if hasattr(self, "origin"):
            self.origin.forget()
