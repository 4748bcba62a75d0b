"""What a worker does in a collective, by stage, and what that costs: the terms of a cost, and costs that add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from ringfence.collectives.schedule import Action
from ringfence.keys import SHARED_FROM_BYTES
from ringfence_lab.plan.work import StageCosts, Task, Variant, segments

TERMS: Final = (
    "per-message overhead",
    "latency",
    "wire",
    "crypto",
    "stack",
    "reduce",
    "copy",
    "memory",
    "host-device copy",
)
Terms = dict[str, float]


@dataclass(frozen=True)
class Cost:
    """Seconds, the terms that add up to them, and the bound that determines them."""

    seconds: float
    terms: Mapping[str, float]
    bound: str  # chain, thread, cores, network, memory or host-device copy
    work: float = 0.0  # seconds for which the busiest resource can do nothing else
    cpu: float = 0.0  # seconds of cores, for each worker: their mean

    @property
    def dominant(self) -> str:
        """The term that costs most."""
        return max(self.terms, key=lambda term: self.terms[term])

    def plus(self, other: Cost) -> Cost:
        """Return the cost of both, one after the other."""
        bound = self.bound if self.seconds >= other.seconds else other.bound
        terms = added(self.terms, other.terms)
        return Cost(self.seconds + other.seconds, terms, bound, self.work + other.work, self.cpu + other.cpu)

    def times(self, factor: float) -> Cost:
        terms = scaled(self.terms, factor)
        return Cost(self.seconds * factor, terms, self.bound, self.work * factor, self.cpu * factor)


FREE: Final = Cost(0.0, {"per-message overhead": 0.0}, "chain")


class Load(NamedTuple):
    """The work of one worker: segments handled, and bytes through each stage."""

    messages: float = 0.0
    sealed: float = 0.0
    opened: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    reduced: float = 0.0
    copied: float = 0.0
    far_sent: float = 0.0  # of what is sent and received: between machines
    far_received: float = 0.0
    near_messages: float = 0.0  # in memory that workers of one machine share, as the next two
    near_copied: float = 0.0
    near_reduced: float = 0.0  # of what is reduced

    def terms(self, spent: StageCosts, variant: Variant) -> Terms:
        """Seconds of one core."""
        framing = self.sealed * spent.seal + self.opened * spent.open
        farther = (self.far_sent * spent.send + self.far_received * spent.receive) * (spent.between - 1)
        inside = self.near_copied * spent.near_copy
        return {
            "per-message overhead": self.messages * spent.message + self.near_messages * spent.near_message,
            "stack": self.sent * spent.send + self.received * spent.receive + farther,
            "reduce": self.reduced * spent.reduce,
            "copy": self.copied * spent.copy + inside + (0.0 if variant.sealed else framing),
            "crypto": framing if variant.sealed else 0.0,
        }

    def thread(self, spent: StageCosts, variant: Variant, channels: int) -> Terms:
        """Seconds of the worker's threads: channels divide what goes between machines, and nothing inside one."""
        inside = {
            "per-message overhead": self.near_messages * spent.near_message,
            "copy": self.near_copied * spent.near_copy,
            "reduce": self.near_reduced * spent.reduce,
        }
        found = self.terms(spent, variant)
        return {term: inside.get(term, 0.0) + (found[term] - inside.get(term, 0.0)) / channels for term in found}

    def touched(self, variant: Variant) -> float:
        """Bytes read and written in memory: twice in each stage, three times where two are added."""
        framed = self.sealed + self.opened if variant.sealed or variant.framed else 0.0
        return 2 * (framed + self.sent + self.received + self.copied + self.near_copied) + 3 * self.reduced


def load(variant: Variant, counted: Mapping[Task, float], whole: float) -> Load:
    """Return the work of one worker in a collective of `whole` bytes."""
    messages = sealed = opened = sent = received = reduced = copied = 0.0
    far_sent = far_received = near_messages = near_copied = near_reduced = 0.0
    for (action, part, seals, near, copies), times in counted.items():
        length = part * whole * times
        if action is Action.COPY or action is Action.SCALE:
            copied += length
            continue
        reduced += length if action is Action.REDUCE else 0.0
        piece, pieces = segments(variant, part * whole)
        if near and variant.shares:
            if piece >= SHARED_FROM_BYTES:
                near_messages += times * pieces
            else:
                messages += times * pieces  # through a socket, as between machines
            near_copied += length if copies or action is Action.RECV else 0.0
            near_reduced += length if action is Action.REDUCE else 0.0
            continue
        messages += times * pieces
        if action is Action.SEND:
            sent += length
            far_sent += 0.0 if near else length
            sealed += length if seals or near or not variant.forwards else 0.0
        else:
            received += length
            far_received += 0.0 if near else length
            opened += length
    where = (far_sent, far_received, near_messages, near_copied, near_reduced)
    return Load(messages, sealed, opened, sent, received, reduced, copied, *where)


def scaled(terms: Mapping[str, float], factor: float) -> Terms:
    return {term: seconds * factor for term, seconds in terms.items()}


def added(one: Mapping[str, float], other: Mapping[str, float]) -> Terms:
    return {term: one.get(term, 0.0) + other.get(term, 0.0) for term in TERMS if term in one or term in other}
