"""What a group keeps for its private sums: the members, the seeds of this worker's pairs, and how many sums it has made."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from typing import Any, Final

import torch.distributed as dist

from ringfence import keys
from ringfence.admission import encoding
from ringfence.backend.process_group import RingfenceProcessGroup
from ringfence.errors import AbortedError, PrivateSumError
from ringfence.private_sums.agreement import agree
from ringfence.private_sums.graph import worker_edges
from ringfence.private_sums.masks import Keystreams, Pair
from ringfence.private_sums.members import Members, members_of
from ringfence.runtime.communicator import group_digest
from ringfence.transport.fork import in_child

_groups: Final[weakref.WeakKeyDictionary[Any, PrivateGroup]] = weakref.WeakKeyDictionary()
_creating: Final[weakref.WeakKeyDictionary[Any, threading.Lock]] = weakref.WeakKeyDictionary()  # one for each group
# The ranks of the groups that have made private sums, by the default group: under Gloo's there are several sessions.
_summed: Final[weakref.WeakKeyDictionary[Any, list[frozenset[int]]]] = weakref.WeakKeyDictionary()
_tables: Final = threading.Lock()  # held for no message: two threads may create two groups


class PrivateGroup:
    """The pairs of this worker in a process group."""

    def __init__(self, group: RingfenceProcessGroup) -> None:
        """Exchange a seed with each worker that this one shares a mask with. Raises PrivateSumError on every rank."""
        session, ranks = group._session, group._ranks
        terms, workers = session.terms.private_sum, [session.workers[rank] for rank in ranks]
        self.members = members_of(terms, workers, session.workers, session.terms.same_host)
        assert terms is not None
        self._group, self.size = weakref.ref(group), len(ranks)
        self.own_workers = len(self.members[session.workers[session.engine.rank].member])  # with this one
        edges = worker_edges(list(self.members.values()), terms.colluding + 1)
        layout = layout_digest(group_digest(group._wire_name, ranks), self.members, edges)
        given = frozenset(session.default_ranks(ranks))
        with _tables:
            others = _summed.setdefault(dist.group.WORLD, [])
            objection = _overlap(given, others)
            others.append(given)  # before the agreement: another thread may create a group meanwhile
        try:
            agree(group, layout, PrivateSumError(objection) if objection else None)
        except BaseException:
            others.remove(given)
            raise
        self.one_sum = threading.Lock()  # held from the number of a sum to its end
        self._alive = session.engine.keys.alive
        self._pairs: list[Pair] = []
        self._calls = itertools.count(1)  # also of calls that are refused, so that all ranks count alike
        self._exchange_seeds(group, edges, layout)

    def _exchange_seeds(self, group: RingfenceProcessGroup, edges: list[tuple[int, int]], layout: bytes) -> None:
        session, own = group._session, group._session.engine.rank
        mine = {pair: os.urandom(keys.SECRET_BYTES) for pair in edges if own in pair}
        peer_of = {pair: group._ranks.index(sum(pair) - own) for pair in mine}
        received = group.exchange({peer_of[pair]: layout + draw for pair, draw in mine.items()})
        for pair, draw in mine.items():
            theirs = received[peer_of[pair]]
            if not keys.same(theirs[: keys.DIGEST_BYTES], layout):
                text = f"workers {pair[0]} and {pair[1]} have different members, or another order of private sums"
                session.loop.abort(AbortedError(text))  # others wait for the sum
                raise PrivateSumError(text)
            other = theirs[keys.DIGEST_BYTES :]
            draws = draw + other if own == pair[0] else other + draw
            self._pairs.append(Pair(session.engine.keys.private_sum_seed(draws, layout, pair), own == pair[0]))
        communicator = group._communicator()
        communicator.seeds += [pair.seed for pair in self._pairs]  # it wipes them with its other keys
        if communicator.removed or session.engine.failure is not None:
            communicator.forget()

    @property
    def group(self) -> Any:
        return self._group()

    def begin(self) -> int:
        """Return the number of a further private sum of this group."""
        call = next(self._calls)
        if call >= keys.PRIVATE_SUM_CALLS:
            raise PrivateSumError("this group has made its last private sum: create another one")
        return call

    def keystreams(self, call: int) -> Keystreams:
        """Return the masks of this worker's contribution to a private sum, of which each is asked for once."""
        try:
            if not in_child(self._alive):
                return Keystreams(self._pairs, call)
        except ValueError:  # they were wiped with the other keys of the group
            pass
        raise PrivateSumError("this group has ended, or this is a forked child: its seeds were wiped")


def private_group(group: Any) -> PrivateGroup:
    """Return what a process group keeps for its private sums; its first one exchanges the seeds.

    Raises PrivateSumError, on every rank, if the policy permits none, or if the group is not ringfence's.
    """
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, RingfenceProcessGroup):
        raise PrivateSumError("a private sum needs a process group of backend ringfence that seals its traffic")
    with _tables:
        creating = _creating.setdefault(found, threading.Lock())
    with creating:  # another thread may exchange the seeds
        if found not in _groups:
            _groups[found] = PrivateGroup(found)
        return _groups[found]


def layout_digest(group: bytes, members: Members, edges: list[tuple[int, int]]) -> bytes:
    """Return what a pair's seed covers: the group, its members with their workers, and who shares a mask."""
    named = b"".join(
        encoding.text(name) + b"".join(encoding.number(rank, 4) for rank in ranks) for name, ranks in members.items()
    )
    shared = b"".join(encoding.number(rank, 4) for edge in edges for rank in edge)
    return keys.digest(keys.PRIVATE_SUM_LAYOUT, group, named, shared)


def _overlap(ranks: frozenset[int], others: list[frozenset[int]]) -> str:
    """Return the objection against a group of which some workers have made sums in another one, or nothing."""
    for other in others:
        if other != ranks and other & ranks:
            return (
                f"workers {', '.join(map(str, sorted(other & ranks)))} have made private sums with others in this run: the "
                "difference of two sums could be somebody's contribution"
            )
    return ""
