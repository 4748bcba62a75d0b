"""Every order of messages on one edge, of any length, until no new state is found: the whole space, not samples of it.

A handshake acts on what it holds and on nothing else, so two that hold the same are one state, and the space is finite.
Proofs, bindings and verification are the real ones.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

from ringfence import keys
from ringfence.admission.binding import Role
from ringfence.admission.entry import Entry
from ringfence.admission.handshake import Handshake, State
from ringfence.admission.messages import Admit, Hello, Message, Proof, Reason, Refuse
from ringfence.admission.policy import Evidence, Policy, verdict
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.errors import ProtocolError
from tests.unit.admission_samples import SECRET, Worker, channels, worker

WAITING = (State.HELLO, State.PROOF, State.ADMIT)
OWN = (
    "its own proof has been collected"  # no message: it may come at any time, and until then nothing but a refusal may
)
VERDICT = "the peer's proof has been verified"  # no message either
OTHER_SECRET = keys.Secret(bytes(range(50, 82)))


class Watched(SharedSecret):
    """The real verifier, which also records the entries that it admits."""

    def __init__(self) -> None:
        super().__init__(SECRET, "run-7")
        self.passed: list[Entry] = []

    def verify(self, evidence: Evidence) -> None:
        super().verify(evidence)
        self.passed.append(evidence.entry)


# -- one honest side, a peer that says anything -----------------------------------------------------------------------


def proof_of(own: Worker, role: Role, peer: Worker, exporter: bytes = b"e" * 32) -> Proof:
    """The proof that `own` presents in `role` to `peer`, on a connection with this exporter."""
    ends = channels(own, peer, exporter) if role is Role.CHILD else channels(peer, own, exporter)[::-1]
    handshake = own.handshake(role)
    handshake.begin(ends[0])
    handshake.receive(peer.hello)
    return Proof(own.shared.kind, own.shared.prove(handshake.own_binding))


def alphabet(role: Role, own: Worker, peer: Worker) -> dict[str, Message]:
    """All that a peer may say: what is right, and each way for it to be wrong."""
    hello, entry, other = peer.hello, peer.entry, Role(1 - role)
    unauthenticated_peer = Worker(entry, SharedSecret(OTHER_SECRET, "run-7"))
    return {
        "hello": hello,
        "hello of another run": replace(hello, entry=replace(entry, run_id="run-8")),
        "hello of another generation": replace(hello, entry=replace(entry, generation="2")),
        "hello of another rank": replace(hello, entry=replace(entry, rank=3)),
        "hello of another world": replace(hello, entry=replace(entry, world_size=5)),
        "hello with another policy": replace(hello, policy_digest=bytes(32)),
        "hello with another suite": replace(hello, suites=(9,)),
        "hello with another TLS key": replace(hello, entry=replace(entry, tls_key_digest=bytes(32))),
        "hello with another key for links": replace(hello, entry=replace(entry, public_key=bytes(32))),
        "proof": proof_of(peer, other, own),
        "proof under another secret": proof_of(unauthenticated_peer, other, own),
        "proof from another connection": proof_of(peer, other, own, b"f" * 32),
        "proof for the other role": proof_of(peer, role, own) if role is Role.PARENT else proof_of(own, role, peer),
        "proof of an unknown kind": Proof(200, bytes(32)),
        "empty proof": Proof(1, b""),
        "admit": Admit(),
        "refuse": Refuse(Reason.PROOF, "no"),
    }


class Known(NamedTuple):
    """One state: the handshake, and the entries that its policy has admitted so far."""

    state: State
    peer: Hello | None
    unverified: Evidence | None
    refused: bool
    admitted: Entry | None
    verified: frozenset[Entry]


@dataclass(frozen=True)
class Branch:
    handshake: Handshake
    path: tuple[str, ...]  # what was accepted
    verified: frozenset[Entry]
    shown: bool  # whether this side has sent a proof

    @property
    def known(self) -> Known:
        one = self.handshake
        admitted = one.admitted.entry if one.admitted else None
        return Known(one.state, one.peer, one.unverified, one.refusal is not None, admitted, self.verified)


def receive(handshake: Handshake, message: Message | str, policy: Policy) -> list[Message]:
    """The answer to a message, to the end of collecting or to the end of verifying."""
    if not isinstance(message, str):
        return handshake.receive(message)
    if message is VERDICT:
        if handshake.unverified is None:
            raise ProtocolError("nothing was to be verified")
        return handshake.decide(verdict(policy, handshake.unverified))
    if handshake.state is not State.COLLECT:
        raise ProtocolError("nothing was asked for")
    shared = SharedSecret(SECRET, "run-7")
    return handshake.present(Proof(shared.kind, shared.prove(handshake.own_binding)))


def explore(role: Role) -> tuple[list[Branch], int]:
    """Every state that a peer can bring an honest side into, and how many steps were tried."""
    child, parent = worker(1), worker(0)
    own, peer = (child, parent) if role is Role.CHILD else (parent, child)
    watched = Watched()
    first = Handshake(role, own.hello, frozenset({peer.entry.rank}), None, None)
    first.begin(channels(child, parent)[role])
    letters: dict[str, Message | str] = {**alphabet(role, own, peer), OWN: OWN, VERDICT: VERDICT}
    branches = [Branch(first, (), frozenset(), False)]
    seen, tried = {branches[0].known}, 0
    for branch in branches:
        for name, message in letters.items():
            tried += 1
            after, before = copy.copy(branch.handshake), len(watched.passed)
            try:
                answer = receive(after, message, Policy((watched,)))
            except ProtocolError:
                still = Branch(after, branch.path, branch.verified, branch.shown)
                assert still.known == branch.known, f"{name} was an error and changed something, after {branch.path}"
                continue
            shown = branch.shown or any(isinstance(each, Proof) for each in answer)
            verified = branch.verified | set(watched.passed[before:])
            following = Branch(after, (*branch.path, name), verified, shown)
            if following.known not in seen:
                seen.add(following.known)
                branches.append(following)
    return branches, tried


@pytest.mark.promise("Only a verification by the policy creates an admitted worker.")
@pytest.mark.parametrize("role", Role)
def test_no_order_of_messages_admits_without_verification(role: Role) -> None:
    branches, tried = explore(role)
    assert tried > 100
    assert {branch.handshake.state for branch in branches} == set(State) - {State.IDLE}
    for branch in branches:
        one, said = branch.handshake, tuple(each for each in branch.path if each not in (OWN, VERDICT))
        verifying = (State.ADMIT, State.DONE) if role is Role.CHILD else (State.COLLECT, State.ADMIT, State.DONE)
        assert (one.admitted is not None) == (one.state in verifying), branch.path
        if one.admitted is not None:
            assert one.admitted.entry in branch.verified, branch.path
            assert said[:2] == ("hello", "proof")
        if one.state is State.DONE:
            assert said == ("hello", "proof", "admit"), "there is one way in"
            assert branch.shown and branch.path.count(OWN) == 1, "and it was shown a proof too"
            assert branch.path.count(VERDICT) == 1
        if role is Role.PARENT and branch.shown:
            assert branch.verified, "a parent shows nothing, and collects no quote, before its child has passed"


@pytest.mark.parametrize("role", Role)
def test_every_state_waits_for_one_message_type_or_is_final(role: Role) -> None:
    child, parent = worker(1), worker(0)
    own, peer = (child, parent) if role is Role.CHILD else (parent, child)
    letters = alphabet(role, own, peer)
    for branch in explore(role)[0]:
        accepted = set()
        for message in letters.values():
            after = copy.copy(branch.handshake)
            try:
                after.receive(message)
            except ProtocolError:
                continue
            assert after.state is not branch.handshake.state, "a message that moves nothing could be repeated for ever"
            accepted.add(type(message))
        state = branch.handshake.state
        working = state in (State.COLLECT, State.VERIFY)
        assert len(accepted) == (2 if state in WAITING else 1 if working else 0)
        assert not working or accepted == {Refuse}, "who is waited for has nothing else to say"


def test_the_exploration_finds_admission_with_a_lax_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the two tests above can fail: with the verdict taken away, unauthenticated peers are admitted and it is seen."""
    monkeypatch.setattr(Watched, "verify", lambda self, evidence: None)
    branches, _ = explore(Role.PARENT)
    admitted = [branch for branch in branches if branch.handshake.admitted is not None]
    assert any(not branch.verified for branch in admitted)


