"""Which agents form which round, with a clock that the test moves."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ringfence.errors import ProtocolError
from ringfence.launch.messages import AgentCall, Answer, CallResult, Notice, Operation, to_json
from ringfence.launch.rounds import RoundLimits
from ringfence.launch.store_state import StoreState

LIMITS = RoundLimits(min_nodes=2, max_nodes=3, last_call=10.0, lost_after=30.0)


class Nodes:
    """Agents of a `StoreState`, by names, and what they were told."""

    def __init__(self, limits: RoundLimits = LIMITS) -> None:
        self.state = StoreState("incarnation", limits, dist.HashStore)
        self.now = 0.0
        self.answers: dict[int, dict[int, Answer]] = defaultdict(dict)
        self.notices: dict[int, Notice] = {}
        self.clients: dict[str, int] = {}
        self._numbers = 0

    def call(
        self, name: str, operation: Operation, *parts: bytes, scope: str = "", seconds: float = 600.0
    ) -> tuple[int, int]:
        self._numbers += 1
        client = self.clients[name]
        call = AgentCall(self._numbers, operation, scope, round(seconds * 1000), parts)
        self._take(self.state.call(client, call, self.now))
        return client, self._numbers

    def admit(self, name: str) -> None:
        """A connection of an agent on another node, as the host admits it; without it, it is that of the host's own agent."""
        self.clients[name] = len(self.clients) + 1 + self._numbers * 1000
        self.state.rounds.admit(self.clients[name])

    def attach(self, name: str, rank: int | None = None, agent: str | None = None, *, admitted: bool = False) -> Answer:
        if not admitted:
            self.clients[name] = len(self.clients) + 1 + self._numbers * 1000
        found = {"agent": agent or name, "rank": rank}
        return self.answer(self.call(name, Operation.ATTACH, to_json(found)))

    def join(self, name: str, seconds: float = 600.0) -> tuple[int, int]:
        return self.call(name, Operation.JOIN, seconds=seconds)

    def disconnect(self, name: str) -> None:
        self._take(self.state.disconnect(self.clients[name], self.now))

    def wait(self, seconds: float) -> None:
        """Let time pass, as the host does: it wakes at the moments that the state names."""
        end = self.now + seconds
        while self.state.next_at() <= end:
            self.now = max(self.now, self.state.next_at())
            self._take(self.state.tick(self.now))
        self.now = end

    def answer(self, call: tuple[int, int]) -> Answer:
        client, number = call
        return self.answers[client][number]

    def has_answer(self, call: tuple[int, int]) -> bool:
        return call[1] in self.answers[call[0]]

    def place(self, call: tuple[int, int]) -> tuple[str, int, int]:
        """Generation, rank and number of nodes of an answered join."""
        answer = self.answer(call)
        assert answer.result is CallResult.OK, answer
        found = json.loads(answer.parts[0])
        return found["generation"], found["rank"], found["nodes"]

    def _take(self, outgoing: list[tuple[int, Answer | Notice]]) -> None:
        for client, message in outgoing:
            if isinstance(message, Notice):
                self.notices[client] = message
            else:
                assert message.number not in self.answers[client], "answered twice"
                self.answers[client][message.number] = message


def formed(limits: RoundLimits = LIMITS, count: int = 3) -> Nodes:
    nodes = Nodes(limits)
    names = [f"node{rank}" for rank in range(count)]
    for rank, name in enumerate(names):
        assert nodes.attach(name, rank).result is CallResult.OK
    calls = [nodes.join(name) for name in names]
    assert [nodes.place(call) for call in calls] == [("incarnation.1", rank, count) for rank in range(count)]
    return nodes


def test_a_round_forms_when_all_nodes_wait() -> None:
    formed()


def test_ranks_stay_as_given_whatever_the_order_of_arrival() -> None:
    nodes = Nodes()
    for rank in (2, 0, 1):
        nodes.attach(f"node{rank}", rank)
    calls = {rank: nodes.join(f"node{rank}") for rank in (1, 2, 0)}
    assert {rank: nodes.place(call)[1] for rank, call in calls.items()} == {0: 0, 1: 1, 2: 2}


def test_a_smaller_round_forms_after_the_last_call() -> None:
    nodes = Nodes()
    for rank in (0, 2):
        nodes.attach(f"node{rank}", rank)
    one, two = nodes.join("node0"), nodes.join("node2")
    nodes.wait(LIMITS.last_call - 1)
    assert not nodes.has_answer(one)
    nodes.wait(2)
    assert nodes.place(one) == ("incarnation.1", 0, 2)
    assert nodes.place(two) == ("incarnation.1", 1, 2)


