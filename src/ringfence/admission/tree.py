"""The tree that admits: entries travel up, the roster and the session's secret travel down. One worker's part, no I/O.

    GATHER   entries come up and are passed on; rank 0 says now and then who is missing
    CHECK    the roster has come from above (rank 0: is complete) and was sent down; now this worker verifies it
    SEALED   it is in order; acknowledgements come up
    ACKED    everyone below holds it; waiting for rank 0's go
    GO       the session has begun

A worker has at most TREE_FANOUT children and the tree is logarithmically deep, so nobody pays for the
size of the world. The roster is the exception: everybody verifies all of it. So it is passed on first, and a whole tree
verifies it at the same time, not level after level. Nothing is acknowledged that was not verified.

Digests are compared along the edges only, so a worker that lies can show two rosters to its two sides: SECURITY.md says what
that is worth, tests/attack/test_two_rosters.py does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from ringfence import keys
from ringfence.admission.entry import Entry, Listing
from ringfence.admission.messages import (
    ENTRIES_PER_MESSAGE,
    WAITING_NAMED,
    Acknowledge,
    Entries,
    Failure,
    Go,
    Message,
    Waiting,
    Welcome,
)
from ringfence.admission.policy import Policy, Prover, verify
from ringfence.admission.roster import Roster, check_size, seal
from ringfence.errors import AdmissionError, ProtocolError

_NO_PROOF: Final = bytes(keys.DIGEST_BYTES)  # rank 0 has no parent to show one to


def parent_of(rank: int) -> int | None:
    return None if rank == 0 else (rank - 1) // keys.TREE_FANOUT


def children_of(rank: int, world_size: int) -> range:
    first = rank * keys.TREE_FANOUT + 1
    return range(min(first, world_size), min(first + keys.TREE_FANOUT, world_size))


def is_below(rank: int, ancestor: int) -> bool:
    """Whether `rank` is `ancestor` or in its subtree."""
    while rank > ancestor:
        rank = (rank - 1) // keys.TREE_FANOUT
    return rank == ancestor


class Phase(Enum):
    GATHER = "gathers entries"
    CHECK = "checks the roster"
    SEALED = "waits for acknowledgements"
    ACKED = "waits for the go"
    GO = "has begun its session"


class Side(Enum):
    PARENT = "its parent"
    CHILD = "its child"


class Outgoing(NamedTuple):
    peer: int
    message: Message


@dataclass(frozen=True)
class Terms:
    """What rank 0 decides for everyone; another worker's are not used."""

    session_secret: keys.Secret
    table: bytes
    suites: tuple[int, ...]


@dataclass(frozen=True)
class AgreedSession:
    """What a worker comes back with."""

    roster: Roster
    suite: int
    table: bytes
    session_secret: keys.Secret


