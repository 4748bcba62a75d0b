"""Which agents form which round. Without I/O: the host passes its own clock, so that no agent's clock matters.

A round is one start of the workers on all nodes; its generation is the host's random incarnation and the round's number.
It ends for all as soon as one member joins again, leaves, or is lost. An agent is lost if its connection has been closed for
`lost_after` seconds; until then it may come back. A closed connection alone ends nothing: if the machine is down, workers on
other machines raise, and their agents join again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ringfence import keys
from ringfence.admission import encoding
from ringfence.launch.messages import Answer, Notice, Result, refused, to_json

_NEVER: Final = float("inf")


@dataclass(frozen=True)
class RoundLimits:
    """How many nodes form a round, and the host's times in seconds."""

    min_nodes: int
    max_nodes: int
    last_call: float = keys.LAST_CALL_SECONDS  # once `min_nodes` wait, until a round forms without the others
    lost_after: float = keys.AGENT_LOST_SECONDS


@dataclass
class Member:
    """One agent. `client` is its connection, None while it has none."""

    agent: str  #          random, drawn by the agent
    rank: int  #           of its node: given, or in the order of arrival
    given: bool
    client: int | None
    lost_at: float = _NEVER
    joins: int | None = None  # the number of its call that waits for the next round
    joins_until: float = _NEVER
    round: int = 0  #      that it is in
    done: bool = False
    left: bool = False