def test_too_few_nodes_time_out() -> None:
    nodes = Nodes()
    nodes.attach("node0", 0)
    call = nodes.join("node0", seconds=50)
    nodes.wait(49)
    assert not nodes.has_answer(call)
    nodes.wait(2)
    assert nodes.answer(call).result is CallResult.TIMEOUT


def test_a_member_that_joins_again_ends_the_round_for_all() -> None:
    nodes = formed()
    nodes.join("node1")
    assert all(nodes.notices[nodes.clients[name]].ended for name in ("node0", "node2"))
    nodes.join("node0")
    last = nodes.join("node2")
    assert nodes.place(last) == ("incarnation.2", 2, 3)


def test_a_closed_connection_alone_ends_nothing_until_the_agent_is_lost() -> None:
    nodes = formed()
    nodes.disconnect("node1")
    nodes.wait(LIMITS.lost_after - 1)
    assert not nodes.notices[nodes.clients["node0"]].ended
    nodes.wait(2)
    assert nodes.notices[nodes.clients["node0"]].ended


def test_an_agent_that_comes_back_in_time_stays_a_member() -> None:
    nodes = formed()
    nodes.disconnect("node1")
    nodes.wait(LIMITS.lost_after - 1)
    nodes.attach("node1 again", 1, agent="node1")
    nodes.wait(LIMITS.lost_after)
    assert not nodes.notices[nodes.clients["node0"]].ended
    assert nodes.notices[nodes.clients["node1 again"]].generation == "incarnation.1"


def test_a_new_agent_takes_the_place_of_its_node() -> None:
    """A scheduler starts a node anew, possibly before the host has noticed that the old one is gone."""
    nodes = formed()
    nodes.attach("new", 1)
    assert nodes.notices[nodes.clients["node1"]].replaced
    assert nodes.notices[nodes.clients["node0"]].ended
    calls = [nodes.join(name) for name in ("new", "node0", "node2")]
    assert [nodes.place(call)[1] for call in calls] == [1, 0, 2]


def test_agents_without_a_rank_are_numbered_and_make_way_for_given_ranks() -> None:
    nodes = Nodes()
    nodes.attach("any")
    nodes.attach("zero", 0)
    nodes.attach("other")
    calls = {name: nodes.join(name) for name in ("any", "zero", "other")}
    places = {name: nodes.place(call)[1] for name, call in calls.items()}
    assert places["zero"] == 0
    assert set(places.values()) == {0, 1, 2}


def test_a_rank_beyond_the_largest_number_of_nodes_is_refused() -> None:
    nodes = Nodes()
    answer = nodes.attach("node3", 3)
    assert answer.result is CallResult.REFUSED
    assert "3" in answer.text


def test_no_other_agent_becomes_node_0() -> None:
    """The host is node 0 for as long as it lives: an agent that was given its rank by mistake must not end the run."""
    nodes = Nodes()
    nodes.state = StoreState("incarnation", LIMITS, dist.HashStore, node_0=0)
    nodes.state.rounds.attach(0, "host", 0)
    answer = nodes.attach("other", 0)
    assert (answer.result, "other ranks" in answer.text) == (CallResult.REFUSED, True)


def test_nodes_that_wait_are_told_only_where_there_is_room() -> None:
    nodes = Nodes()
    for name in ("a", "b"):
        nodes.attach(name)
        nodes.join(name)
    nodes.wait(11)
    nodes.attach("c")
    call = nodes.join("c")
    assert nodes.notices[nodes.clients["a"]].waiting
    again = [nodes.join("a"), nodes.join("b")]
    assert [nodes.place(each)[2] for each in (call, *again)] == [3, 3, 3]
    nodes.attach("d")
    nodes.join("d")
    assert not nodes.notices[nodes.clients["a"]].waiting


def test_a_spare_waits_for_the_members_of_a_round_that_ends() -> None:
    nodes = formed()
    nodes.attach("spare")
    spare = nodes.join("spare")
    calls = [nodes.join(f"node{rank}") for rank in range(3)]
    assert [nodes.place(call)[1] for call in calls] == [0, 1, 2]
    assert not nodes.has_answer(spare)


def connected_again(world: Nodes, name: str, rank: int) -> None:
    """The host drops the connections that it was told to, and this agent connects again."""
    assert world.state.rounds.take_stale() == [world.clients[name]]
    world.disconnect(name)
    world.admit(name)
    world.attach(name, rank, admitted=True)


