"""Whole worlds in memory: all workers get the same roster and secret, or no session begins."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from ringfence import keys
from ringfence.admission.entry import Listing
from ringfence.admission.messages import Acknowledge, Entries, Failure, Go, Message, Waiting, Welcome
from ringfence.admission.policy import Policy, verify
from ringfence.admission.proofs import token
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.admission.roster import seal
from ringfence.admission.tree import Outgoing, Phase, Terms, Tree, children_of, is_below, parent_of
from ringfence.errors import AdmissionError, ProtocolError
from tests.unit.admission_samples import SUITES, Worker, worker
from tests.unit.token_mint import NOW, rules


class World:
    """Trees joined by queues; edges come up in random order, messages keep their order on each edge."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.workers = [worker(rank, size) for rank in range(size)]
        self.trees = [tree_of(each) for each in self.workers]
        self.edges: dict[tuple[int, int], deque[Message]] = {}
        self.sent = 0
        self.random = random.Random(seed)

    def send(self, sender: int, outgoing: list[Outgoing]) -> None:
        for peer, message in outgoing:
            self.edges.setdefault((sender, peer), deque()).append(message)
            self.sent += 1

    def connect(self, child: int) -> None:
        parent = parent_of(child)
        assert parent is not None
        digest = bytes([child % 256]) * 32
        self.trees[parent].attach_child(self.workers[child].entry, digest, SharedSecret.kind)
        self.send(child, self.trees[child].attach_parent(self.workers[parent].entry, digest))

    def step(self) -> bool:
        ready = [edge for edge, queue in self.edges.items() if queue]
        if not ready:
            return False
        sender, receiver = self.random.choice(ready)
        self.send(receiver, self.trees[receiver].receive(sender, self.edges[sender, receiver].popleft()))
        return True

    def run(self, absent: frozenset[int] = frozenset()) -> None:
        self.send(0, self.trees[0].begin())
        children = [rank for rank in range(1, len(self.trees)) if rank not in absent]
        self.random.shuffle(children)
        for child in children:
            self.connect(child)
            while self.random.random() < 0.5 and self.step():
                pass
        self.settle()

    def settle(self) -> None:
        """Until nothing is under way."""
        while self.step():
            pass


def tree_of(one: Worker) -> Tree:
    terms = Terms(keys.Secret(bytes([one.entry.rank % 256]) * 32), f"table of {one.entry.rank}".encode(), SUITES)
    return Tree(one.entry, one.policy, one.shared, terms)


def endorsed(one: Worker, digest: bytes) -> Listing:
    return Listing(one.entry, 1, digest, one.shared.endorse(one.entry, digest))


@pytest.mark.parametrize("size", [*range(1, 24), 64, 85, 86])
def test_all_workers_get_the_same_session_from_rank_0(size: int) -> None:
    world = World(size, seed=size)
    world.run()
    assert {tree.phase for tree in world.trees} == {Phase.GO}
    sessions = [tree.session for tree in world.trees]
    assert all(session is not None for session in sessions)
    assert {session.roster.digest for session in sessions if session} == {
        sessions[0].roster.digest if sessions[0] else b""
    }
    assert {session.table for session in sessions if session} == {b"table of 0"}
    assert all(session.session_secret == keys.Secret(bytes(32)) for session in sessions if session)


@pytest.mark.promise("Workers that repeat or choose their random numbers cannot make another repeat a key and nonce.")
@pytest.mark.parametrize("fresh", range(6))
def test_a_secret_that_rank_0_draws_twice_gives_another_session_key(fresh: int) -> None:
    """Rank 0 draws the session secret, but every worker's own public key is in what the session key derives from."""
    drawn = []
    for attempt in range(2):
        world = World(6)
        if attempt:  # all other workers repeat their keys, too
            changed = worker(fresh, 6, public_key=bytes([7] * 32))
            world.workers[fresh], world.trees[fresh] = changed, tree_of(changed)
        world.run()
        sessions = [tree.session for tree in world.trees if tree.session is not None]
        assert len(sessions) == 6
        drawn.append({keys.session_key(each.session_secret, each.roster.digest).reveal() for each in sessions})
        assert all(each.session_secret == keys.Secret(bytes(32)) for each in sessions)
    assert len(drawn[0]) == len(drawn[1]) == 1 and drawn[0] != drawn[1]


