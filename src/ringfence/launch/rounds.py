"""Which agents form which round. Without I/O: the host passes its own clock, so that no agent's clock matters.

A round is one start of the workers on all nodes; its generation is the host's random incarnation and the round's number.
It ends for all as soon as one member joins again, leaves, or is lost. An agent is lost if it has not answered for the outage
timeout, or if its connection has been closed for `lost_after` seconds; until then it may come back.

Every round has agents that were verified after the one before ended: an agent whose connection is older connects again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from ringfence import keys
from ringfence.admission import encoding
from ringfence.launch.messages import Answer, CallResult, Notice, refused, to_json

_log = logging.getLogger(__name__)

_NEVER: Final = float("inf")


@dataclass(frozen=True)
class RoundLimits:
    """How many nodes form a round, and the host's times in seconds."""

    min_nodes: int
    max_nodes: int
    last_call: float = keys.LAST_CALL_SECONDS  # once `min_nodes` wait, until a round forms without the others
    lost_after: float = keys.AGENT_LOST_SECONDS  # after its connection was closed, an agent is lost


@dataclass
class Member:
    """One agent. `client` is its connection, None while it has none."""

    agent: str  #     random, drawn by the agent
    rank: int  #      of its node: given, or in the order of arrival
    given: bool
    client: int | None
    lost_at: float = _NEVER
    lost_because: str = ""
    joins: int = 0  # the number of its call that waits for the next round, if it does
    joins_until: float = _NEVER
    left: bool = False
    reconnecting: bool = False  # its connection was closed because it has to be verified again


