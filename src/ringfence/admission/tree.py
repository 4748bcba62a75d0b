"""The admission tree: entries travel up, the roster and the session secret travel down. One worker's part, without I/O.

    GATHER   entries arrive and are passed up; rank 0 reports the missing ranks from time to time
    CHECK    the roster arrived (rank 0: is complete) and was sent down; this worker verifies it
    SEALED   the roster is verified; acknowledgements travel up
    ACKED    all workers below have it; waiting for rank 0's GO
    AGREE    GO arrived with all signatures of the roster, and was sent down; this worker verifies them
    GO       the session has begun

A worker has at most TREE_FANOUT children and the depth is logarithmic, so the cost for one worker does not grow with the
world. The exception is the roster, which every worker verifies completely. A worker therefore passes it on before it verifies
it, so that all levels verify at the same time. A roster is acknowledged only after it was verified.

Neighbours compare digests, and workers that a certificate admitted sign theirs (agreement.py). Where nothing binds a rank to a
name, a malicious worker can still send different rosters to its neighbours: docs/security/limitations.md describes the
consequences, tests/attack/test_two_rosters.py shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from ringfence import keys
from ringfence.admission.agreement import Signers
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

_NO_PROOF: Final = bytes(keys.DIGEST_BYTES)  # rank 0 has no parent to present one to


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
    ACKED = "waits for GO"
    AGREE = "checks the signatures of the roster"
    GO = "has begun its session"


CHECKING: Final = (Phase.CHECK, Phase.AGREE)  # send what `take` returned, then call `check`


class Side(Enum):
    PARENT = "its parent"
    CHILD = "its child"


class Outgoing(NamedTuple):
    peer: int
    message: Message


@dataclass(frozen=True)
class Terms:
    """What rank 0 decides for all workers; those of other ranks are not used."""

    session_secret: keys.Secret
    table: bytes
    suites: tuple[int, ...]


@dataclass(frozen=True)
class AgreedSession:
    """The result: what all workers of the session agree on."""

    roster: Roster
    suite: int
    table: bytes
    session_secret: keys.Secret
    listings: tuple[Listing, ...]  # of the roster, with their endorsements


class Tree:
    """One worker's part of the tree. Pass it admitted neighbours and their messages, and send what it returns.

    Methods raise ProtocolError for a message out of order, and AdmissionError if the session cannot begin.
    """

    def __init__(self, own: Entry, policy: Policy, prover: Prover, terms: Terms) -> None:
        self.phase = Phase.GATHER
        self.session: AgreedSession | None = None
        self._own = own
        self._policy = policy
        self._prover = prover
        self._terms = terms
        self._parent = parent_of(own.rank)
        self._attached = False
        self._children: dict[int, tuple[Entry, int, bytes]] = {}  # rank: entry, kind and digest of its proof
        self._parent_entry: Entry | None = None
        self._listings: dict[int, Listing] = {}
        self._acknowledged: set[int] = set()
        self._signers: Signers | None = None
        self._signatures: dict[int, bytes] = {}  # of the roster, by rank: its own and those of its subtree
        self._go: Go | None = None  # whose signatures are not verified yet
        self.waiting: Waiting | None = None  # rank 0's last report of the ranks missing from the whole world
        self._unchecked: Welcome | None = None

    # -- events -----------------------------------------------------------------------------------------------------

    def begin(self) -> list[Outgoing]:
        """Start: check the size of the world. Rank 0 lists itself; a world of one worker is complete at once."""
        check_size(self._policy, self._own)
        if self._parent is None:
            self._listings[0] = self._own_listing(_NO_PROOF)
        return [*self._complete(), *self._check_all()]

    def attach_parent(self, entry: Entry, own_proof_digest: bytes) -> list[Outgoing]:
        """Record that the parent and this worker have admitted each other."""
        if self._parent is None or self._attached:
            raise ProtocolError("a second parent")
        self._attached = True
        self._parent_entry = entry
        self._listings[self._own.rank] = self._own_listing(own_proof_digest)
        return self._pass_up(list(self._listings.values()))

    def attach_child(self, entry: Entry, its_proof_digest: bytes, kind: int) -> None:
        """Record that a child and this worker have admitted each other. Raises AdmissionError for two workers with one rank."""
        if self.phase is not Phase.GATHER and entry.rank not in self._children:
            raise ProtocolError(f"rank {entry.rank} connected to rank {self._own.rank}, which {self.phase.value}")
        known = self._children.setdefault(entry.rank, (entry, kind, its_proof_digest))
        if known[0] != entry:
            raise AdmissionError(
                f"two workers claim rank {entry.rank}: {known[0]} and {entry}. Start each rank once, and end workers "
                "left over from an earlier start"
            )
        if known[1:] != (kind, its_proof_digest):
            raise ProtocolError(f"rank {entry.rank} was attached twice")

    def receive(self, peer: int, message: Message) -> list[Outgoing]:
        """Call `take` and `check`, for callers that need not send the result of the first before the second."""
        return [*self.take(peer, message), *self._check_all()]

    def take(self, peer: int, message: Message) -> list[Outgoing]:
        """Handle a message of an admitted worker. In a phase of CHECKING, send the result, then call `check()`."""
        side = Side.PARENT if peer == self._parent else Side.CHILD
        if not (self._attached if side is Side.PARENT else peer in self._children):
            raise ProtocolError(f"rank {peer} sent a message to rank {self._own.rank}, which has not admitted it")
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
        """Verify what was passed on: the roster, or the signatures of it. Raises AdmissionError."""
        if self._go is not None:
            self._check_agreement(self._go)
            self._go = self._signers = None
            self._signatures.clear()
            self.phase = Phase.GO
            return []
        welcome, self._unchecked = self._unchecked, None
        if welcome is None:
            return []
        roster, self._signers = self._seal(welcome)
        self._check_neighbours(roster)
        self.session = AgreedSession(roster, welcome.suite, welcome.table, welcome.session_secret, welcome.listings)
        if self._own.rank in self._signers.ranks:
            self._signatures[self._own.rank] = self._prover.sign_roster(self._own.rank, roster.digest)
        self.phase = Phase.SEALED
        return self._acknowledge_if_all()

    def _check_all(self) -> list[Outgoing]:
        found: list[Outgoing] = []
        while self.phase in CHECKING:
            found += self.check()
        return found

    def report(self) -> list[Outgoing]:
        """On rank 0: return a report of the missing ranks for all workers. Called periodically."""
        if self._parent is not None or self.phase is not Phase.GATHER:
            return []
        missing = self.missing()
        self.waiting = Waiting(len(missing), tuple(missing[:WAITING_NAMED]))
        return self._down(self.waiting)

    def missing(self) -> list[int]:
        """Return the ranks of this worker's own subtree that are not listed yet."""
        ranks = range(self._own.world_size)
        if self._parent is not None:
            return [rank for rank in _subtree(self._own.rank, len(ranks)) if rank not in self._known()]
        return [rank for rank in ranks if rank not in self._listings]

    def awaited(self) -> str:
        """Describe what a worker whose subtree is complete still waits for."""
        own = f"rank {self._own.rank}"
        if self.phase in CHECKING:
            return f"{own} waits for its children to receive the roster"
        if self.phase is Phase.SEALED:
            silent = [rank for rank in sorted(self._children) if rank not in self._acknowledged]
            return f"{own} waits for rank {', '.join(map(str, silent))} to acknowledge the roster"
        what = "the roster" if self.phase is Phase.GATHER else "GO"
        return f"{own} waits for {what} from its parent, rank {self._parent}"

    def forget(self) -> None:
        """Wipe the session secrets, even if references to this object remain."""
        for holder in (self._terms, self._unchecked, self.session):
            if holder is not None:
                holder.session_secret.forget()
        self._unchecked = self.session = None

    # -- steps ------------------------------------------------------------------------------------------------------

    def _on_entries(self, peer: int, message: Message) -> list[Outgoing]:
        assert isinstance(message, Entries)
        for listing in message.listings:
            self._add_listing(peer, listing)
        return self._pass_up(list(message.listings)) if self._parent is not None else self._complete()

    def _on_waiting(self, peer: int, message: Message) -> list[Outgoing]:
        assert isinstance(message, Waiting)
        self.waiting = message
        return self._down(message)

    def _on_welcome(self, peer: int, message: Message) -> list[Outgoing]:
        assert isinstance(message, Welcome)
        if message.suite not in self._terms.suites:
            raise AdmissionError(
                f"rank 0 chose cipher suite {message.suite}, which rank {self._own.rank} does not support"
            )
        return self._pass_down(message)

    def _on_acknowledge(self, peer: int, message: Message) -> list[Outgoing]:
        assert isinstance(message, Acknowledge)
        self._check_digest(peer, message.roster_digest)
        if peer in self._acknowledged:
            raise ProtocolError(f"rank {peer} acknowledged twice")
        self._acknowledged.add(peer)
        self._signatures |= self._signed_by(peer, message, _subtree(peer, self._own.world_size))
        return self._acknowledge_if_all()

    def _on_go(self, peer: int, message: Message) -> list[Outgoing]:
        assert isinstance(message, Go)
        self._check_digest(peer, message.roster_digest)
        return self._begin(message)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _own_listing(self, proof_digest: bytes) -> Listing:
        return Listing(self._own, self._prover.kind, proof_digest, self._prover.endorse(self._own, proof_digest))

    def _add_listing(self, peer: int, listing: Listing) -> None:
        entry = listing.entry
        if not entry.rank < self._own.world_size or not is_below(entry.rank, peer):
            raise ProtocolError(f"rank {peer} sent an entry for rank {entry.rank}, which is not below it")
        # Also of the same kind: a worker admitted by a certificate must not be listed by a kind without endorsements.
        if entry.rank == peer and (entry, listing.kind, listing.proof_digest) != self._children[peer]:
            raise AdmissionError(f"rank {peer} lists itself with another entry or proof than it presented")
        verify(self._policy, listing)
        known = self._listings.setdefault(entry.rank, listing)
        if known != listing:
            raise AdmissionError(f"two workers claim rank {entry.rank}: {known.entry} and {entry}")

    def _known(self) -> set[int]:
        return {self._own.rank, *self._listings}

    def _pass_up(self, listings: list[Listing]) -> list[Outgoing]:
        if not self._attached or self._parent is None:
            return []  # attach_parent sends all earlier ones
        batches = range(0, len(listings), ENTRIES_PER_MESSAGE)
        return [Outgoing(self._parent, Entries(tuple(listings[i : i + ENTRIES_PER_MESSAGE]))) for i in batches]

    def _complete(self) -> list[Outgoing]:
        """On rank 0, send the roster down once all workers are listed."""
        if len(self._listings) < self._own.world_size:
            return []
        listings = tuple(self._listings[rank] for rank in range(self._own.world_size))
        return self._pass_down(Welcome(self._terms.suites[0], self._terms.session_secret, self._terms.table, listings))

    def _pass_down(self, welcome: Welcome) -> list[Outgoing]:
        """Send the roster to the children, which were admitted by this worker. Each of them verifies it."""
        self._unchecked = welcome
        self.waiting = None  # no rank is missing any more
        self.phase = Phase.CHECK
        return self._down(welcome)

    def _seal(self, welcome: Welcome) -> tuple[Roster, Signers]:
        roster = seal(self._policy, self._own, welcome.listings, welcome.suite, welcome.table)
        return roster, Signers.of(welcome.listings)

    def _check_neighbours(self, roster: Roster) -> None:
        """Check that the roster lists this worker and its neighbours as this worker knows them.

        That includes its own proof and its children's: a worker listed with another proof would fail peer verification. All
        its children must have connected to it: only it could have listed them.
        """
        absent = [rank for rank in children_of(self._own.rank, self._own.world_size) if rank not in self._children]
        if absent:
            raise AdmissionError(
                f"the roster lists rank {absent[0]}, which has not connected to its parent, rank {self._own.rank}"
            )
        seen = [self._own, *(entry for entry, *_ in self._children.values())]
        if self._parent_entry is not None:
            seen.append(self._parent_entry)
        for entry in seen:
            if roster.entries[entry.rank] != entry:
                raise AdmissionError(
                    f"the roster lists rank {entry.rank} with another entry than it presented: {entry}"
                )
        own = self._listings[self._own.rank]
        proofs = [(self._own.rank, own.kind, own.proof_digest)]
        proofs += [(rank, kind, digest) for rank, (_, kind, digest) in self._children.items()]
        for rank, kind, digest in proofs:
            if roster.proofs[rank] != (kind, digest):
                raise AdmissionError(f"the roster lists rank {rank} with another proof than it presented")

    def _acknowledge_if_all(self) -> list[Outgoing]:
        assert self.session is not None
        if len(self._acknowledged) < len(children_of(self._own.rank, self._own.world_size)):
            return []
        digest = self.session.roster.digest
        signatures = tuple(signature for _, signature in sorted(self._signatures.items()))
        if self._parent is None:
            return self._begin(Go(digest, signatures))
        self.phase = Phase.ACKED
        return [Outgoing(self._parent, Acknowledge(digest, signatures))]

    def _begin(self, go: Go) -> list[Outgoing]:
        """Send Go down. Every worker verifies all signatures, at the same time as the workers below."""
        self._go = go
        self.phase = Phase.AGREE
        return self._down(go)

    def _check_agreement(self, go: Go) -> None:
        """Check that every worker whose key signs the roster has signed the one that this worker holds."""
        assert self.session is not None and self._signers is not None
        sender = 0 if self._parent is None else self._parent
        signed = self._signed_by(sender, go, range(self._own.world_size))
        self._signers.verify(self._own.rank, self.session.roster, signed)

    def _signed_by(self, peer: int, message: Acknowledge, ranks: Iterable[int]) -> dict[int, bytes]:
        """Return the signatures in a message by rank: it has one for each of `ranks` that signs the roster."""
        assert self._signers is not None
        signing = sorted(self._signers.ranks.intersection(ranks))
        if len(signing) != len(message.signatures):
            raise ProtocolError(
                f"rank {peer} sent {len(message.signatures)} signatures of the roster, where {len(signing)} are needed"
            )
        return dict(zip(signing, message.signatures, strict=True))

    def _check_digest(self, peer: int, digest: bytes) -> None:
        assert self.session is not None
        if digest != self.session.roster.digest:
            raise AdmissionError(f"rank {peer} has another roster than rank {self._own.rank}")

    def _down(self, message: Message) -> list[Outgoing]:
        return [Outgoing(child, message) for child in sorted(self._children)]


TABLE: Final[dict[tuple[Phase, Side, type[Message]], Callable[[Tree, int, Message], list[Outgoing]]]] = {
    (Phase.GATHER, Side.CHILD, Entries): Tree._on_entries,  #         rank 0: -> CHECK when complete
    (Phase.GATHER, Side.PARENT, Waiting): Tree._on_waiting,
    (Phase.GATHER, Side.PARENT, Welcome): Tree._on_welcome,  #        -> CHECK, then SEALED, a leaf ACKED
    (Phase.SEALED, Side.CHILD, Acknowledge): Tree._on_acknowledge,  # -> ACKED when all have, rank 0 -> AGREE
    (Phase.ACKED, Side.PARENT, Go): Tree._on_go,  #                   -> AGREE, then GO
}


def _subtree(rank: int, world_size: int) -> list[int]:
    """Return `rank` and all ranks below it, by level."""
    found = [rank]
    for each in found:
        found.extend(children_of(each, world_size))
    return found