class Rounds:
    """The agents, and the round that they are in. Methods return the answers to send: pairs of client and answer."""

    def __init__(self, incarnation: str, limits: RoundLimits) -> None:
        self.limits = limits
        self._incarnation = incarnation
        self._number = 0
        self._ended = True  # there is no round yet
        self._finished = False
        self._closed = ""
        self._members: dict[str, Member] = {}
        self._by_client: dict[int, Member] = {}
        self._call_at: float | None = None  # since when enough nodes wait

    @property
    def generation(self) -> str:
        return f"{self._incarnation}.{self._number}"

    @property
    def is_open(self) -> bool:
        """Whether the store of the newest round may be used."""
        return self._number > 0 and not self._ended

    @property
    def notice(self) -> Notice:
        return Notice(
            generation=self.generation,
            ended=self._ended,
            waiting=self._has_room and any(each.joins is not None for each in self._members.values()),
            finished=self._finished,
            closed=self._closed,
        )

    def members(self) -> list[int]:
        """Return the clients of the newest round."""
        return [
            each.client for each in self._members.values() if each.round == self._number > 0 and each.client is not None
        ]

    @property
    def is_left(self) -> bool:
        """Whether every agent but the host's own, the first one, has left or is lost."""
        return all(each.left for each in list(self._members.values())[1:])

    # -- what agents do ---------------------------------------------------------------------------------------------

    def attach(self, client: int, agent: str, rank: int | None) -> tuple[str, int | None]:
        """Add an agent, or reconnect it. Returns why it is refused, or "", and the client that it replaces, if any."""
        member, replaced = self._members.get(agent), None
        if member is None:
            if rank is not None and rank >= self.limits.max_nodes:
                return f"node rank {rank} is not below {self.limits.max_nodes}, the largest number of nodes", None
            if rank is not None:
                replaced = self._make_way(rank)
            member = Member(agent, self._free_rank() if rank is None else rank, rank is not None, client)
            self._members[agent] = member
        elif member.client is not None:
            del self._by_client[member.client]
            replaced = member.client
        member.client, member.lost_at = client, _NEVER
        self._by_client[client] = member
        return "", replaced

    def join(self, client: int, number: int, until: float) -> Answer | None:
        """Let an agent wait for the next round. Returns an answer if it need not wait."""
        member = self._by_client.get(client)
        if member is None:
            return refused(number, "attach first")
        if self._finished:
            return Answer(number, Result.CLOSED)
        if self._closed:
            return Answer(number, Result.CLOSED, (self._closed.encode(),))
        if member.round == self._number:
            self._ended = True
        member.joins, member.joins_until, member.done = number, until, False
        return None

    def done(self, client: int) -> None:
        """The workers of an agent have succeeded."""
        member = self._by_client.get(client)
        if member is not None and member.round == self._number and not self._ended:
            member.done = True
            current = [each for each in self._members.values() if each.round == self._number]
            self._finished = all(each.done for each in current)

    def leave(self, client: int, closed: str = "") -> None:
        """An agent ends; with a reason, no further round forms."""
        member = self._by_client.get(client)
        if closed and not self._finished:
            self._closed = encoding.escape(closed, keys.REFUSAL_TEXT_BYTES)
        if member is not None:
            self._remove(member)

    def disconnect(self, client: int, now: float) -> None:
        """The connection of an agent is closed."""
        member = self._by_client.pop(client, None)
        if member is not None:
            member.client, member.joins = None, None
            member.lost_at = now + self.limits.lost_after
            if member.left:
                del self._members[member.agent]

    # -- time -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[tuple[int, Answer]]:
        """Remove lost agents, end waits, and form a round if it can be formed."""
        for member in [each for each in self._members.values() if each.lost_at <= now]:
            self._remove(member)
        answers: list[tuple[int, Answer]] = []
        for member in self._joining():
            assert member.client is not None
            assert member.joins is not None
            if self._closed:
                answers.append((member.client, Answer(member.joins, Result.CLOSED, (self._closed.encode(),))))
            elif self._finished:
                answers.append((member.client, Answer(member.joins, Result.CLOSED)))
            elif member.joins_until <= now:
                answers.append((member.client, Answer(member.joins, Result.TIMEOUT)))
            else:
                continue
            member.joins = None
        return answers + self._form(now)

    def next_at(self) -> float:
        """Return when `tick` has something to do, unless an agent acts before."""
        moments = [_NEVER]
        for member in self._members.values():
            moments.append(member.lost_at)
            if member.joins is not None:
                moments.append(member.joins_until)
        if self._call_at is not None:
            moments.append(self._call_at + self.limits.last_call)
        return min(moments)

    def _form(self, now: float) -> list[tuple[int, Answer]]:
        joining = self._joining()
        if len(joining) < self.limits.min_nodes:
            self._call_at = None
            return []
        if self._call_at is None:
            self._call_at = now
        expected = any(
            each.round == self._number > 0 and each.joins is None and each.client is not None and not each.left
            for each in self._members.values()
        )
        complete = len(joining) >= self.limits.max_nodes and not expected
        if not complete and now < self._call_at + self.limits.last_call:
            return []
        return self._start(sorted(joining, key=lambda each: each.rank)[: self.limits.max_nodes])

    def _start(self, chosen: list[Member]) -> list[tuple[int, Answer]]:
        self._number += 1
        self._ended, self._call_at = False, None
        answers = []
        for place, member in enumerate(chosen):
            assert member.client is not None
            assert member.joins is not None
            found = to_json({"generation": self.generation, "rank": place, "nodes": len(chosen)})
            answers.append((member.client, Answer(member.joins, Result.OK, (found,))))
            member.round, member.joins, member.done = self._number, None, False
        return answers

    # -- parts ------------------------------------------------------------------------------------------------------

    @property
    def _has_room(self) -> bool:
        return self._ended or sum(each.round == self._number for each in self._members.values()) < self.limits.max_nodes

    def _joining(self) -> list[Member]:
        return [each for each in self._members.values() if each.joins is not None]

    def _remove(self, member: Member) -> None:
        """Remove an agent for good. One that has left stays listed until its connection is closed."""
        if member.round == self._number and not self._finished:
            self._ended = True
        member.left, member.joins = True, None
        if member.client is None:
            del self._members[member.agent]

    def _make_way(self, rank: int) -> int | None:
        """Free a rank for an agent to which it was given; return the client that loses its place."""
        older = next((each for each in self._members.values() if each.rank == rank and not each.left), None)
        if older is None:
            return None
        if not older.given:
            older.rank = self._free_rank(rank)
            return None
        client, older.client = older.client, None
        if client is not None:
            del self._by_client[client]
        self._remove(older)
        return client

    def _free_rank(self, besides: int = -1) -> int:
        taken = {each.rank for each in self._members.values() if not each.left} | {besides}
        return next(rank for rank in range(len(taken) + 1) if rank not in taken)