def test_the_cost_of_a_worker_does_not_grow_with_the_world() -> None:
    for size in (21, 85, 128):
        world = World(size)
        world.run()
        depth = 0
        rank: int | None = size - 1
        while rank:
            rank, depth = parent_of(rank), depth + 1
        # Each entry joins at most `depth` edges; a roster, an acknowledgement and a go cross each edge once.
        assert world.sent <= (size - 1) * (depth + 3)
        assert max(len(children_of(rank, size)) for rank in range(size)) == keys.TREE_FANOUT


@pytest.mark.parametrize("absent", [1, 4, 9, 20])
def test_no_worker_begins_while_one_is_missing_and_all_learn_which(absent: int) -> None:
    world = World(21)
    below = frozenset(rank for rank in range(21) if is_below(rank, absent))
    world.run(absent=frozenset({absent}))
    assert all(tree.phase is Phase.GATHER for tree in world.trees)
    world.send(0, world.trees[0].report())
    world.settle()
    for rank in set(range(21)) - below:
        waiting = world.trees[rank].waiting
        assert waiting is not None
        assert set(waiting.ranks) == below
        assert waiting.missing == len(below)


def test_a_late_worker_is_no_longer_reported_missing() -> None:
    world = World(21)
    world.run(absent=frozenset({20}))
    world.send(0, world.trees[0].report())
    world.settle()
    assert all(tree.waiting == Waiting(1, (20,)) for tree in world.trees[:20])
    world.connect(20)
    world.settle()
    assert {(tree.phase, tree.waiting) for tree in world.trees} == {(Phase.GO, None)}


def test_the_shape_of_the_tree() -> None:
    for size in (1, 2, 5, 6, 100):
        seen = [child for rank in range(size) for child in children_of(rank, size)]
        assert seen == list(range(1, size))
        assert all(parent_of(child) == rank for rank in range(size) for child in children_of(rank, size))
    assert is_below(22, 1)
    assert is_below(1, 1)
    assert not is_below(2, 1)
    assert not is_below(1, 5)


# -- faults ---------------------------------------------------------------------------------------------------------


def root_with_child(size: int = 3) -> Tree:
    tree = tree_of(worker(0, size))
    tree.begin()
    tree.attach_child(worker(1, size).entry, bytes(32), SharedSecret.kind)
    return tree


@pytest.mark.promise("Two workers that claim one rank end the session, and the error names both.")
def test_two_workers_with_one_rank_end_the_session_naming_both() -> None:
    tree = root_with_child()
    with pytest.raises(AdmissionError, match=r"two workers claim rank 1: .*10.0.0.7:20001.* and .*10.0.0.9:20001"):
        tree.attach_child(worker(1, 3, host="10.0.0.9", public_key=bytes(32)).entry, bytes(32), SharedSecret.kind)


def test_a_worker_cannot_be_attached_twice() -> None:
    with pytest.raises(ProtocolError, match="attached twice"):
        root_with_child().attach_child(worker(1, 3).entry, b"\1" * 32, SharedSecret.kind)


def test_a_child_lists_only_its_own_subtree() -> None:
    with pytest.raises(ProtocolError, match="not below it"):
        root_with_child().receive(1, Entries((endorsed(worker(2, 3), bytes(32)),)))


def test_a_child_lists_itself_with_the_kind_it_presented() -> None:
    """Evidence without an endorsement would be enough for a listing; the child was admitted by the secret, or by that."""
    bare = token.verifier(rules(), lambda: NOW)
    one = worker(0, 3)
    listed = replace(endorsed(worker(1, 3), bytes(32)), kind=bare.kind, endorsement=b"")
    policy = Policy((one.shared, bare))
    assert verify(policy, listed).proof_name == bare.name
    for kind, says in ((one.shared.kind, "with another entry or proof than it presented"), (bare.kind, None)):
        tree = Tree(one.entry, policy, one.shared, Terms(keys.Secret(bytes(32)), b"", SUITES))
        tree.begin()
        tree.attach_child(worker(1, 3).entry, bytes(32), kind)
        if says is None:
            assert tree.receive(1, Entries((listed,))) == []
        else:
            with pytest.raises(AdmissionError, match=says):
                tree.receive(1, Entries((listed,)))


