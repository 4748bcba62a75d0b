"""A group at work: its links, its queue of collectives, and the opening in which its members agree on an instance secret."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ringfence import keys
from ringfence.collectives import Collective, choose
from ringfence.collectives.schedule import Buffer
from ringfence.dataplane.choice import Execution, make_execution
from ringfence.dataplane.program import program
from ringfence.dataplane.request import CollectiveRequest, Request, describe_call
from ringfence.errors import PeerLostError
from ringfence.link.frames import INSTANCE_BYTES, Call, Header
from ringfence.link.hello import Hello, Lane
from ringfence.link.seal import OriginKeys, instance_identifier, wipe
from ringfence.runtime.connection import Inbox, Link, Outbox, header_call
from ringfence.runtime.point_to_point import TagMatcher

if TYPE_CHECKING:
    from ringfence.runtime.engine import Engine

_AT_ONCE = 4  # passes, of one or of several collectives, that are under way together


def group_digest(name: str, ranks: tuple[int, ...]) -> bytes:
    """What names a group on the wire before its instance is known."""
    return keys.digest(keys.GROUP, name.encode(), b"".join(rank.to_bytes(4, "big") for rank in ranks))


class Communicator:
    """The ranks of one process group, seen from this worker."""

    def __init__(self, engine: Engine, name: str, ranks: tuple[int, ...]) -> None:
        self.engine = engine
        self.name = name
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(engine.rank)
        self.digest = group_digest(name, ranks)
        self.instance = self.digest[:INSTANCE_BYTES]  # until the opening gives a fresh one
        self.pool = engine.pool
        self.origin: OriginKeys
        self.sequence = 0
        self.destroyed = False  # takes nothing more
        self.give_up: Callable[[], None] | None = (
            None  # what ends its last collectives if they do not end by themselves
        )
        self.removed = False  # and what it had under way has ended
        self.outboxes: dict[int, Outbox] = {}
        self.inboxes: dict[int, Inbox] = {}
        self.tag_matcher = TagMatcher(engine, self)
        self._waiting: deque[CollectiveRequest] = deque()
        self._active: list[Execution] = []
        self._opened = self.size == 1
        self._opening = False
        self._drawn = bytearray(keys.SECRET_BYTES)  # what the members drew, joined by XOR while the opening runs

    # -- links -------------------------------------------------------------------------------------------------------

    def outbox(self, peer: int) -> Outbox:
        if self.ranks[peer] in self.engine.departed:
            raise PeerLostError(f"worker {self.ranks[peer]} left the run and is still needed")
        link = self.outboxes.get(peer)
        if link is None:
            link = self.outboxes[peer] = Outbox(self.engine, self, peer)
            link.dial()
        return link

    def inbox(self, peer: int) -> Inbox:
        link = self._inbox(peer)
        if link.stream is None and self.never_comes(link):
            raise PeerLostError(f"{link.parting()} and is still needed")
        return link

    def never_comes(self, link: Inbox) -> bool:
        """Whether its peer has not dialled it, and has left, or said goodbye where this worker dialled it."""
        outbox = self.outboxes.get(link.peer)
        gone = link.worker in self.engine.departed or (outbox is not None and outbox.farewell)
        return gone and link.stream is None and not self.engine.acceptor.hears(link)

    def _inbox(self, peer: int) -> Inbox:
        link = self.inboxes.get(peer)
        if link is None:
            link = self.inboxes[peer] = Inbox(self.engine, self, peer)
        return link

    def reached_by(self, hello: Hello) -> Link:
        """The link that a confirmed dialler reached. It may have left since: what it wrote before still counts."""
        peer = self.ranks.index(hello.sender)
        return self.tag_matcher.receiver(peer) if hello.lane == Lane.POINT_TO_POINT else self._inbox(peer)

    def links(self) -> list[Link]:
        return [*self.outboxes.values(), *self.inboxes.values(), *self.tag_matcher.links()]

    def waiting_for(self) -> list[Link]:
        """The links to workers that an operation waits for."""
        inboxes = [link for link in self.inboxes.values() if link.queue]
        blocked = self.engine.blocked
        outboxes = [link for link in self.outboxes.values() if link in blocked or (link.queue and not link.open)]
        return [*inboxes, *outboxes, *(link for link in self.tag_matcher.links() if link.needed)]

    # -- collectives, first in first out -----------------------------------------------------------------------------

    def submit(self, request: CollectiveRequest) -> None:
        self.sequence += 1
        request.sequence = self.sequence
        self._waiting.append(request)
        self._pump()

    def _pump(self) -> None:
        """Start what may start: passes in order, a few at a time."""
        if self.engine.failure is not None or self.removed:  # what waits here has ended; its memory is no longer ours
            return
        if not self._opened:
            self._open()
            return
        while self._waiting and len(self._active) < _AT_ONCE:
            request = self._waiting[0]
            index = request.next_pass
            if not index:
                if self._in_use(request):
                    return
                if request.before is not None:
                    request.before()
            request.next_pass += 1
            request.running += 1
            if request.next_pass == request.passes:
                self._waiting.popleft()
            self._start(request, index)

    def _in_use(self, request: CollectiveRequest) -> bool:
        """Whether a call that is under way uses its memory: calls on one tensor follow each other."""
        earlier = (execution.operation for execution in self._active)
        return any(isinstance(each, CollectiveRequest) and request.follows(each) for each in earlier)

    def _start(self, request: CollectiveRequest, index: int) -> None:
        execution: Execution

        def finished() -> None:
            self._active.remove(execution)
            request.running -= 1
            if not request.running and request.next_pass == request.passes:
                self.engine.finish(request)
            self.engine.call_soon(self._pump)

        execution = make_execution(
            self,
            request.program,
            request.sequence,
            request.call.pack(),
            request.slices(index),
            request.dtype,
            request.combine,
            request.first_segment(index),
            finished,
            request.keep,
        )
        execution.operation = request
        self._active.append(execution)
        execution.start()

    def _open(self) -> None:
        """Before the first collective, agree on the instance secret: every member draws 32 bytes and gets the XOR of all."""
        if self._opening:
            return
        self._opening = True
        import torch  # for the reduction

        self._drawn[:] = self.engine.random(keys.SECRET_BYTES)
        schedule = choose(Collective.GROUP_OPENING, self.size, self.rank, 0, keys.SECRET_BYTES, self.engine.table)
        call = Call(Collective.GROUP_OPENING, schedule=schedule.identifier)
        execution: Execution

        def finished() -> None:
            self._active.remove(execution)
            instance = keys.group_secret(self.engine.session_key, bytes(self._drawn), self.digest)
            wipe(memoryview(self._drawn))
            self.origin = self.engine.origin_keys(instance, self.rank)
            self.instance = instance_identifier(instance, self.digest)
            self._opened = True
            self.engine.call_soon(self._pump)

        parts = {Buffer.DATA: [memoryview(self._drawn)]}
        execution = make_execution(
            self, program(schedule), 0, call.pack(), parts, torch.uint8, torch.bitwise_xor, 0, finished
        )
        execution.operation = Request(call, float("inf"))
        self._active.append(execution)
        execution.start()

    # -- words -------------------------------------------------------------------------------------------------------

    def describe_execution(self, execution: Execution) -> str:
        return f"{execution.operation.describe()} in group {self.name!r}"

    def describe_mismatch(self, execution: Execution, peer: int, header: Header) -> str:
        theirs = describe_call(header_call(header), header.sequence)
        mine = execution.operation.describe()
        where = f" ({header.length} bytes, step {header.step}, segment {header.segment})" if theirs == mine else ""
        return (
            f"the ranks of group {self.name!r} run different collectives: worker {self.engine.rank} is in {mine}, "
            f"worker {self.ranks[peer]} sent {theirs}{where}. Every rank must call the same collectives in the same order."
        )

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye on every link. What is half written is given time; nothing more is sealed but the goodbyes."""
        for link in self.links():
            link.say_bye()
        self._forget_instance()

    def forget(self) -> None:
        """Hold no key. In place: process groups and operations that are referenced still hold this object."""
        for link in self.links():
            link.forget()
        self._forget_instance()

    def _forget_instance(self) -> None:
        wipe(memoryview(self._drawn))
        if hasattr(self, "origin"):
            self.origin.forget()
