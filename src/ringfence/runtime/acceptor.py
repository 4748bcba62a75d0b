"""The gate of a worker: everybody who has no link yet.

Strangers in the doorway, workers that are being introduced, and those who dialled a group before this worker made it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ringfence.errors import AuthenticationError, ProtocolError, RingfenceError
from ringfence.keys import LINK_PENDING, LINK_PENDING_PER_ADDRESS
from ringfence.runtime.connection import Inbox
from ringfence.runtime.peer_verification import Acquaintances, Introduction, Pair
from ringfence.runtime.pending import Doorway

if TYPE_CHECKING:
    from ringfence.dataplane.endpoint import Stream
    from ringfence.link.hello import Hello, LinkSecrets
    from ringfence.runtime.communicator import Group
    from ringfence.runtime.connection import Link
    from ringfence.runtime.engine import Engine


class Gate:
    """Who comes to one worker in one session, and whom it calls on, until a link has them."""

    def __init__(self, engine: Engine, acquaintances: Acquaintances | None) -> None:
        self.acquaintances = acquaintances
        self.doorways: set[Doorway] = set()
        self.introductions: dict[int, Introduction] = {}  # under way
        self.met: set[int] = set()  # those to whom this worker has introduced itself
        self._engine = engine
        self._parked: dict[bytes, list[tuple[Hello, Stream, LinkSecrets]]] = {}

    # -- strangers ---------------------------------------------------------------------------------------------------

    def accept(self, stream: Stream, address: str) -> None:
        """Somebody dialled. A flood of strangers costs itself its oldest connections, nobody else's."""
        if self._engine.failure is not None:  # the memory of what was pending is no longer ours
            stream.close()
            return
        strangers = [doorway for doorway in self.doorways if doorway.introduces is None]
        same = [doorway for doorway in strangers if doorway.address == address]
        crowd = same if len(same) >= LINK_PENDING_PER_ADDRESS else strangers
        if len(same) >= LINK_PENDING_PER_ADDRESS or len(strangers) >= LINK_PENDING:
            min(crowd, key=lambda doorway: (doorway.known, doorway.queued, doorway.deadline)).close()
        doorway = Doorway(self._engine, stream, address)
        self.doorways.add(doorway)
        self._engine.network.watch(stream, doorway)
        doorway.poke()

    def admitted(self, doorway: Doorway, stream: Stream, hello: Hello, secrets: LinkSecrets) -> None:
        """A dialler has shown that it is who it says."""
        self.doorways.discard(doorway)
        known = self.acquaintances
        if known is not None and known.due(hello.sender) and not known.judged(hello.sender):
            self._hang_up(stream)
            raise ProtocolError(f"worker {hello.sender} dialled a link before it had shown its proof")
        group = self._engine.groups.get(hello.group)
        if group is not None:
            self._hand_over(group, hello, stream, secrets)
        elif hello.group in self._engine.past:
            self._turn_away(hello, stream, secrets)
        else:
            self._parked.setdefault(hello.group, []).append((hello, stream, secrets))

    def open(self, group: Group) -> None:
        """This worker has made a group: those who dialled it early are let through."""
        while self._parked.get(group.digest):  # a failure hangs up on the rest
            hello, stream, secrets = self._parked[group.digest].pop(0)
            try:
                self._hand_over(group, hello, stream, secrets)
            except AuthenticationError:
                continue  # as in the doorway: it costs the stranger its connection
            except RingfenceError as error:
                self._engine.fail(error, hello.sender)
        self._parked.pop(group.digest, None)

    def _hand_over(self, group: Group, hello: Hello, stream: Stream, secrets: LinkSecrets) -> None:
        try:
            if hello.sender not in group.ranks:
                raise AuthenticationError(f"worker {hello.sender} dialled group {group.name!r}, which it is not in")
            link = group.reached_by(hello)
            if link.stream is not None:
                raise ProtocolError(f"worker {hello.sender} dialled the same link twice")
            self._engine.network.watch(stream, link)
            link.attach(stream, secrets)
        except BaseException:
            self._hang_up(stream)  # or the network would keep its number, which will be somebody else's
            raise

    def _turn_away(self, hello: Hello, stream: Stream, secrets: LinkSecrets) -> None:
        """It dialled a group that this worker has destroyed: it hears what it would have heard on a link of it."""
        link = Inbox(self._engine, cast("Group", Pair((hello.sender,), hello.group, removed=True)), 0)
        link.attach(stream, secrets)
        link.say_bye()

    def hears(self, link: Link) -> bool:
        """Whether somebody who has said who it is is about to reach this link."""
        return any(doorway.dials(link) for doorway in self.doorways)

    def _hang_up(self, stream: Stream) -> None:
        self._engine.network.forget(stream)
        stream.close()

    # -- introductions -----------------------------------------------------------------------------------------------

    def have_met(self, link: Link) -> bool:
        """Whether the two ends of a link know each other. If not, they are introduced, and then it is dialled."""
        worker = link.worker
        if self.acquaintances is None or worker in self.met or not self.acquaintances.due(worker):
            return True
        introduction = self.introductions.get(worker)
        if introduction is None:
            introduction = self.introductions[worker] = Introduction(self._engine, worker)
            introduction.dial()
        introduction.waiting.append(link)
        return False

    def introduce_by(self, introduction: Introduction) -> None:
        """This one takes the place of an earlier attempt."""
        self.introductions[introduction.worker] = introduction

    def have_now_met(self, introduction: Introduction) -> None:
        """Both have judged: the acceptor shows its proof only to those who pass."""
        self.met.add(introduction.worker)
        del self.introductions[introduction.worker]
        for link in introduction.waiting:
            self._engine.later(link.dial)  # not in that worker's turn: what this machine refuses is not its fault

    def introduced(self, worker: int) -> None:
        """A worker begins to show its proof. It has one connection for that: an older one is what it gave up."""
        for doorway in [each for each in self.doorways if each.introduces == worker]:
            doorway.close()

    # -- the end -----------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Hang up on the silent. Who has said something is heard first: it was this worker that was late, if it was stopped."""
        for doorway in [each for each in self.doorways if each.deadline <= now and not each.queued]:
            doorway.close()

    def close(self) -> None:
        """Hang up on those who dialled and have no link yet, or they would wait for an answer; and introduce nobody."""
        for introduction in self.introductions.values():
            introduction.close()
        for doorway in list(self.doorways):
            doorway.close()
        for waiting in self._parked.values():
            for _, stream, _ in waiting:
                self._hang_up(stream)
        self._parked.clear()

    def forget(self) -> list[Stream]:
        """In a forked child: everybody is the parent's. The streams whose descriptors are to be closed."""
        streams = [stream for parked in self._parked.values() for _, stream, _ in parked]
        known: list[Doorway | Introduction] = [*self.doorways, *self.introductions.values()]
        streams += [each.stream for each in known if each.stream is not None]
        for each in known:
            each.stream = None  # its number will be somebody else's
            each.forget()
        self.acquaintances = None  # and with them the policy
        self._parked.clear()
        self.doorways.clear()
        self.introductions.clear()
        return streams
