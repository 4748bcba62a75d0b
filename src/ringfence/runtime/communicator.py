"""A group at work: its links, its queue of collectives, and the opening in which its members agree on an instance secret."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ringfence import keys
from ringfence.collectives import Collective, choose
from ringfence.collectives.schedule import Buffer
from ringfence.dataplane.choice import Run, make_run
from ringfence.dataplane.program import program
from ringfence.dataplane.request import CollectiveOperation, Operation, describe_call
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


class Group:
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
        self._waiting: deque[CollectiveOperation] = deque()
        self._active: list[Run] = []
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

    def submit(self, operation: CollectiveOperation) -> None:
        self.sequence += 1
        operation.sequence = self.sequence
        self._waiting.append(operation)
        self._pump()

    def _pump(self) -> None:
        """Start what may start: passes in order, a few at a time."""
        if self.engine.failure is not None or self.removed:  # what waits here has ended; its memory is no longer ours
            return
        if not self._opened:
            self._open()
            return
        while self._waiting and len(self._active) < _AT_ONCE:
            operation = self._waiting[0]
            index = operation.next_pass
            if not index:
                if self._in_use(operation):
                    return
                if operation.before is not None:
                    operation.before()
            operation.next_pass += 1
            operation.running += 1
            if operation.next_pass == operation.passes:
                self._waiting.popleft()
            self._start(operation, index)

    def _in_use(self, operation: CollectiveOperation) -> bool:
        """Whether a call that is under way uses its memory: calls on one tensor follow each other."""
        earlier = (run.operation for run in self._active)
        return any(isinstance(each, CollectiveOperation) and operation.follows(each) for each in earlier)

    def _start(self, operation: CollectiveOperation, index: int) -> None:
        run: Run

        def finished() -> None:
            self._active.remove(run)
            operation.running -= 1
            if not operation.running and operation.next_pass == operation.passes:
                self.engine.finish(operation)
            self.engine.later(self._pump)

        run = make_run(
            self,
            operation.program,
            operation.sequence,
            operation.call.pack(),
            operation.slices(index),
            operation.dtype,
            operation.combine,
            operation.first_segment(index),
            finished,
            operation.keep,
        )
        run.operation = operation
        self._active.append(run)
        run.start()

    def _open(self) -> None:
        """Before the first collective, agree on the instance secret: every member draws 32 bytes and gets the XOR of all."""
        if self._opening:
            return
        self._opening = True
        import torch  # for the reduction

        self._drawn[:] = self.engine.random(keys.SECRET_BYTES)
        schedule = choose(Collective.GROUP_OPENING, self.size, self.rank, 0, keys.SECRET_BYTES, self.engine.table)
        call = Call(Collective.GROUP_OPENING, schedule=schedule.identifier)
        run: Run

        def finished() -> None:
            self._active.remove(run)
            instance = keys.group_secret(self.engine.session_key, bytes(self._drawn), self.digest)
            wipe(memoryview(self._drawn))
            self.origin = self.engine.origin_keys(instance, self.rank)
            self.instance = instance_identifier(instance, self.digest)
            self._opened = True
            self.engine.later(self._pump)

        parts = {Buffer.DATA: [memoryview(self._drawn)]}
        run = make_run(self, program(schedule), 0, call.pack(), parts, torch.uint8, torch.bitwise_xor, 0, finished)
        run.operation = Operation(call, float("inf"))
        self._active.append(run)
        run.start()

    # -- words -------------------------------------------------------------------------------------------------------

    def describe_run(self, run: Run) -> str:
        return f"{run.operation.describe()} in group {self.name!r}"

    def describe_mismatch(self, run: Run, peer: int, header: Header) -> str:
        theirs = describe_call(header_call(header), header.sequence)
        mine = run.operation.describe()
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
