"""Two workers in memory: they admit each other, or say why not; and no message is taken out of its place."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from ringfence import keys
from ringfence.admission.binding import Role, TlsValues
from ringfence.admission.handshake import TABLE, Handshake, State
from ringfence.admission.messages import Admit, Hello, Message, Proof, Reason, Refuse
from ringfence.admission.policy import verify
from ringfence.errors import AdmissionError, ProtocolError
from ringfence.release import RELEASE
from tests.unit.admission_samples import SUITES, Worker, channels, converse, worker

OTHER_SECRET = keys.Secret(bytes(range(50, 82)))


def meet(child: Worker, parent: Worker) -> tuple[Handshake, Handshake]:
    """Let a child and a parent run their handshake to its end."""
    one, two = child.handshake(Role.CHILD), parent.handshake(Role.PARENT)
    converse(one, two, channels(child, parent))
    return one, two


def test_two_workers_admit_each_other() -> None:
    child, parent = worker(1), worker(0)
    one, two = meet(child, parent)
    assert one.state is two.state is State.DONE
    assert one.admitted is not None
    assert two.admitted is not None
    assert one.admitted.entry == parent.entry
    assert two.admitted.entry == child.entry
    assert two.admitted.proof_name == "shared secret"
    assert one.child_proof_digest == two.child_proof_digest


def test_the_child_proves_first() -> None:
    child, parent = worker(1), worker(0)
    spoken = converse(child.handshake(Role.CHILD), parent.handshake(Role.PARENT), channels(child, parent))
    assert [(role, type(message)) for role, message in spoken] == [
        (Role.CHILD, Hello),
        (Role.PARENT, Hello),
        (Role.CHILD, Proof),
        (Role.PARENT, Proof),
        (Role.PARENT, Admit),
        (Role.CHILD, Admit),
    ]


@pytest.mark.parametrize(
    ("change", "reason", "named"),
    [
        ({"run_id": "run-8"}, Reason.RUN, ("'run-7'", "'run-8'")),
        ({"generation": "2"}, Reason.GENERATION, ("generation 3", "generation 2")),
        ({"world_size": 5}, Reason.WORLD_SIZE, ("world sizes: 4 and 5", "world sizes: 5 and 4")),
    ],
)
def test_a_mismatch_is_refused_by_both_sides_naming_both_values(
    change: dict[str, Any], reason: Reason, named: tuple[str, str]
) -> None:
    for one, two in (meet(worker(1, **change), worker(0)), meet(worker(1), worker(0, **change))):
        for handshake in (one, two):
            assert handshake.state is State.REFUSED
            assert handshake.refusal is not None
            assert handshake.refusal.reason is reason
            assert handshake.refusal.same_run == (reason is Reason.WORLD_SIZE)
            text = handshake.refusal.text
            assert all(name in text for name in named) or (
                reason is Reason.WORLD_SIZE and any(n in text for n in named)
            )


def test_different_policies_are_refused_naming_both_digests() -> None:
    child, parent = worker(1), worker(0)
    other = Hello(child.entry, bytes(32), SUITES, child.policy.kinds)
    two = parent.handshake(Role.PARENT)
    converse(child.handshake(Role.CHILD, other), two, channels(child, parent))
    assert two.refusal is not None
    assert two.refusal.reason is Reason.POLICY
    assert "0000000000000000" in two.refusal.text
    assert parent.policy.digest[:8].hex() in two.refusal.text


@pytest.mark.promise(
    "Workers of different versions or policies that prove themselves end the join at once, on both sides."
)
@pytest.mark.parametrize("newer", [Role.CHILD, Role.PARENT])
def test_two_versions_are_refused_after_both_have_proved_themselves(newer: Role) -> None:
    child, parent = worker(1), worker(0)
    hellos = [each.hello for each in (child, parent)]
    hellos[newer] = replace(hellos[newer], version=keys.VERSION + 1, release="0.9.3")
    one, two = child.handshake(Role.CHILD, hellos[0]), parent.handshake(Role.PARENT, hellos[1])
    spoken = converse(one, two, channels(child, parent))
    assert [(role, type(message)) for role, message in spoken][2:] == [
        (Role.CHILD, Proof),
        (Role.PARENT, Proof),
        (Role.CHILD, Refuse),
    ]
    for handshake in (one, two):
        assert handshake.refusal is not None
        assert handshake.refusal.reason is Reason.VERSION and handshake.refusal.proven
        for part in ("0.9.3", RELEASE, "version 1", "version 2", "install one release on all machines, such as 0.9.3"):
            assert part in handshake.refusal.text
        assert handshake.admitted is None


@pytest.mark.promise("A peer that has not proved its rank cannot end a join.")
def test_a_mismatch_without_a_proof_proves_nothing() -> None:
    child, parent = worker(1, secret=OTHER_SECRET), worker(0)
    one = child.handshake(Role.CHILD, replace(child.hello, version=keys.VERSION + 1))
    two = parent.handshake(Role.PARENT)
    converse(one, two, channels(child, parent))
    for handshake in (one, two):
        assert handshake.refusal is not None
        assert handshake.refusal.reason is Reason.PROOF and not handshake.refusal.proven


def test_a_child_that_admits_a_parent_that_does_not_fit_is_refused() -> None:
    """A real child would refuse. The parent must not take its word for it."""
    child, parent = worker(1), worker(0)
    hello = replace(child.hello, policy_digest=bytes(32))
    two = parent.handshake(Role.PARENT)
    to_child, to_parent = channels(child, parent)
    two.begin(to_parent)
    two.receive(hello)
    one = child.handshake(Role.CHILD, hello)
    one.begin(to_child)
    (proof,) = one.receive(parent.hello)
    assert [type(each) for each in two.receive(proof)] == [Proof]
    assert [type(each) for each in two.receive(Admit())] == [Refuse]
    assert two.state is State.REFUSED and two.admitted is None
    assert two.refusal is not None and two.refusal.reason is Reason.POLICY and two.refusal.proven


def test_no_common_suite_is_refused() -> None:
    child, parent = worker(1), worker(0)
    two = parent.handshake(Role.PARENT)
    other = Hello(child.entry, child.policy.digest, (9,), child.policy.kinds)
    converse(child.handshake(Role.CHILD, other), two, channels(child, parent))
    assert two.refusal is not None
    assert two.refusal.reason is Reason.SUITE


def test_a_wrong_secret_is_refused_before_the_parent_presents_a_proof() -> None:
    child, parent = worker(1, secret=OTHER_SECRET), worker(0)
    one, two = child.handshake(Role.CHILD), parent.handshake(Role.PARENT)
    spoken = converse(one, two, channels(child, parent))
    assert (Role.PARENT, Proof) not in [(role, type(message)) for role, message in spoken]
    assert one.refusal is not None
    assert two.refusal is not None
    assert (one.refusal.reason, one.refusal.by_peer) == (Reason.PROOF, True)
    assert (two.refusal.reason, two.refusal.by_peer) == (Reason.PROOF, False)
    assert "secret" in one.refusal.text
    assert one.admitted is two.admitted is None


def test_the_secret_of_another_run_is_another_key() -> None:
    assert keys.admission_key(OTHER_SECRET, "a") != keys.admission_key(OTHER_SECRET, "b")


def test_a_parent_without_the_secret_is_refused_by_the_child() -> None:
    child, parent = worker(1), worker(0, secret=OTHER_SECRET)
    one = child.handshake(Role.CHILD)
    one.begin(channels(child, parent)[0])
    one.receive(parent.hello)
    answer = one.receive(Proof(1, bytes(32)))
    assert [type(message) for message in answer] == [Refuse]
    assert one.state is State.REFUSED
    assert one.admitted is None


def test_a_parent_must_have_the_dialled_rank() -> None:
    child, impostor = worker(1), worker(2)
    one = child.handshake(Role.CHILD)
    one.begin(channels(child, impostor)[0])
    one.receive(impostor.hello)
    assert one.refusal is not None
    assert one.refusal.reason is Reason.RANK
    assert "expects rank 0" in one.refusal.text
    assert "rank 2" in one.refusal.text


def test_a_parent_admits_only_its_own_children() -> None:
    grandchild, parent = worker(5, world_size=8), worker(0, world_size=8)
    two = parent.handshake(Role.PARENT)
    two.begin(channels(grandchild, parent)[1])
    two.receive(grandchild.hello)
    assert two.refusal is not None
    assert two.refusal.reason is Reason.RANK


def test_an_unknown_kind_of_proof_is_refused() -> None:
    child, parent = worker(1), worker(0)
    two = parent.handshake(Role.PARENT)
    two.begin(channels(child, parent)[1])
    two.receive(child.hello)
    two.receive(Proof(200, bytes(32)))
    assert two.refusal is not None
    assert "kind 200" in two.refusal.text


# -- order ----------------------------------------------------------------------------------------------------------


def in_state(role: Role, state: State) -> Handshake:
    """A handshake that has come to `state` by the only way there is."""
    child, parent = worker(1), worker(0)
    own, peer = (child, parent) if role is Role.CHILD else (parent, child)
    handshake = own.handshake(role)
    if state is State.IDLE:
        return handshake
    if state is State.COLLECT:  # where a prover is at hand, nobody ever sees it there
        handshake = Handshake(role, own.hello, frozenset({peer.entry.rank}), own.policy, None)
    if state is State.VERIFY:  # nor there, where a policy is
        handshake = Handshake(role, own.hello, frozenset({peer.entry.rank}), None, own.shared)
    ends = channels(child, parent)
    other = peer.handshake(Role(1 - role))
    from_peer = other.begin(ends[1 - role])
    from_own = handshake.begin(ends[role])
    if state is State.REFUSED:
        handshake.receive(Refuse(Reason.RUN, ""))
    while handshake.state is not state:
        if from_peer:
            from_own += handshake.receive(from_peer.pop(0))
        else:
            from_peer += other.receive(from_own.pop(0))
    return handshake


MESSAGES: tuple[Message, ...] = (worker(0).hello, Proof(1, bytes(32)), Admit(), Refuse(Reason.RUN, ""))


@pytest.mark.parametrize(("role", "state", "message"), list(itertools.product(Role, State, MESSAGES)))
def test_a_message_that_the_table_does_not_list_is_an_error(role: Role, state: State, message: Message) -> None:
    handshake = in_state(role, state)
    if (role, state, type(message)) in TABLE:
        handshake.receive(message)
        assert handshake.state is not state
    else:
        with pytest.raises(ProtocolError, match=f"{type(message).__name__} while this worker"):
            handshake.receive(message)
        assert handshake.state is state


def test_each_waiting_state_expects_one_message_or_a_refusal() -> None:
    waiting = {State.HELLO: Hello, State.PROOF: Proof, State.ADMIT: Admit}
    expected = {(role, state, kind) for role in Role for state, one in waiting.items() for kind in (one, Refuse)}
    working = {(role, state, Refuse) for role in Role for state in (State.COLLECT, State.VERIFY)}
    assert set(TABLE) == expected | working


@pytest.mark.parametrize("role", Role)
def test_a_proof_is_presented_once_and_only_in_collect(role: Role) -> None:
    proof = Proof(1, bytes(32))
    for state in set(State) - {State.COLLECT}:
        with pytest.raises(ProtocolError, match="a proof was presented while this worker"):
            in_state(role, state).present(proof)
    handshake = in_state(role, State.COLLECT)
    assert handshake.present(proof)[0] is proof
    assert handshake.presented == (proof, handshake.own_binding)
    with pytest.raises(ProtocolError, match="a proof was presented"):
        handshake.present(proof)


@pytest.mark.parametrize("role", Role)
def test_a_proof_is_decided_on_once_and_for_its_own_entry(role: Role) -> None:
    refusal = AdmissionError("no")
    for state in set(State) - {State.VERIFY}:
        with pytest.raises(ProtocolError, match="there was a verdict while this worker"):
            in_state(role, state).decide(refusal)
    handshake, other = in_state(role, State.VERIFY), in_state(Role(1 - role), State.VERIFY)
    assert handshake.unverified is not None and other.unverified is not None
    assert handshake.admitted is None
    with pytest.raises(ValueError, match="another entry"):
        handshake.decide(verify(worker(0).policy, other.unverified))
    handshake = in_state(role, State.VERIFY)
    assert handshake.decide(refusal) == [Refuse(Reason.PROOF, "no")]
    assert handshake.state is State.REFUSED
    with pytest.raises(ProtocolError, match="a verdict"):
        handshake.decide(refusal)


def test_a_handshake_begins_once_and_with_its_own_key() -> None:
    child, parent = worker(1), worker(0)
    own, _ = channels(child, parent)
    handshake = child.handshake(Role.CHILD)
    with pytest.raises(ProtocolError, match="own TLS key"):
        handshake.begin(TlsValues(bytes(32), own.peer_key_digest, own.exporter))
    handshake.begin(own)
    with pytest.raises(ProtocolError, match="starts once"):
        handshake.begin(own)