def test_a_child_lists_itself_with_the_entry_it_presented() -> None:
    with pytest.raises(AdmissionError, match="with another entry or proof than it presented"):
        root_with_child().receive(1, Entries((endorsed(worker(1, 3, public_key=bytes(32)), bytes(32)),)))
    with pytest.raises(AdmissionError, match="with another entry or proof than it presented"):
        root_with_child().receive(1, Entries((endorsed(worker(1, 3), b"\1" * 32),)))


def test_an_entry_that_is_not_endorsed_ends_the_session() -> None:
    forged = replace(endorsed(worker(5, 8), bytes(32)), endorsement=bytes(32))
    with pytest.raises(AdmissionError, match="rank 5 is not endorsed"):
        root_with_child(8).receive(1, Entries((forged,)))


def leaf() -> Tree:
    tree = tree_of(worker(1, 2))
    tree.begin()
    tree.attach_parent(worker(0, 2).entry, bytes(32))
    return tree


def welcome(own: Worker, parent: Worker) -> Welcome:
    listings = (endorsed(parent, bytes(32)), endorsed(own, bytes(32)))
    return Welcome(1, keys.Secret(bytes(32)), b"", listings)


def test_the_roster_lists_a_worker_and_its_parent_verbatim() -> None:
    assert leaf().receive(0, welcome(worker(1, 2), worker(0, 2)))
    for own, parent in ((worker(1, 2, port=9), worker(0, 2)), (worker(1, 2), worker(0, 2, public_key=bytes(32)))):
        with pytest.raises(AdmissionError, match="with another entry than it presented"):
            leaf().receive(0, welcome(own, parent))


def test_the_roster_lists_a_parents_children_verbatim() -> None:
    tree = tree_of(worker(1, 6))
    tree.begin()
    tree.attach_parent(worker(0, 6).entry, bytes(32))
    tree.attach_child(worker(5, 6).entry, bytes(32), SharedSecret.kind)
    listings = tuple(endorsed(worker(r, 6, port=9) if r == 5 else worker(r, 6), bytes(32)) for r in range(6))
    with pytest.raises(AdmissionError, match="lists rank 5 with another entry than it presented"):
        tree.receive(0, Welcome(1, keys.Secret(bytes(32)), b"", listings))


BARE = token.verifier(rules(), lambda: NOW)  # a proof that endorses nothing: anybody can list anybody by it


@pytest.mark.promise("A worker rejects a roster that lists it, or its child, by another proof than was presented.")
@pytest.mark.parametrize("lie", ["digest", "kind"])
@pytest.mark.parametrize("about", [1, 5], ids=["itself", "its child"])
def test_the_roster_lists_the_proofs_of_a_worker_and_its_children(about: int, lie: str) -> None:
    """Otherwise it would fail peer verification because of what a worker above has listed for it."""
    one = worker(1, 6)
    tree = Tree(one.entry, Policy((one.shared, BARE)), one.shared, Terms(keys.Secret(bytes(32)), b"", SUITES))
    tree.begin()
    tree.attach_parent(worker(0, 6).entry, bytes(32))
    tree.attach_child(worker(5, 6).entry, bytes(32), SharedSecret.kind)
    listings = [endorsed(worker(rank, 6), bytes(32)) for rank in range(6)]
    if lie == "digest":
        listings[about] = endorsed(worker(about, 6), b"\1" * 32)
    else:
        listings[about] = replace(listings[about], kind=BARE.kind, endorsement=b"")
    with pytest.raises(AdmissionError, match=f"the roster lists rank {about} with another proof than it presented"):
        tree.receive(0, Welcome(1, keys.Secret(bytes(32)), b"", tuple(listings)))


def test_an_unknown_suite_is_refused() -> None:
    with pytest.raises(AdmissionError, match="cipher suite 9"):
        leaf().receive(0, replace(welcome(worker(1, 2), worker(0, 2)), suite=9))


