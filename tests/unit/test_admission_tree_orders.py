"""Every order of events in small trees: edges that come up, messages, a death at any moment; and a neighbour that lies.

Small worlds with narrow trees hold every relation that a large one has: a root, a worker between two others, a leaf,
siblings. The exploration goes on until no new state is found.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ringfence import keys
from ringfence.admission.entry import Entry, Listing
from ringfence.admission.messages import Acknowledge, Entries, Failure, Go, Message, Waiting, Welcome
from ringfence.admission.policy import Policy
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.admission.tree import CHECKING, Outgoing, Phase, Terms, Tree, children_of, parent_of
from ringfence.errors import AdmissionError, ProtocolError
from tests.unit.admission_samples import SECRET, SUITES, worker

ATTACH, END = "attach", "end"  # between messages on a wire: the handshake is done; the connection is over
DEAD, FAILED, ALARMED = "dead", "failed", "alarmed"  # how a worker's part ends otherwise than in its session


class Watched(SharedSecret):
    """The real verifier, which also notes whose listing it has passed."""

    def __init__(self) -> None:
        super().__init__(SECRET, "run-7")
        self.passed: set[Entry] = set()

    def verify_listing(self, listing: Listing) -> None:
        super().verify_listing(listing)
        self.passed.add(listing.entry)


def digest_of(rank: int) -> bytes:
    return bytes([rank]) * 32


def clone(tree: Tree) -> Tree:
    other = copy.copy(tree)
    other._children, other._listings = dict(tree._children), dict(tree._listings)
    other._acknowledged, other._signatures = set(tree._acknowledged), dict(tree._signatures)
    return other


def held(tree: Tree) -> tuple[Any, ...]:
    """All that a tree acts on."""
    session = tree.session.roster.digest if tree.session else None
    listings = tuple(sorted((rank, each.entry.digest) for rank, each in tree._listings.items()))
    parts = (frozenset(tree._children), listings, frozenset(tree._acknowledged), tree.waiting)
    return tree.phase, tree._attached, session, *parts


# -- honest workers, one of which may die -----------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """One state of a whole world. `wires[a, b]` is under way from a to b; `ended[r]` says how r's part is over."""

    trees: tuple[Tree, ...]
    wires: dict[tuple[int, int], tuple[Message | str, ...]]
    ended: dict[int, str] = field(default_factory=dict)
    reports: int = 0  # that rank 0 may still make

    def key(self) -> object:
        wires = tuple(
            (edge, tuple(each if isinstance(each, str) else type(each) for each in queue))
            for edge, queue in sorted(self.wires.items())
            if queue
        )
        return tuple(held(tree) for tree in self.trees), wires, tuple(sorted(self.ended.items())), self.reports


