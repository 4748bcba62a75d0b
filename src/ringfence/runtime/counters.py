"""The counters of a worker since its session began: bytes and waits per peer, and completed operations.

Each link keeps its own counters. A reader, in any thread, adds up those of all links; values never decrease.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringfence.collectives import Collective
from ringfence.dataplane.request import POINT_TO_POINT
from ringfence.runtime import staging_times

STAGES = ("seal", "open", "reduce", "send", "receive", "lock")  # the order of a link's `spent`
_WIRE = ("wire_sent", "wire_received")
_LINK = (*_WIRE, "payload_sent", "payload_received", "waits", "waited")
_COUNTED = (*_LINK, "local_sent", "local_received")


@dataclass(frozen=True)
class PeerCounters:
    """The counters between this worker and another one."""

    worker: int
    payload_sent: int = 0  #        bytes of tensors
    payload_received: int = 0
    local_sent: int = 0  #          of these, bytes inside this machine, which were not sealed
    local_received: int = 0
    wire_sent: int = 0  #           the others as sealed frames: with headers and tags, without those of TCP and IP
    wire_received: int = 0
    waits: int = 0  #               how often a frame of a collective was due from the worker and had not arrived
    waited_seconds: float = 0.0  #  total time of those waits
    stage_seconds: dict[str, float] = field(default_factory=dict)  # by stage, if RINGFENCE_STAGE_TIMES is set

    @property
    def sealed_sent(self) -> int:
        """Bytes of tensors that left this machine, sealed."""
        return self.payload_sent - self.local_sent

    @property
    def sealed_received(self) -> int:
        return self.payload_received - self.local_received


@dataclass(frozen=True)
class Counters:
    """The counters of one worker since its session began."""

    rank: int
    operations: dict[str, int]  #            completed successfully, by name: "all_reduce", "send/recv"
    oldest_wait_seconds: float  #            age of the oldest operation in progress; 0 without one
    peers: tuple[PeerCounters, ...]  #       ordered by rank; only workers with links to this one
    # By stage (staging_times), if RINGFENCE_STAGE_TIMES is set.
    staging_seconds: dict[str, float] = field(default_factory=dict)


Totals = dict[int, list[int]]  # worker -> the values of _COUNTED, then those of `spent`


def add_links(totals: Totals, links: Iterable[Any]) -> Totals:
    """Add the counters of links to `totals`, in place, and return it."""
    for link in links:
        values = [*(getattr(link, name) for name in _LINK), 0, 0, *link.spent]
        if link.is_local:  # what passed through its socket is on no wire
            values[: len(_WIRE)] = [0] * len(_WIRE)
            values[len(_LINK) : len(_COUNTED)] = link.payload_sent, link.payload_received
        add_totals(totals, {link.worker: values})
    return totals


def add_totals(totals: Totals, more: Totals) -> Totals:
    """Add `more` to `totals`, in place, and return it."""
    for worker, values in more.items():
        known = totals.get(worker)
        totals[worker] = values if known is None else [a + b for a, b in zip(known, values, strict=True)]
    return totals


def summarise(rank: int, totals: Totals, completed: Sequence[int], oldest_wait: float) -> Counters:
    """Return the counters of a worker.

    `totals` are those of its links by worker, `completed` the numbers of successful requests by operation code.
    """
    operations = {_name(code): count for code, count in enumerate(completed) if count}
    peers = tuple(_peer(worker, totals[worker]) for worker in sorted(totals))
    spent = staging_times.totals()
    staging: dict[str, float] = {stage: spent[stage] / 1e9 for stage in staging_times.STAGES if stage in spent}
    return Counters(rank, operations, oldest_wait, peers, staging)


def _name(code: int) -> str:
    return "send/recv" if code == POINT_TO_POINT else Collective(code).name.lower()


def _peer(worker: int, values: list[int]) -> PeerCounters:
    counted, spent = dict(zip(_COUNTED, values, strict=False)), values[len(_COUNTED) :]
    waited = counted.pop("waited") / 1e9
    stages = {stage: value / 1e9 for stage, value in zip(STAGES, spent, strict=True)} if any(spent) else {}
    return PeerCounters(worker, waited_seconds=waited, stage_seconds=stages, **counted)
