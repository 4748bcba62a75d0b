"""What the host of the store keeps: the rounds, and the store of the newest one. Without I/O and without a clock.

All of it is soft: a host that starts anew begins with a new incarnation, and agents that dial it again rebuild the rest.
"""

from __future__ import annotations

from collections.abc import Callable

from ringfence.admission.entry import WORLD_LIMIT
from ringfence.errors import ProtocolError
from ringfence.launch.messages import (
    STORE_OPERATIONS,
    AgentCall,
    Answer,
    CallResult,
    Notice,
    Operation,
    from_json,
    number_of,
    refused,
    text_of,
)
from ringfence.launch.rounds import RoundLimits, Rounds
from ringfence.launch.values import RoundStore, Values

AGENT_ID_BYTES = 64

Outgoing = tuple[int, Answer | Notice]  # to which client


class StoreState:
    """Rounds and values. Each method returns what to send to which client."""

    def __init__(
        self,
        incarnation: str,
        limits: RoundLimits,
        new_values: Callable[[], Values],
        node_0: int | None = None,
    ) -> None:
        """`node_0`: the client that is node 0, for as long as this state exists; None: any may be."""
        self._node_0 = node_0
        self.rounds = Rounds(incarnation, limits)
        self._new_values = new_values
        self._generation = ""
        self._store: RoundStore | None = None
        self._told = self.rounds.notice

    def call(self, client: int, call: AgentCall, now: float) -> list[Outgoing]:
        """Carry out a call of an admitted agent. Raises ProtocolError if it is malformed."""
        if call.operation in STORE_OPERATIONS:
            is_current = call.scope == self.rounds.generation and self.rounds.is_open
            if self._store is None or not is_current or not self.rounds.is_member(client):
                return [(client, Answer(call.number, CallResult.ENDED))]
            return [*self._store.call(client, call, now)]
        answer: Answer | None = Answer(call.number, CallResult.OK)
        outgoing: list[Outgoing] = []
        match call.operation:
            case Operation.ATTACH:
                answer, outgoing = self._attach(client, call)
            case Operation.JOIN:
                answer = self.rounds.join(client, call.number, now + call.milliseconds / 1000, _text(call))
            case Operation.DONE:
                self.rounds.done(client)
            case Operation.LEAVE:
                self.rounds.leave(client)
            case Operation.CLOSE:
                self.rounds.leave(client, _text(call, 1) or "an agent has failed", _text(call))
            case _:
                raise ProtocolError(f"the host does not answer {call.operation.name}")
        if answer is not None:
            outgoing.append((client, answer))
        return outgoing + self.tick(now)

    def _attach(self, client: int, call: AgentCall) -> tuple[Answer, list[Outgoing]]:
        if len(call.parts) != 1:
            raise ProtocolError("an attachment has one part")
        found = from_json(call.parts[0])
        rank = None if found.get("rank") is None else number_of(found, "rank", WORLD_LIMIT)
        if rank == 0 and self._node_0 not in (None, client):
            return refused(call.number, "node 0 is the host of the store: give other nodes other ranks"), []
        problem, replaced = self.rounds.attach(client, text_of(found, "agent", AGENT_ID_BYTES), rank)
        if problem:
            return refused(call.number, problem), []
        notices: list[Outgoing] = (
            [] if replaced is None else [(replaced, Notice(self.rounds.generation, replaced=True))]
        )
        # an agent that comes back learns whether its round is still the newest one
        notices.append((client, self.rounds.notice))
        return Answer(call.number, CallResult.OK), notices

    def disconnect(self, client: int, now: float, reason: str = "", *, lost: bool = False) -> list[Outgoing]:
        """Forget a connection that was closed. `lost`: its agent is not expected back."""
        if self._store is not None:
            self._store.disconnect(client)
        self.rounds.disconnect(client, now, reason, lost=lost)
        return self.tick(now)

    def close(self, reason: str, now: float) -> list[Outgoing]:
        """End the run if no round has formed yet: a node of it cannot take part. Later, such a node is only refused."""
        self.rounds.close_unformed(reason)
        return self.tick(now)

    def tick(self, now: float) -> list[Outgoing]:
        """Do what is due, and tell the members of the round what has changed for them."""
        outgoing: list[Outgoing] = [*self.rounds.tick(now)]
        if self._store is not None:
            outgoing += self._store.expire(now)
            if not self.rounds.is_open or self._generation != self.rounds.generation:
                outgoing += self._store.end()
                self._store = None
        if self.rounds.is_open and self._store is None:
            self._store, self._generation = RoundStore(self._new_values()), self.rounds.generation
        notice = self.rounds.notice
        if notice != self._told:  # before the answers: an agent that joins a round must not find it in an older notice
            self._told = notice
            outgoing = [*((client, notice) for client in self.rounds.members()), *outgoing]
            outgoing.sort(key=lambda each: each[0])  # stable: what one client gets stays in order, and together
        return outgoing

    def next_at(self) -> float:
        """Return when `tick` has something to do."""
        return min(self.rounds.next_at(), float("inf") if self._store is None else self._store.next_at())


def _text(call: AgentCall, part: int = 0) -> str:
    return call.parts[part].decode("ascii", "replace") if part < len(call.parts) else ""
