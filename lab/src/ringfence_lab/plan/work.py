"""The work of a worker in a collective, by stage, and what it costs: how a variant moves bytes, loads, terms and costs.

A `Variant` says how bytes are moved. All variants run the same schedules, so that the cost of sealing is a ratio of two
predictions that differ in nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from ringfence.collectives.passes import PASS_BYTES
from ringfence.collectives.schedule import Action
from ringfence.keys import SHARED_FROM_BYTES
from ringfence.link.segments import segment_bytes, segment_count
from ringfence_lab.plan.hardware import Hardware
from ringfence_lab.plan.schedules import Task

_CACHE: Final = 2 << 20  # bytes that a core of the day has to itself; only fitted variants pay for memory beyond it
ON_THE_WIRE: Final = 1514 / 1448  # a byte with its share of Ethernet's, IP's and TCP's headers, in frames of 1500 bytes


@dataclass(frozen=True)
class Variant:
    """How a variant moves bytes from worker to worker."""

    name: str
    sealed: bool  #      encrypted and authenticated
    forwards: bool  #    ciphertext that is only passed on is not sealed again
    pipelined: bool  #   in segments, whose stages overlap; otherwise chunk by chunk
    framed: bool = False  # copied into frames where the sealed variant encrypts into them
    each_hop: bool = False  # a device's data is copied to the host for every hop, not once for the whole collective
    at_once: int = 1  #  collectives that run at the same time
    segment: int = 0  #  its own largest segment, of which a message has at least two; 0: as the runtime cuts them
    shares: bool = True  # workers of one machine exchange segments in memory that they share


VARIANTS: Final = {
    variant.name: variant
    for variant in (
        Variant("ringfence", True, True, True, at_once=4),
        Variant("ringfence-unsealed", False, True, True, True, at_once=4),
        Variant("plaintext", False, True, True, at_once=4),
        Variant("gloo", False, True, True, at_once=2, segment=1 << 20, shares=False),
        Variant("nccl", False, True, True),
        Variant("hop-by-hop", True, False, False, each_hop=True, shares=False),
    )
}  # fmt: skip
CLEAR: Final = ("plaintext", "gloo", "nccl")  # of GPUs outside confidential mode


class StageCosts(NamedTuple):
    """Costs of one variant on one hardware: seconds, and seconds per byte."""

    message: float
    switch: float
    seal: float  #     what a sender does to a byte before it writes it: seal, copy into a frame, or nothing
    open: float
    send: float
    receive: float
    reduce: float
    copy: float
    idle: float = 0.0  # the share of its time that a thread waits for another
    cold: float = 0.0  # what memory beyond the cache costs more, as a share
    half: float = 1.0  # times `reduce`, for bfloat16
    staged: float = 0.0
    fresh: float = 0.0
    near_copy: float = 0.0  # to shared memory, or from it
    near_message: float = 0.0
    between: float = 1.0  # times `send` and `receive`, between machines

    def met(self, lost: float, narrow: bool) -> StageCosts:
        """Return the costs in a collective: this share of all bytes is no longer in the cache; `narrow` means bfloat16."""
        slower = 1 + self.cold * lost
        stages = {
            stage: getattr(self, stage) * slower
            for stage in ("seal", "open", "send", "receive", "reduce", "copy", "near_copy")
        }
        return self._replace(**{**stages, "reduce": stages["reduce"] * (self.half if narrow else 1.0)})


def fitted_figures(hardware: Hardware, variant: Variant) -> Mapping[str, float] | None:
    """Return what was fitted for a variant, or for ringfence if it was not measured: it runs in the same engine.

    Otherwise it would pay nothing for messages where the others pay what was fitted, and the difference would look like the
    cost of sealing.
    """
    return hardware.variants.get(variant.name) or hardware.variants.get("ringfence")


@lru_cache(maxsize=256)
def stage_costs(hardware: Hardware, variant: Variant) -> StageCosts:
    """Return the costs of the stages; where the variant was fitted on this hardware, in its proportion."""
    fitted = fitted_figures(hardware, variant)
    factor = fitted["factor"] if fitted else 1.0
    core = {name: hardware["core", name] * factor for name in ("seal", "open", "send", "receive", "reduce", "copy")}
    frame = core["copy"] if variant.framed else 0.0
    return StageCosts(
        message=fitted["message"] * 1e-6 if fitted else hardware["core", "message"],
        switch=fitted["switch"] * 1e-6 if fitted else hardware["core", "switch"],
        seal=core["seal"] if variant.sealed else frame,
        open=core["open"] if variant.sealed else frame,
        send=core["send"],
        receive=core["receive"],
        reduce=core["reduce"],
        copy=core["copy"],
        near_copy=hardware["inside", "copy"],
        near_message=hardware["inside", "message"],
        **{name: fitted[name] for name in ("idle", "cold", "half", "between") if fitted},
        **{name: fitted[name] * 1e-9 for name in ("staged", "fresh") if fitted},
    )


@lru_cache(maxsize=4096)
def segments(variant: Variant, length: float) -> tuple[float, int]:
    """Return the length of a message's segments, and their number."""
    if not variant.pipelined:
        return length, 1
    if variant.segment:
        count = max(2, math.ceil(length / variant.segment))
        return length / count, count
    whole = int(length)
    return min(length, segment_bytes(whole)), segment_count(whole)


def lost(variant: Variant, memory: float, piece: float) -> float:
    """Return the share of bytes that are no longer in the cache when they are used again.

    Of so much memory that is gone through again and again, all may find it lost; a piece that is handled whole is lost from one
    stage to the next as well.
    """
    again = max(0.0, 1 - _CACHE / memory) if memory else 0.0
    between = max(0.0, 1 - _CACHE / piece) if piece else 0.0
    return again if variant.pipelined else (again + between) / 2


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

    def thread(self, spent: StageCosts, variant: Variant, threads: float) -> Terms:
        """Seconds of the worker's threads: those of channels divide what goes between machines, and nothing inside one."""
        inside = {
            "per-message overhead": self.near_messages * spent.near_message,
            "copy": self.near_copied * spent.near_copy,
            "reduce": self.near_reduced * spent.reduce,
        }
        found = self.terms(spent, variant)
        return {term: inside.get(term, 0.0) + (found[term] - inside.get(term, 0.0)) / threads for term in found}

    def touched(self, variant: Variant) -> float:
        """Bytes read and written in memory: twice in each stage, three times where two are added."""
        framed = self.sealed + self.opened if variant.sealed or variant.framed else 0.0
        return 2 * (framed + self.sent + self.received + self.copied + self.near_copied) + 3 * self.reduced


def passes(variant: Variant, whole: float) -> int:
    """Return how many passes ringfence's engine takes for a collective; other implementations have none."""
    return max(1, math.ceil(whole / PASS_BYTES)) if variant.pipelined and not variant.segment else 1


def load(variant: Variant, counted: Mapping[Task, float], whole: float) -> Load:
    """Return the work of one worker in a collective of `whole` bytes: of each pass, times their number."""
    number = passes(variant, whole)
    return Load(*(number * figure for figure in _of_pass(variant, counted, whole / number)))


def _of_pass(variant: Variant, counted: Mapping[Task, float], whole: float) -> Load:
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