def test_an_agent_is_verified_again_for_each_round() -> None:
    world = Nodes(RoundLimits(2, 2))
    world.attach("host", 0)
    world.admit("node")
    world.attach("node", 1, admitted=True)
    joins = [world.join("host"), world.join("node")]
    assert [world.place(each)[0] for each in joins] == ["incarnation.1"] * 2
    for number in (2, 3):
        joins = [world.join("host"), world.join("node")]
        assert not any(map(world.has_answer, joins)), "the connection is that of the round before"
        connected_again(world, "node", 1)
        joins = [joins[0], world.join("node")]
        assert [world.place(each)[0] for each in joins] == [f"incarnation.{number}"] * 2
        assert not world.state.rounds.take_stale()


def test_a_spare_that_has_waited_is_verified_again_too() -> None:
    world = Nodes(RoundLimits(1, 1))
    world.attach("host", 0)
    world.join("host")
    for name in ("spare", "other"):
        world.admit(name)
        world.attach(name, admitted=True)
        world.join(name)
    assert not world.state.rounds.take_stale()
    again = world.join("host")
    assert world.has_answer(again), "the host's own agent needs no proof"
    assert sorted(world.state.rounds.take_stale()) == sorted([world.clients["spare"], world.clients["other"]])


def test_an_agent_that_missed_a_round_is_disconnected_and_reaches_no_store() -> None:
    """It may have been revoked since it was verified. Silent, it would otherwise read and end later rounds."""
    world = Nodes(RoundLimits(2, 3, last_call=1.0))
    world.attach("host", 0)
    for name, rank in (("node", 1), ("silent", 2)):
        world.admit(name)
        world.attach(name, rank, admitted=True)
    for name in ("host", "node", "silent"):
        world.join(name)
    world.join("host")
    world.join("node")
    connected_again(world, "node", 1)
    world.join("node")
    world.wait(10.0)
    assert world.state.rounds.generation == "incarnation.2"
    read = world.call("silent", Operation.GET, b"key", scope="incarnation.2")
    assert world.answer(read).result is CallResult.ENDED
    assert world.state.rounds.take_stale() == [world.clients["silent"]]
    assert (
        world.answer(world.call("node", Operation.SET, b"key", b"value", scope="incarnation.2")).result is CallResult.OK
    )


def test_a_connection_attaches_once() -> None:
    world = Nodes()
    world.attach("node")
    assert world.attach("node", agent="another", admitted=True).text == "this connection is attached already"


def test_a_round_looks_at_each_of_its_agents_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the host's time would grow with the square of the number of nodes."""
    world = Nodes(RoundLimits(300, 300))
    looked = []

    class Admissions(dict[int, int]):
        def get(self, client: int, default: int) -> int:  # type: ignore[override]
            looked.append(client)
            return super().get(client, default)

    monkeypatch.setattr(world.state.rounds, "_admitted", Admissions())
    for number in range(300):
        world.admit(f"node{number}")
        world.attach(f"node{number}", number, admitted=True)
    joins = [world.join(f"node{number}") for number in range(300)]
    assert [world.place(each)[1] for each in joins] == list(range(300))
    assert sorted(looked) == sorted(world.clients.values())


def test_an_older_connection_that_attaches_later_counts_as_old() -> None:
    world = Nodes(RoundLimits(2, 2))
    world.admit("node")
    world.attach("host", 0)
    world.attach("early", 1)
    world.join("host")
    world.join("early")
    world.join("early")  # ends the round
    world.attach("node", 1, admitted=True)
    world.join("node")
    assert world.clients["node"] in world.state.rounds.take_stale()


def test_a_member_that_is_verified_again_keeps_its_place_before_a_spare() -> None:
    """Until it is lost, the round waits for it."""
    world = Nodes(RoundLimits(2, 2))
    world.attach("host", 0)
    for name, rank in (("node", 1), ("spare", 2)):
        world.admit(name)
        world.attach(name, None if rank == 2 else rank, admitted=True)
    first = [world.join("host"), world.join("node")]
    world.join("spare")
    assert [world.place(each)[1] for each in first] == [0, 1]
    again = world.join("host")
    assert world.state.rounds.take_stale() == [world.clients["spare"]]
    world.join("node")
    assert world.state.rounds.take_stale() == [world.clients["node"]]
    for name in ("node", "spare"):
        world.disconnect(name)
    world.admit("spare")
    world.attach("spare", admitted=True)
    world.join("spare")
    assert not world.has_answer(again)
    world.admit("node")
    world.attach("node", 1, admitted=True)
    assert [world.place(each)[1:] for each in (again, world.join("node"))] == [(0, 2), (1, 2)]