class Step:
    """One event: takes a state, leaves it as it is, and makes the next."""

    def __init__(self, world: World) -> None:
        self.trees, self.wires, self.ended = list(world.trees), dict(world.wires), dict(world.ended)
        self.reports = world.reports

    def done(self) -> World:
        return World(tuple(self.trees), self.wires, self.ended, self.reports)

    def tree(self, rank: int) -> Tree:
        self.trees[rank] = clone(self.trees[rank])
        return self.trees[rank]

    def put(self, sender: int, peer: int, *items: Message | str) -> None:
        if peer not in self.ended:
            self.wires[sender, peer] = (*self.wires.get((sender, peer), ()), *items)

    def attach(self, child: int) -> World:
        """The child has finished its handshake; the parent finishes when the child's last message arrives."""
        parent = parent_of(child)
        assert parent is not None
        outgoing = self.tree(child).attach_parent(worker(parent, len(self.trees)).entry, digest_of(child))
        self.put(child, parent, ATTACH, *(each.message for each in outgoing))
        return self.done()

    def report(self) -> World:
        self.reports -= 1
        for each in self.tree(0).report():
            self.put(0, each.peer, each.message)
        return self.done()

    def deliver(self, sender: int, peer: int) -> World:
        queue = self.wires[sender, peer]
        item, self.wires[sender, peer] = queue[0], queue[1:]
        tree = self.tree(peer)
        if item == ATTACH:
            tree.attach_child(worker(sender, len(self.trees)).entry, digest_of(sender), SharedSecret.kind)
        elif tree.phase is Phase.GO:  # the control plane's: anything but a goodbye is an alarm
            self.end(peer, ALARMED)
        elif item == END:
            self.end(peer, FAILED)
        else:
            assert not isinstance(item, str)
            try:
                for each in tree.take(sender, item):
                    self.put(peer, each.peer, each.message)
            except AdmissionError:
                self.end(peer, FAILED)
        return self.done()

    def check(self, rank: int) -> World:
        """A worker verifies the roster that it has passed on: it need not be quick."""
        for each in self.tree(rank).check():
            self.put(rank, each.peer, each.message)
        return self.done()

    def end(self, rank: int, how: str) -> None:
        """What the loop does when a worker's part is over: tell the neighbours and hang up. A dead one only hangs up."""
        self.ended[rank] = how
        for peer in self.neighbours(rank):
            self.put(rank, peer, *([] if how == DEAD else [Failure(rank, how)]), END)
        self.wires = {edge: queue for edge, queue in self.wires.items() if edge[1] != rank}

    def neighbours(self, rank: int) -> Iterator[int]:
        """Everyone that shares a connection with `rank`: the child has it first, the parent when it hears of it."""
        if self.trees[rank]._attached:
            yield parent_of(rank) or 0
        for child in children_of(rank, len(self.trees)):
            if self.trees[child]._attached:
                yield child

    def die(self, rank: int) -> World:
        self.end(rank, DEAD)
        return self.done()


def new_world(size: int, watched: Watched, reports: int) -> World:
    trees = []
    for rank in range(size):
        terms = Terms(keys.Secret(bytes([rank]) * 32), b"table", SUITES)
        trees.append(Tree(worker(rank, size).entry, Policy((watched,)), watched, terms))
    for tree in trees:
        assert tree.begin() == [] or size == 1
    return World(tuple(trees), {}, {}, reports)


def events(world: World, deaths: bool) -> Iterator[World]:
    for rank in range(1, len(world.trees)):
        parent = parent_of(rank)
        if not world.trees[rank]._attached and rank not in world.ended and parent not in world.ended:
            yield Step(world).attach(rank)
    for (sender, peer), queue in world.wires.items():
        if queue and peer not in world.ended and world.trees[peer].phase not in CHECKING:
            yield Step(world).deliver(sender, peer)
    for rank, tree in enumerate(world.trees):
        if tree.phase in CHECKING and rank not in world.ended:
            yield Step(world).check(rank)
    if world.reports and 0 not in world.ended and world.trees[0].phase is Phase.GATHER:
        yield Step(world).report()
    if deaths and not world.ended:
        for rank in range(len(world.trees)):
            yield Step(world).die(rank)


def explore(first: World, deaths: bool) -> Iterator[tuple[World, bool]]:
    """Every state, and whether nothing more can happen in it."""
    seen, pending = {first.key()}, [first]
    while pending:
        world = pending.pop()
        following = list(events(world, deaths))
        yield world, not list(events(world, deaths=False))
        for each in following:
            if (key := each.key()) not in seen:
                seen.add(key)
                pending.append(each)


def check(world: World, watched: Watched) -> None:
    """What must hold in every state."""
    for tree in world.trees:
        if tree.session is not None:
            assert set(tree.session.roster.entries) <= watched.passed, "a worker in a roster that nobody verified"
    if any(tree.phase is Phase.GO for tree in world.trees):
        digests = {tree.session.roster.digest if tree.session else None for tree in world.trees}
        assert len(digests) == 1 and None not in digests, "a session began that not everyone holds"


SHAPES = [(4, 1), (4, 2), (4, 3), (1, 3), (1, 4), (2, 4), (2, 5)]


@pytest.mark.promise("No worker waits forever in an admission, in any order of messages and deaths.")
@pytest.mark.parametrize(("fanout", "size"), SHAPES)
def test_every_order_ends_with_all_workers_in_one_session(
    fanout: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "TREE_FANOUT", fanout)
    watched, ends = Watched(), 0
    for world, quiet in explore(new_world(size, watched, reports=int(size < 5)), deaths=False):
        check(world, watched)
        if quiet:
            ends += 1
            assert {tree.phase for tree in world.trees} == {Phase.GO}, "somebody waits for ever"
    assert ends