# -- two honest sides, every interleaving, and a wire that is cut at any moment ---------------------------------------

END = "end"  # of the connection, behind what was sent before


class Pair(NamedTuple):
    """Two workers and what is under way between them. `over[i]`: that side has seen the end."""

    sides: tuple[Handshake, Handshake]
    queues: tuple[tuple[Message | str, ...], tuple[Message | str, ...]]  # to the child, to the parent
    over: tuple[bool, bool]

    def key(self) -> object:
        states = tuple((one.state, one.admitted is not None) for one in self.sides)
        queues = tuple(tuple(each if isinstance(each, str) else type(each) for each in queue) for queue in self.queues)
        return states, queues, self.over


def steps(pair: Pair) -> Iterator[Pair]:
    """What may happen next: either side takes its next message, or the wire is cut."""
    for at in (0, 1):
        if pair.queues[at] and not pair.over[at]:
            yield deliver(pair, at)
    if not any(pair.over):
        yield Pair(pair.sides, ((END,), (END,)), pair.over)


def deliver(pair: Pair, at: int) -> Pair:
    sides, queues, over = list(pair.sides), list(pair.queues), list(pair.over)
    message, queues[at] = queues[at][0], queues[at][1:]
    one = sides[at] = copy.copy(sides[at])
    if isinstance(message, str):
        over[at] = True
        return Pair((sides[0], sides[1]), (queues[0], queues[1]), (over[0], over[1]))
    queues[1 - at] += tuple(one.receive(message))  # two honest sides never break the protocol: an error fails the test
    if one.state is State.REFUSED:  # the driver hangs up
        over[at] = True
        queues[1 - at] += (END,)
    return Pair((sides[0], sides[1]), (queues[0], queues[1]), (over[0], over[1]))