def test_the_run_is_finished_when_all_members_are_done() -> None:
    nodes = formed()
    for name in ("node0", "node1"):
        nodes.call(name, Operation.DONE)
    assert not nodes.notices[nodes.clients["node0"]].finished
    nodes.call("node2", Operation.DONE)
    assert nodes.notices[nodes.clients["node0"]].finished
    nodes.call("node1", Operation.LEAVE)
    assert not nodes.notices[nodes.clients["node0"]].ended
    nodes.attach("late", 1)
    late = nodes.answer(nodes.join("late"))
    assert (late.result, late.text) == (CallResult.CLOSED, "")


def test_a_node_lost_after_its_success_starts_all_again() -> None:
    nodes = formed()
    nodes.call("node1", Operation.DONE)
    nodes.attach("new", 1)
    assert nodes.notices[nodes.clients["node0"]].ended
    nodes.call("node0", Operation.DONE)
    assert not nodes.notices[nodes.clients["node0"]].finished


def test_an_agent_that_failed_for_good_closes_the_run() -> None:
    nodes = formed()
    waiting = nodes.join("node0")
    nodes.call("node1", Operation.CLOSE, b"rank 3 ended with SIGKILL", b"the workers of node 1 failed for good")
    assert nodes.notices[nodes.clients["node0"]].cause == "rank 3 ended with SIGKILL"
    assert nodes.answer(waiting).result is CallResult.CLOSED
    later = nodes.answer(nodes.join("node2"))
    assert (later.result, later.text) == (CallResult.CLOSED, "the workers of node 1 failed for good")


def test_the_first_cause_that_an_agent_names_reaches_all_until_the_next_round() -> None:
    nodes = formed()
    nodes.join("node0")  # its workers have failed because another's did
    assert nodes.notices[nodes.clients["node1"]].cause == ""
    nodes.call("node2", Operation.JOIN, b"rank 5 ended with SIGSEGV\n")
    assert nodes.notices[nodes.clients["node1"]].cause == "rank 5 ended with SIGSEGV\\n"
    nodes.call("node1", Operation.JOIN, b"rank 2 ended with exit code 1")
    assert nodes.notices[nodes.clients["node0"]].cause == "", "the next round has formed"


def test_a_node_that_was_silent_for_too_long_is_given_up_by_name(caplog: pytest.LogCaptureFixture) -> None:
    nodes = formed()
    nodes._take(nodes.state.disconnect(nodes.clients["node2"], nodes.now, "10.0.0.2: no answer for 300 s", lost=True))
    assert nodes.notices[nodes.clients["node0"]].ended
    assert caplog.messages == ["node 2 is given up: 10.0.0.2: no answer for 300 s"]


def test_the_host_stays_until_others_have_left_or_are_lost() -> None:
    nodes = formed()
    rounds = nodes.state.rounds
    for name in ("node0", "node1", "node2"):
        nodes.call(name, Operation.DONE)
    nodes.call("node1", Operation.LEAVE)
    nodes.disconnect("node2")
    assert not rounds.is_left
    nodes.wait(LIMITS.lost_after + 1)
    assert rounds.is_left


# -- the store of a round ---------------------------------------------------------------------------------------------


def test_the_store_belongs_to_one_round() -> None:
    nodes = formed()
    first = "incarnation.1"
    nodes.call("node0", Operation.SET, b"key", b"value", scope=first)
    assert nodes.answer(nodes.call("node1", Operation.GET, b"key", scope=first)).parts == (b"value",)
    waits = nodes.call("node2", Operation.GET, b"missing", scope=first)
    nodes.join("node1")
    assert nodes.answer(waits).result is CallResult.ENDED, "a wait ends with its round"
    assert nodes.answer(nodes.call("node0", Operation.CHECK, b"key", scope=first)).result is CallResult.ENDED
    nodes.join("node0")
    nodes.join("node2")
    assert nodes.answer(nodes.call("node0", Operation.CHECK, b"key", scope="incarnation.2")).parts == (b"0",)
    assert nodes.answer(nodes.call("node0", Operation.CHECK, b"key", scope=first)).result is CallResult.ENDED


def test_waits_end_with_the_last_of_their_keys_or_with_their_time() -> None:
    nodes = formed()
    scope = "incarnation.1"
    both = nodes.call("node0", Operation.GET, b"a", b"b", scope=scope)
    late = nodes.call("node1", Operation.WAIT, b"c", scope=scope, seconds=5)
    nodes.call("node2", Operation.SET, b"a", b"1", scope=scope)
    assert not nodes.has_answer(both)
    nodes.call("node2", Operation.ADD, b"b", b"2", scope=scope)
    assert nodes.answer(both).parts == (b"1", b"2")
    nodes.wait(6)
    assert nodes.answer(late).result is CallResult.TIMEOUT


