"""What a worker has counted since its session began: bytes and waits for each other worker, and operations that have ended.

Each link counts for itself, where the bytes pass. Whoever asks adds up the links, in any thread: a number may be a moment
old, and none goes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ringfence.collectives import Collective
from ringfence.dataplane.request import POINT_TO_POINT

if TYPE_CHECKING:
    from ringfence.runtime.engine import Engine

STAGES = ("seal", "open", "reduce", "send", "receive", "lock")  # in the order of a link's `spent`
_LINK = ("wire_sent", "wire_received", "payload_sent", "payload_received", "waits", "waited")


@dataclass(frozen=True)
class PeerCounters:
    """Between this worker and another one."""

    worker: int
    payload_sent: int = 0  #        bytes of tensors
    payload_received: int = 0
    wire_sent: int = 0  #           the same as frames: with headers and tags, without those of TCP and IP
    wire_received: int = 0
    waits: int = 0  #               how often a frame of a collective was due from it and nothing could be read
    waited_seconds: float = 0.0  #  and for how long in all
    stage_seconds: dict[str, float] = field(default_factory=dict)  # by stage, if RINGFENCE_STAGE_TIMES asks for them


@dataclass(frozen=True)
class Counters:
    """Of one worker, since its session began."""

    rank: int
    operations: dict[str, int]  #            how many have ended well, by name: "all_reduce", "send/recv"
    oldest_wait_seconds: float  #            how long the oldest operation that has not ended has waited; 0 without one
    peers: tuple[PeerCounters, ...]  #       in the order of ranks; only workers that it has links to


Totals = dict[int, list[int]]  # worker: the values of _LINK, then those of `spent`


def add_links(totals: Totals, links: Iterable[Any]) -> Totals:
    """With what these links have counted."""
    for link in links:
        values = [*(getattr(link, name) for name in _LINK), *link.spent]
        known = totals.get(link.worker)
        totals[link.worker] = values if known is None else [a + b for a, b in zip(known, values, strict=True)]
    return totals


def read(engine: Engine) -> Counters:
    """All that the engine's links have counted, those of destroyed groups included."""
    living = tuple(engine.communicators.values())  # before the others: a group that is destroyed meanwhile is in both
    totals, removed = engine.past_links
    communicators = dict.fromkeys((*living, *removed))
    totals = add_links(dict(totals), [link for communicator in communicators for link in communicator.links()])
    waiting = [each.deadline - each.timeout for each in tuple(engine.unfinished) if each.timeout < float("inf")]
    oldest = max(0.0, engine.clock() - min(waiting, default=float("inf")))
    operations = {_name(code): count for code, count in enumerate(engine.ended) if count}
    peers = tuple(_peer(worker, totals[worker]) for worker in sorted(totals))
    return Counters(engine.rank, operations, oldest, peers)


def _name(code: int) -> str:
    return "send/recv" if code == POINT_TO_POINT else Collective(code).name.lower()


def _peer(worker: int, values: list[int]) -> PeerCounters:
    counted, spent = dict(zip(_LINK, values, strict=False)), values[len(_LINK) :]
    waited = counted.pop("waited") / 1e9
    stages = {stage: value / 1e9 for stage, value in zip(STAGES, spent, strict=True)} if any(spent) else {}
    return PeerCounters(worker, waited_seconds=waited, stage_seconds=stages, **counted)