class Rounds:
    """The agents, and the round that they are in. Methods return the answers to send: pairs of client and answer."""

    def __init__(self, incarnation: str, limits: RoundLimits) -> None:
        self.limits = limits
        self._incarnation = incarnation
        self._number = 0
        self._ended = True  # there is no round yet
        self._cause = ""  # why it has ended
        self._finished = False
        self._closed = ""
        self._members: dict[str, Member] = {}
        self._by_client: dict[int, Member] = {}
        self._by_rank: dict[int, Member] = {}  # those that have not left
        self._current: dict[str, Member] = {}  # of the newest round
        self._undone: set[str] = set()  # members of it whose workers have not succeeded yet
        self._joins: dict[str, Member] = {}  # those that wait for the next round
        self._unchecked: list[Member] = []  # of them; when they were verified is still to be compared
        self._joins_until = _NEVER  # none of these waits ends before
        self._gone: dict[str, Member] = {}  # those without a connection
        self._call_at: float | None = None  # since when enough nodes wait
        self._ends = 0  # rounds that have ended
        # How many had, when a client was verified. The host's own agent is not listed.
        self._admitted: dict[int, int] = {}
        self._stale: list[int] = []  # clients that have to be verified again, to be disconnected

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
            waiting=bool(self._joins) and (self._ended or len(self._current) < self.limits.max_nodes),
            finished=self._finished,
            closed=self._closed,
            cause=self._cause,
        )

    def members(self) -> list[int]:
        """Return the clients of the newest round."""
        return [each.client for each in self._current.values() if each.client is not None]

    def is_member(self, client: int) -> bool:
        """Return whether a client is an agent of the newest round."""
        member = self._by_client.get(client)
        return member is not None and self._current.get(member.agent) is member

    def rank_of(self, client: int) -> int | None:
        """Return the rank of a client's node, once it has attached."""
        member = self._by_client.get(client)
        return None if member is None else member.rank

    @property
    def is_left(self) -> bool:
        """Whether every agent but the host's own, the first one, has left or is lost."""
        return all(each.left for each in list(self._members.values())[1:])

    # -- what agents do ---------------------------------------------------------------------------------------------

    def admit(self, client: int) -> None:
        """An agent was verified on a new connection."""
        self._admitted[client] = self._ends

    def attach(self, client: int, agent: str, rank: int | None) -> tuple[str, int | None]:
        """Add an agent, or reconnect it. Returns why it is refused, or "", and the client that it replaces, if any."""
        if client in self._by_client:
            return "this connection is attached already", None
        member, replaced = self._members.get(agent), None
        if member is None:
            if rank is not None and rank >= self.limits.max_nodes:
                return f"node rank {rank} is not below {self.limits.max_nodes}, the largest number of nodes", None
            if rank is not None:
                replaced = self._make_way(rank)
            member = Member(agent, self._free_rank() if rank is None else rank, rank is not None, client)
            self._members[agent] = self._by_rank[member.rank] = member
        elif member.client is not None:
            del self._by_client[member.client]
            replaced = member.client
        member.client, member.lost_at, member.reconnecting = client, _NEVER, False
        self._gone.pop(agent, None)
        self._by_client[client] = member
        return "", replaced

    def join(self, client: int, number: int, until: float, cause: str = "") -> Answer | None:
        """Let an agent wait for the next round. `cause`: what failed on its node. Returns an answer if it need not wait."""
        member = self._by_client.get(client)
        if member is None:
            return refused(number, "attach first")
        if member.left or member.agent in self._joins:
            return refused(number, "this agent has left, or waits already")
        if self._finished or self._closed:
            return self._closing(number)
        if member.agent in self._current:
            self._end()
            self._cause = self._cause or _text(cause)
        member.joins, member.joins_until = number, until
        self._joins[member.agent] = member
        self._unchecked.append(member)
        self._joins_until = min(self._joins_until, until)
        return None

    def done(self, client: int) -> None:
        """The workers of an agent have succeeded."""
        member = self._by_client.get(client)
        if member is not None and not self._ended:
            self._undone.discard(member.agent)
            self._finished = not self._undone

    def leave(self, client: int, closed: str = "", cause: str = "") -> None:
        """An agent ends; with a reason, no further round forms. `cause`: what failed on its node."""
        member = self._by_client.get(client)
        if closed and not self._finished:
            self._closed = self._closed or _text(closed)
            self._cause = self._cause or _text(cause)
        if member is not None:
            self._remove(member)

    def close_unformed(self, reason: str) -> None:
        """Let no round form, if none has."""
        if not self._number:
            self._closed = self._closed or _text(reason)

    def disconnect(self, client: int, now: float, reason: str = "", *, lost: bool = False) -> None:
        """The connection of an agent is closed. `lost`: it was silent for so long that it is not expected back."""
        self._admitted.pop(client, None)
        member = self._by_client.pop(client, None)
        if member is not None:
            patience = 0.0 if lost else self.limits.lost_after
            member.client, member.lost_at, member.lost_because = None, now + patience, reason
            self._joins.pop(member.agent, None)
            self._gone[member.agent] = member
            if member.left:
                self._delete(member)

    # -- time -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[tuple[int, Answer]]:
        """Remove lost agents, end waits, and form a round if it can be formed."""
        for member in [each for each in self._gone.values() if each.lost_at <= now]:
            if not self._finished:
                _log.warning("node %d is given up: %s", member.rank, member.lost_because or "its agent is gone")
            self._remove(member)
        answers = self._end_waits(now)
        self._find_stale()
        return answers + self._form(now)

    def take_stale(self) -> list[int]:
        """Return the clients to disconnect: verified before the last round ended, they wait for the next or missed it."""
        found, self._stale = list(dict.fromkeys(self._stale)), []
        return found

    def _find_stale(self) -> None:
        unchecked, self._unchecked = self._unchecked, []
        for member in unchecked:
            if self._joins.get(member.agent) is not member:
                continue
            if member.client is not None and self._admitted.get(member.client, self._ends) < self._ends:
                self._stale.append(member.client)
                del self._joins[member.agent]
                member.reconnecting = True

    def next_at(self) -> float:
        """Return when `tick` has something to do, or a moment before, unless an agent acts."""
        last_call = _NEVER if self._call_at is None else self._call_at + self.limits.last_call
        return min(self._joins_until, last_call, *(each.lost_at for each in self._gone.values()), _NEVER)

    def _end_waits(self, now: float) -> list[tuple[int, Answer]]:
        over = self._finished or bool(self._closed)
        if now < self._joins_until and not over:
            return []
        answers = []
        for member in list(self._joins.values()):
            assert member.client is not None
            if over:
                answers.append((member.client, self._closing(member.joins)))
            elif member.joins_until <= now:
                answers.append((member.client, Answer(member.joins, CallResult.TIMEOUT)))
            else:
                continue
            del self._joins[member.agent]
        self._joins_until = min((each.joins_until for each in self._joins.values()), default=_NEVER)
        return answers

    def _closing(self, number: int) -> Answer:
        """The answer to an agent that joins when there will be no further round."""
        return Answer(number, CallResult.CLOSED, () if self._finished else (self._closed.encode(),))

    def _form(self, now: float) -> list[tuple[int, Answer]]:
        if len(self._joins) < self.limits.min_nodes:
            self._call_at = None
            return []
        if self._call_at is None:
            self._call_at = now
        complete = len(self._joins) >= self.limits.max_nodes and not self._is_one_expected()
        if not complete and now < self._call_at + self.limits.last_call:
            return []
        return self._start(sorted(self._joins.values(), key=lambda each: each.rank)[: self.limits.max_nodes])

    def _is_one_expected(self) -> bool:
        """Whether a member of the newest round is connected and has not joined the next one yet."""
        return any(
            (each.client is not None or each.reconnecting) and not each.left and agent not in self._joins
            for agent, each in self._current.items()
        )

    def _start(self, chosen: list[Member]) -> list[tuple[int, Answer]]:
        self._end()  # a round may form of other agents while one goes on
        self._number += 1
        self._ended, self._cause, self._call_at = False, "", None
        self._current = {each.agent: each for each in chosen}
        self._undone = set(self._current)
        answers = []
        for place, member in enumerate(chosen):
            assert member.client is not None
            found = to_json({"generation": self.generation, "rank": place, "nodes": len(chosen)})
            answers.append((member.client, Answer(member.joins, CallResult.OK, (found,))))
            del self._joins[member.agent]
        members = set(self.members())
        self._stale += [
            client for client, ends in self._admitted.items() if ends < self._ends and client not in members
        ]
        return answers

    # -- parts ------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """End the round. Agents that wait for the next one were verified before, so they are not members of it yet."""
        if not self._ended:
            self._ended = True
            self._ends += 1
            self._unchecked = list(self._joins.values())

    def _remove(self, member: Member) -> None:
        """Remove an agent for good. One that has left stays listed until its connection is closed."""
        if member.agent in self._current and not self._finished:
            self._end()
        member.left = True
        self._joins.pop(member.agent, None)
        if self._by_rank.get(member.rank) is member:
            del self._by_rank[member.rank]
        if member.client is None:
            self._delete(member)

    def _delete(self, member: Member) -> None:
        del self._members[member.agent]
        self._gone.pop(member.agent, None)

    def _make_way(self, rank: int) -> int | None:
        """Free a rank for an agent to which it was given; return the client that loses its place."""
        older = self._by_rank.get(rank)
        if older is None:
            return None
        if not older.given:
            older.rank = self._free_rank()
            self._by_rank[older.rank] = older
            return None
        client, older.client = older.client, None
        if client is not None:
            del self._by_client[client]
        self._remove(older)
        return client

    def _free_rank(self) -> int:
        return next(rank for rank in range(len(self._by_rank) + 1) if rank not in self._by_rank)


def _text(said: str) -> str:
    """What an agent said, as a notice may repeat it."""
    return encoding.escape(said, keys.REFUSAL_TEXT_BYTES)