@pytest.mark.promise("No worker waits forever in an admission, in any order of messages and deaths.")
@pytest.mark.parametrize(("fanout", "size"), [(4, 2), (4, 3), (1, 3), (1, 4), (2, 4)])
def test_a_crash_at_any_moment_reaches_all_workers(fanout: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers connected to it are notified; only one that still waits for a missing worker keeps its own deadline."""
    monkeypatch.setattr(keys, "TREE_FANOUT", fanout)
    watched = Watched()
    ways: set[Any] = set()
    for world, quiet in explore(new_world(size, watched, reports=0), deaths=True):
        check(world, watched)
        if quiet and world.ended:
            after = at_their_deadline(world)
            left = [rank for rank in range(size) if rank not in after.ended]
            assert not left, f"rank {left} waits for ever"
            ways.update(after.ended.values())
    assert ways == {DEAD, FAILED, ALARMED}


def test_the_exploration_finds_a_worker_that_does_not_wait_for_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests above can fail."""
    monkeypatch.setattr(keys, "TREE_FANOUT", 1)
    right = Tree._acknowledge_if_all

    def hasty(tree: Tree) -> list[Outgoing]:
        tree._acknowledged = set(children_of(tree._own.rank, tree._own.world_size))
        return right(tree)

    monkeypatch.setattr(Tree, "_acknowledge_if_all", hasty)
    watched = Watched()
    with pytest.raises(AssertionError, match="not everyone holds"):  # noqa: PT012
        for world, _ in explore(new_world(3, watched, reports=0), deaths=False):
            check(world, watched)


def at_their_deadline(world: World) -> World:
    """Workers whose parent, or one of whose children, ended before it came give up; and then what follows from it."""
    size = len(world.trees)
    for rank, tree in enumerate(world.trees):
        absent = [child for child in children_of(rank, size) if not world.trees[child]._attached]
        absent += [parent_of(rank) or 0] if rank and not tree._attached else []
        if rank not in world.ended and any(each in world.ended for each in absent):
            step = Step(world)
            step.end(rank, FAILED)
            world = step.done()
    while following := list(events(world, deaths=False)):
        world = following[0]
    return world


# -- one honest worker, a neighbour that was admitted and says anything ------------------------------------------------

SIZE = 6  # rank 1 has a parent, 0, and a child, 5


def listing(rank: int, proof_digest: bytes | None = None, **changes: Any) -> Listing:
    one = worker(rank, SIZE, **changes)
    digest = digest_of(rank) if proof_digest is None else proof_digest
    return Listing(one.entry, 1, digest, one.shared.endorse(one.entry, digest))


def letters(tree: Tree) -> Iterator[tuple[str, Message]]:
    """All that a neighbour may say: what is right, and the ways for it to be wrong."""
    everyone = [listing(rank) for rank in range(SIZE)]
    roster = Welcome(1, keys.Secret(bytes(32)), b"table", tuple(everyone))

    def with_one(changed: Listing) -> Welcome:
        return replace(
            roster, listings=tuple(changed if each.entry.rank == changed.entry.rank else each for each in everyone)
        )

    yield "its entry", Entries((everyone[5],))
    yield "its entry twice", Entries((everyone[5], everyone[5]))
    yield "its entry with another key", Entries((listing(5, public_key=bytes(32)),))
    yield "its entry with another proof", Entries((listing(5, b"\7" * 32),))
    yield "its entry, not endorsed", Entries((replace(everyone[5], endorsement=bytes(32)),))
    yield "its entry by an unknown kind", Entries((replace(everyone[5], kind=200),))
    yield "somebody else's entry", Entries((everyone[2],))
    yield "the receiver's entry", Entries((everyone[1],))
    yield "an entry beyond the world", Entries((Listing(worker(21, 64).entry, 1, bytes(32), b""),))
    yield "who is missing", Waiting(1, (5,))
    yield "nobody is missing", Waiting(0, ())
    yield "the roster", roster
    yield "the roster with an unknown suite", replace(roster, suite=9)
    yield "the roster, one missing", replace(roster, listings=roster.listings[:-1])
    yield "the roster, one twice", replace(roster, listings=(*roster.listings[:-1], everyone[4]))
    yield "the roster, one not endorsed", with_one(replace(everyone[3], endorsement=bytes(32)))
    yield "the roster, one of another generation", with_one(listing(3, generation="2"))
    yield "the roster, the receiver's key swapped", with_one(listing(1, public_key=bytes(32)))
    yield "the roster, its child's key swapped", with_one(listing(5, public_key=bytes(32)))
    yield "the roster, its parent's key swapped", with_one(listing(0, public_key=bytes(32)))
    yield "another roster", with_one(listing(3, port=9))
    digest = tree.session.roster.digest if tree.session else b"\1" * 32
    for kind in (Acknowledge, Go):
        yield f"{kind.__name__} of it", kind(digest)
        yield f"{kind.__name__} of another", kind(bytes(32))
    yield "a failure", Failure(3, "no")


def honest_between() -> tuple[Tree, Watched]:
    watched = Watched()
    tree = Tree(worker(1, SIZE).entry, Policy((watched,)), watched, Terms(keys.Secret(bytes(32)), b"", SUITES))
    tree.begin()
    return tree, watched


@pytest.mark.promise("Only a verification by the policy creates an admitted worker.")
@pytest.mark.parametrize("attached", ["parent", "parent and child"])
def test_a_lying_neighbour_causes_no_session_that_was_not_agreed(attached: str) -> None:
    first, watched = honest_between()
    first.attach_parent(worker(0, SIZE).entry, digest_of(1))
    if attached == "parent and child":
        first.attach_child(worker(5, SIZE).entry, digest_of(5), SharedSecret.kind)
    peers = (0, 5) if attached == "parent and child" else (0,)
    branches: list[tuple[Tree, tuple[tuple[int, str], ...]]] = [(first, ())]
    seen, tried, began = {held(first)}, 0, 0
    for tree, path in branches:
        for peer in peers:
            for name, message in letters(tree):
                tried += 1
                after = clone(tree)
                try:
                    after.receive(peer, message)
                except (AdmissionError, ProtocolError):
                    continue  # the session is lost, loudly; any other exception fails this test
                assert set(after._listings) <= {1, 5}, f"{name}: rank {peer} spoke for somebody who is not below it"
                if after.phase is Phase.GO:
                    assert (peer, name) == (0, "Go of it"), path
                if after._acknowledged != tree._acknowledged:
                    assert (peer, name) == (5, "Acknowledge of it"), path
                if after.session is not tree.session:
                    assert (peer, name) in ((0, "the roster"), (0, "another roster")), path
                if held(after) not in seen:
                    seen.add(held(after))
                    branches.append((after, (*path, (peer, name))))
    assert tried > 50
    for tree, path in branches:
        if tree.session is not None:
            assert set(tree.session.roster.entries) <= watched.passed
        if tree.phase is Phase.GO:
            began += 1
            assert (5, "Acknowledge of it") in path, "it began, and its child had not agreed"
    assert (began > 0) == (attached == "parent and child"), "a worker whose child is missing never begins"


def test_a_worker_handles_no_message_while_it_checks_the_roster() -> None:
    first, watched = honest_between()
    first.attach_parent(worker(0, SIZE).entry, digest_of(1))
    first.attach_child(worker(5, SIZE).entry, digest_of(5), SharedSecret.kind)
    roster = dict(letters(first))["the roster"]
    passed_on = first.take(0, roster)
    assert passed_on == [Outgoing(5, roster)], "its children have it at once"
    assert (first.phase, first.session, watched.passed) == (Phase.CHECK, None, set())
    for name, message in letters(first):
        for peer in (0, 5):
            with pytest.raises((AdmissionError, ProtocolError)):
                assert clone(first).take(peer, message) is None, name
    assert first.check() == []  # the child has not acknowledged yet
    assert first.phase is Phase.SEALED
    assert first.check() == []


def test_a_worker_handles_no_message_before_admission() -> None:
    tree, _ = honest_between()
    for name, message in letters(tree):
        for peer in (5, 2):
            with pytest.raises((AdmissionError, ProtocolError)):
                assert tree.receive(peer, message) is None, name