CHANGES: list[dict[str, object]] = [
    {},
    {"run_id": "run-8"},
    {"generation": "2"},
    {"world_size": 5},
    {"secret": OTHER_SECRET},
]


@pytest.mark.promise("No worker waits forever in an admission, in any order of messages and deaths.")
@pytest.mark.parametrize("changes", CHANGES, ids=lambda each: next(iter(each), "alike"))
@pytest.mark.parametrize("changed", Role)
def test_two_workers_finish_in_every_interleaving(changes: dict[str, object], changed: Role) -> None:
    child = worker(1, **(changes if changed is Role.CHILD else {}))  # type: ignore[arg-type]
    parent = worker(0, **(changes if changed is Role.PARENT else {}))  # type: ignore[arg-type]
    one, two = child.handshake(Role.CHILD), parent.handshake(Role.PARENT)
    ends = channels(child, parent)
    to_parent, to_child = tuple(one.begin(ends[0])), tuple(two.begin(ends[1]))
    pending = deque([Pair((one, two), (to_child, to_parent), (False, False))])
    seen, finals = {pending[0].key()}, 0
    while pending:
        pair = pending.popleft()
        following = list(steps(pair))
        uncut = [each for at in (0, 1) if pair.queues[at] and not pair.over[at] for each in [deliver(pair, at)]]
        if not uncut:
            finals += 1
            for side, over in zip(pair.sides, pair.over, strict=True):
                assert over or side.state is State.DONE, f"a side waits for ever: {pair.key()}"
            if not any(pair.over):
                assert not changes and all(side.state is State.DONE for side in pair.sides)
        for side in pair.sides:
            assert not changes or side.state is not State.DONE
        for each in following:
            if each.key() not in seen:
                seen.add(each.key())
                pending.append(each)
    assert finals >= 2, "one that ends by itself and one that is cut, at least"


def test_the_samples_differ_as_they_say() -> None:
    """A letter of the alphabet that equals another would make the exploration smaller than it looks."""
    for role in Role:
        child, parent = worker(1), worker(0)
        letters = alphabet(role, *((child, parent) if role is Role.CHILD else (parent, child)))
        assert len({repr(each) + repr(getattr(each, "proof", "")) for each in letters.values()}) == len(letters)