def test_another_roster_digest_is_refused() -> None:
    tree = leaf()
    tree.receive(0, welcome(worker(1, 2), worker(0, 2)))
    with pytest.raises(AdmissionError, match="has another roster"):
        tree.receive(0, Go(bytes(32)))


def test_a_failure_ends_the_join_and_names_its_reporter() -> None:
    with pytest.raises(AdmissionError, match="rank 7 ended the join: no"):
        leaf().receive(0, Failure(7, "no"))


def test_messages_out_of_place_are_errors() -> None:
    entry_list = Entries((endorsed(worker(1, 2), bytes(32)),))
    message: Any
    for message in (entry_list, Acknowledge(bytes(32)), Go(bytes(32))):
        with pytest.raises(ProtocolError, match="which gathers entries"):
            leaf().receive(0, message)
    for message in (Waiting(1, (2,)), welcome(worker(1, 2), worker(0, 2)), Go(bytes(32)), Acknowledge(bytes(32))):
        with pytest.raises(ProtocolError, match="its child, sent"):
            root_with_child().receive(1, message)
    tree = leaf()
    tree.receive(0, welcome(worker(1, 2), worker(0, 2)))
    for message in (Waiting(1, (2,)), welcome(worker(1, 2), worker(0, 2)), Acknowledge(bytes(32))):
        with pytest.raises(ProtocolError, match="which waits for GO"):
            tree.receive(0, message)


def test_there_is_one_parent() -> None:
    with pytest.raises(ProtocolError, match="second parent"):
        leaf().attach_parent(worker(0, 2).entry, bytes(32))
    with pytest.raises(ProtocolError, match="second parent"):
        tree_of(worker(0, 2)).attach_parent(worker(1, 2).entry, bytes(32))


# -- the size of a world ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_world_smaller_than_the_policy_allows_does_not_begin(rank: int) -> None:
    one = worker(rank, 2)
    policy = replace(one.policy, min_workers=3)
    tree = Tree(one.entry, policy, one.shared, Terms(keys.Secret(bytes(32)), b"", SUITES))
    with pytest.raises(
        AdmissionError, match=rf"rank {rank} was started in a run of 2 workers.* at least 3.*min_workers"
    ):
        tree.begin()
    with pytest.raises(AdmissionError, match="at least 3"):
        seal(policy, one.entry, welcome(worker(1, 2), worker(0, 2)).listings, 1, b"")


@pytest.mark.promise("Workers with different policies do not form a session, and the error names both policies.")
def test_workers_with_different_policies_share_no_session() -> None:
    """Neighbours compare policies in their hellos. The roster exposes a worker that a lying neighbour let pass."""
    world = World(6)
    one = world.workers[5]
    stricter = replace(one.policy, max_session_age=60)
    world.trees[5] = Tree(one.entry, stricter, one.shared, Terms(keys.Secret(bytes(32)), b"", SUITES))
    with pytest.raises(AdmissionError, match="rank 5 has another roster than rank 1"):
        world.run()
    assert not any(tree.phase is Phase.GO for tree in world.trees)


def test_a_world_as_small_as_the_policy_allows_begins() -> None:
    one = worker(0, 2)
    Tree(one.entry, replace(one.policy, min_workers=2), one.shared, Terms(keys.Secret(bytes(32)), b"", SUITES)).begin()


def test_workers_that_ask_for_different_sizes_have_different_policies() -> None:
    policy = worker(0).policy
    assert len({replace(policy, min_workers=size).digest for size in (1, 2, 1000)}) == 3
    assert len({replace(policy, max_session_age=age).digest for age in (None, 60, 3600)}) == 3
    assert len({replace(policy, key_agreement=each).digest for each in keys.KEY_AGREEMENTS}) == 2


def test_a_worker_describes_what_it_waits_for() -> None:
    tree = leaf()
    assert tree.awaited() == "rank 1 waits for the roster from its parent, rank 0"
    tree.receive(0, welcome(worker(1, 2), worker(0, 2)))
    assert tree.awaited() == "rank 1 waits for GO from its parent, rank 0"
    root = root_with_child(2)
    root.receive(1, Entries((endorsed(worker(1, 2), bytes(32)),)))
    assert root.awaited() == "rank 0 waits for rank 1 to acknowledge the roster"