@pytest.mark.parametrize(
    ("operation", "parts"),
    [
        (Operation.SET, (b"key",)),
        (Operation.ADD, (b"text", b"1")),
        (Operation.ADD, (b"key", b"one")),
        (Operation.COMPARE_SET, (b"key",)),
        (Operation.APPEND, (b"key",)),
        (Operation.COUNT, (b"key",)),
        (Operation.GET, (b"\xff",)),
    ],
)
def test_a_call_that_is_not_possible_is_refused_and_changes_nothing(
    operation: Operation, parts: tuple[bytes, ...]
) -> None:
    nodes = formed()
    nodes.call("node0", Operation.SET, b"text", b"text", scope="incarnation.1")
    assert nodes.answer(nodes.call("node0", operation, *parts, scope="incarnation.1")).result is CallResult.REFUSED
    assert nodes.answer(nodes.call("node0", Operation.COUNT, scope="incarnation.1")).parts == (b"1",)


@pytest.mark.parametrize(
    "parts", [(), (b"",), (b"[]",), (to_json({"agent": 1}),), (to_json({"agent": "a", "rank": -1}),), (b"{}", b"{}")]
)
def test_a_malformed_attachment_is_a_protocol_error(parts: tuple[bytes, ...]) -> None:
    nodes = Nodes()
    nodes.clients["x"] = 1
    with pytest.raises(ProtocolError):
        nodes.call("x", Operation.ATTACH, *parts)


def test_an_agent_that_has_not_attached_cannot_join() -> None:
    nodes = Nodes()
    nodes.clients["x"] = 1
    assert nodes.answer(nodes.join("x")).result is CallResult.REFUSED


# -- any order of events ----------------------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Agents attach, join, succeed, leave and vanish in any order; rounds stay consistent, and every wait ends."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = Nodes()
        self.joins: list[tuple[int, tuple[int, int], int]] = []  # the agent's rank, its call, when it was made
        self.gone: set[int] = set()  # clients that are disconnected
        self.seen: dict[str, int] = {}

    @rule(rank=st.integers(0, 2), fresh=st.booleans())
    def attach(self, rank: int, fresh: bool) -> None:
        name = f"node{rank}"
        old = self.nodes.clients.get(name)
        agent = f"{name}-{len(self.joins)}-{self.nodes.now}" if fresh else name
        self.nodes.attach(name, rank, agent=agent)
        if old is not None:
            self.gone.add(old)

    @rule(rank=st.integers(0, 2))
    def join(self, rank: int) -> None:
        name = f"node{rank}"
        if self.nodes.clients.get(name) not in (None, *self.gone) and not self._waits(name):
            self.joins.append((rank, self.nodes.join(name, seconds=100), int(self.nodes.now)))

    @rule(rank=st.integers(0, 2), operation=st.sampled_from((Operation.DONE, Operation.LEAVE)))
    def end(self, rank: int, operation: Operation) -> None:
        name = f"node{rank}"
        if self.nodes.clients.get(name) not in (None, *self.gone) and not self._waits(name):
            self.nodes.call(name, operation)
            if operation is Operation.LEAVE:
                self.disconnect(rank)

    @rule(rank=st.integers(0, 2))
    def disconnect(self, rank: int) -> None:
        name = f"node{rank}"
        if name in self.nodes.clients:
            self.nodes.disconnect(name)
            self.gone.add(self.nodes.clients[name])

    @rule(seconds=st.sampled_from((1.0, 11.0, 31.0)))
    def wait(self, seconds: float) -> None:
        self.nodes.wait(seconds)

    def _waits(self, name: str) -> bool:
        client = self.nodes.clients[name]
        return any(call[0] == client and not self.nodes.has_answer(call) for _, call, _ in self.joins)

    @invariant()
    def rounds_are_consistent(self) -> None:
        by_round: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for rank, call, _ in self.joins:
            if self.nodes.has_answer(call) and self.nodes.answer(call).result is CallResult.OK:
                generation, place, count = self.nodes.place(call)
                by_round[generation].append((rank, place, count))
        for members in by_round.values():
            counts = {count for _, _, count in members}
            assert len(counts) == 1
            assert LIMITS.min_nodes <= counts.pop() <= LIMITS.max_nodes
            places = [place for _, place, _ in sorted(members)]
            assert places == sorted(set(places)), "ranks follow the given ones, each once"

    def teardown(self) -> None:
        self.nodes.wait(1000)
        for _, call, _ in self.joins:
            assert self.nodes.has_answer(call) or call[0] in self.gone


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_any_order_of_events_keeps_rounds_consistent = AnyOrder.TestCase