class Tree:
    """Feed it admitted edges and their messages; send what it returns. AdmissionError means that the session is lost."""

    def __init__(self, own: Entry, policy: Policy, prover: Prover, terms: Terms) -> None:
        self.phase = Phase.GATHER
        self.session: AgreedSession | None = None
        self._own = own
        self._policy = policy
        self._prover = prover
        self._terms = terms
        self._parent = parent_of(own.rank)
        self._attached = False
        self._children: dict[int, tuple[Entry, int, bytes]] = {}  # rank: what it showed us on its own connection
        self._parent_entry: Entry | None = None
        self._listings: dict[int, Listing] = {}
        self._acknowledged: set[int] = set()
        self._waiting: Waiting | None = None  # rank 0's last word on who is missing
        self._unchecked: Welcome | None = None

    # -- events -----------------------------------------------------------------------------------------------------

    def begin(self) -> list[Outgoing]:
        """Before anything else: is this world large enough? Rank 0 lists itself; a world of one is complete at once."""
        check_size(self._policy, self._own)
        if self._parent is None:
            self._listings[0] = self._endorsed(_NO_PROOF)
        return [*self._complete(), *self.check()]

    def attach_parent(self, entry: Entry, own_proof_digest: bytes) -> list[Outgoing]:
        """The parent and this worker have admitted each other."""
        if self._parent is None or self._attached:
            raise ProtocolError("a second parent")
        self._attached = True
        self._parent_entry = entry
        self._listings[self._own.rank] = self._endorsed(own_proof_digest)
        return self._pass_up(list(self._listings.values()))

    def attach_child(self, entry: Entry, its_proof_digest: bytes, kind: int) -> None:
        """A child and this worker have admitted each other, by a proof of this kind. Two that hold one rank end the session."""
        if self.phase is not Phase.GATHER and entry.rank not in self._children:
            raise ProtocolError(f"rank {entry.rank} came to rank {self._own.rank}, which {self.phase.value}")
        known = self._children.setdefault(entry.rank, (entry, kind, its_proof_digest))
        if known[0] != entry:
            raise AdmissionError(
                f"two workers claim rank {entry.rank}: {known[0]} and {entry}. Start each rank once, and end workers "
                "that are left over from an earlier start"
            )
        if known[1:] != (kind, its_proof_digest):
            raise ProtocolError(f"rank {entry.rank} was attached twice")

    def receive(self, peer: int, message: Message) -> list[Outgoing]:
        """`take` and `check` in one, for those who need not send what comes of the first before they do the second."""
        return [*self.take(peer, message), *self.check()]

    def take(self, peer: int, message: Message) -> list[Outgoing]:
        """The answer to an admitted worker's message. If it leaves this worker in CHECK: send, then call `check()`."""
        side = Side.PARENT if peer == self._parent else Side.CHILD
        if not (self._attached if side is Side.PARENT else peer in self._children):
            raise ProtocolError(f"rank {peer} speaks to rank {self._own.rank}, which has not admitted it")
        if isinstance(message, Failure):
            raise AdmissionError(f"rank {message.reporter} ended the join: {message.text}")
        step = TABLE.get((self.phase, side, type(message)))
        if step is None:
            name = type(message).__name__
            raise ProtocolError(
                f"rank {peer}, {side.value}, sent {name} to rank {self._own.rank}, which {self.phase.value}"
            )
        return step(self, peer, message)

    def check(self) -> list[Outgoing]:
        """Verify the roster that was passed on, if there is one."""
        welcome, self._unchecked = self._unchecked, None
        if welcome is None:
            return []
        roster = self._seal(welcome)
        self._find_neighbours(roster)
        self.session = AgreedSession(roster, welcome.suite, welcome.table, welcome.session_secret)
        self.phase = Phase.SEALED
        return self._acknowledge_if_all()

    def report(self) -> list[Outgoing]:
        """Rank 0, every now and then: tell everyone who is missing."""
        if self._parent is not None or self.phase is not Phase.GATHER:
            return []
        missing = self.missing()
        self._waiting = Waiting(len(missing), tuple(missing[:WAITING_NAMED]))
        return self._down(self._waiting)

    def missing(self) -> list[int]:
        """Ranks of this worker's own subtree that it has not heard of."""
        ranks = range(self._own.world_size)
        if self._parent is not None:
            return [rank for rank in _subtree(self._own.rank, len(ranks)) if rank not in self._known()]
        return [rank for rank in ranks if rank not in self._listings]

    def awaited(self) -> str:
        """For people: what a worker whose own subtree is complete still waits for, and from whom."""
        own = f"rank {self._own.rank}"
        if self.phase is Phase.CHECK:
            return f"{own} waits for its children to take the roster"
        if self.phase is Phase.SEALED:
            silent = [rank for rank in sorted(self._children) if rank not in self._acknowledged]
            return f"{own} waits for rank {', '.join(map(str, silent))} to acknowledge the roster"
        what = "the roster" if self.phase is Phase.GATHER else "the go"
        return f"{own} waits for {what} from its parent, rank {self._parent}"

    @property
    def waiting(self) -> Waiting | None:
        """Who is missing from the whole world, as far as rank 0 has said."""
        return self._waiting

    def forget(self) -> None:
        """Hold no secret of a session any more, whoever still has this tree."""
        for holder in (self._terms, self._unchecked, self.session):
            if holder is not None:
                holder.session_secret.forget()
        self._unchecked = self.session = None

    # -- steps ------------------------------------------------------------------------------------------------------

    def _on_entries(self, peer: int, message: Message) -> list[Outgoing]:
        assert isinstance(message, Entries)
        for listing in message.listings:
            self._list(peer, listing)
        return self._pass_up(list(message.listings)) if self._parent is not None else self._complete()

    def _on_waiting(self, peer: int, message: Message) -> list[Outgoing]:
        assert isinstance(message, Waiting)
        self._waiting = message
        return self._down(message)

    def _on_welcome(self, peer: int, message: Message) -> list[Outgoing]:
        assert isinstance(message, Welcome)
        if message.suite not in self._terms.suites:
            raise AdmissionError(
                f"rank 0 chose cipher suite {message.suite}, which rank {self._own.rank} does not have"
            )
        return self._pass_down(message)

    def _on_acknowledge(self, peer: int, message: Message) -> list[Outgoing]:
        assert isinstance(message, Acknowledge)
        self._check_digest(peer, message.roster_digest)
        if peer in self._acknowledged:
            raise ProtocolError(f"rank {peer} acknowledged twice")
        self._acknowledged.add(peer)
        return self._acknowledge_if_all()

    def _on_go(self, peer: int, message: Message) -> list[Outgoing]:
        assert isinstance(message, Go)
        self._check_digest(peer, message.roster_digest)
        self.phase = Phase.GO
        return self._down(message)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _endorsed(self, proof_digest: bytes) -> Listing:
        return Listing(self._own, self._prover.kind, proof_digest, self._prover.endorse(self._own, proof_digest))

    def _list(self, peer: int, listing: Listing) -> None:
        entry = listing.entry
        if not entry.rank < self._own.world_size or not is_below(entry.rank, peer):
            raise ProtocolError(f"rank {peer} sent an entry for rank {entry.rank}, which is not below it")
        # By the same kind, too: who was let in by a certificate must not be listed by a kind that endorses nothing.
        if entry.rank == peer and (entry, listing.kind, listing.proof_digest) != self._children[peer]:
            raise AdmissionError(f"rank {peer} lists itself otherwise than it showed itself")
        verify(self._policy, listing)
        known = self._listings.setdefault(entry.rank, listing)
        if known != listing:
            raise AdmissionError(f"two workers claim rank {entry.rank}: {known.entry} and {entry}")

    def _known(self) -> set[int]:
        return {self._own.rank, *self._listings}

    def _pass_up(self, listings: list[Listing]) -> list[Outgoing]:
        if not self._attached or self._parent is None:
            return []  # attach_parent sends all that came before
        batches = range(0, len(listings), ENTRIES_PER_MESSAGE)
        return [Outgoing(self._parent, Entries(tuple(listings[i : i + ENTRIES_PER_MESSAGE]))) for i in batches]

    def _complete(self) -> list[Outgoing]:
        """Rank 0, when everybody is listed."""
        if len(self._listings) < self._own.world_size:
            return []
        listings = tuple(self._listings[rank] for rank in range(self._own.world_size))
        return self._pass_down(Welcome(self._terms.suites[0], self._terms.session_secret, self._terms.table, listings))

    def _pass_down(self, welcome: Welcome) -> list[Outgoing]:
        """Those who get it were admitted by this worker; whether it is in order each of them finds out for itself."""
        self._unchecked = welcome
        self._waiting = None  # everybody has come: whoever holds things up from here on is not missing
        self.phase = Phase.CHECK
        return self._down(welcome)

    def _seal(self, welcome: Welcome) -> Roster:
        return seal(self._policy, self._own, welcome.listings, welcome.suite, welcome.table)

    def _find_neighbours(self, roster: Roster) -> None:
        """Those whom this worker saw with its own eyes must stand in the roster exactly as it saw them.

        Its own proof and its children's, too: who is listed by another one would be blamed for it at peer verification.
        Its children are among them, all of them: nobody could have listed one that did not come to this worker.
        """
        absent = [rank for rank in children_of(self._own.rank, self._own.world_size) if rank not in self._children]
        if absent:
            raise AdmissionError(
                f"the roster shows rank {absent[0]}, which has not come to its parent, rank {self._own.rank}"
            )
        seen = [self._own, *(entry for entry, *_ in self._children.values())]
        if self._parent_entry is not None:
            seen.append(self._parent_entry)
        for entry in seen:
            if roster.entries[entry.rank] != entry:
                raise AdmissionError(f"the roster does not show rank {entry.rank} as it showed itself: {entry}")
        own = self._listings[self._own.rank]
        proofs = [(self._own.rank, own.kind, own.proof_digest)]
        proofs += [(rank, kind, digest) for rank, (_, kind, digest) in self._children.items()]
        for rank, kind, digest in proofs:
            if roster.proofs[rank] != (kind, digest):
                raise AdmissionError(f"the roster does not list rank {rank} by the proof that it showed")

    def _acknowledge_if_all(self) -> list[Outgoing]:
        assert self.session is not None
        if len(self._acknowledged) < len(children_of(self._own.rank, self._own.world_size)):
            return []
        digest = self.session.roster.digest
        if self._parent is None:
            self.phase = Phase.GO
            return self._down(Go(digest))
        self.phase = Phase.ACKED
        return [Outgoing(self._parent, Acknowledge(digest))]

    def _check_digest(self, peer: int, digest: bytes) -> None:
        assert self.session is not None
        if digest != self.session.roster.digest:
            raise AdmissionError(f"rank {peer} holds another roster than rank {self._own.rank}")

    def _down(self, message: Message) -> list[Outgoing]:
        return [Outgoing(child, message) for child in sorted(self._children)]


TABLE: Final[dict[tuple[Phase, Side, type[Message]], Callable[[Tree, int, Message], list[Outgoing]]]] = {
    (Phase.GATHER, Side.CHILD, Entries): Tree._on_entries,  #         rank 0: -> CHECK when complete
    (Phase.GATHER, Side.PARENT, Waiting): Tree._on_waiting,
    (Phase.GATHER, Side.PARENT, Welcome): Tree._on_welcome,  #        -> CHECK, then SEALED, a leaf ACKED
    (Phase.SEALED, Side.CHILD, Acknowledge): Tree._on_acknowledge,  # -> ACKED when all have, rank 0 -> GO
    (Phase.ACKED, Side.PARENT, Go): Tree._on_go,  #                   -> GO
}


def _subtree(rank: int, world_size: int) -> list[int]:
    """`rank` and everyone below it, by level."""
    found = [rank]
    for each in found:
        found.extend(children_of(each, world_size))
    return found
