"""Recommends settings with their expected gain, one lever after the other. All of them can be set today.

bucket    DDP's bucket_cap_mb                                 a number in the training script
unit      blocks that FSDP wraps together                     in the training script
reshard   FSDP's reshard_after_forward                        the same; without it, parameters stay in memory
channels  connections and threads of a link                   a setting of every worker, if not as the runtime chooses

Two levels are no lever: the runtime uses them wherever several workers share a machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from ringfence_lab.plan.hardware import Hardware
from ringfence_lab.plan.steps import CHANNELS, Question, StepCost, channels_of, step
from ringfence_lab.plan.work import VARIANTS

CAPS: Final = (None, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0, 1000.0)
BLOCKS: Final = (1, 2, 4, 8)  # of the model in a unit of FSDP
WORKERS: Final = tuple(1 << power for power in range(1, 15))  # 2 to 16,384
_WORTH: Final = 0.01  # a lever is pulled for no less than this


_ONE_THREAD: Final = ("one thread seals, sends, receives, opens and adds", "use 2 channels, or bfloat16 on the wire")
_MESSAGES: Final = ("it sends more messages", "use larger buckets or units")
# Why a term is larger than where every hop is sealed, and what to do.
_CAUSES: Final = {
    "copy": (
        "workers of a machine copy through memory that they share",
        "let NCCL or Gloo exchange inside a machine (policy key inside_machine)",
    ),
    "host-device copy": (
        "a pass is copied to the host before it is sent and back after, beside nothing if there are few",
        "use larger buckets or units, or bfloat16 on the wire",
    ),
    "memory": ("a machine's workers share its memory bandwidth", "use fewer workers a machine"),
    "wire": ("more bytes leave a machine", "use bfloat16 on the wire"),
    "per-message overhead": _MESSAGES,
    "latency": _MESSAGES,
    **dict.fromkeys(("crypto", "stack", "reduce"), _ONE_THREAD),
}


@dataclass(frozen=True)
class Advice:
    """One lever: its new value, and the share of the step that it saves."""

    lever: str
    value: str
    gain: float
    why: str


@dataclass(frozen=True)
class Plan:
    """The answer to one question."""

    question: Question
    best: Question
    variants: dict[str, StepCost]  # as asked, by variant
    tuned: dict[str, StepCost]  # sealed as recommended, plaintext as is best for plaintext
    advice: tuple[Advice, ...]

    @property
    def overhead(self) -> float:
        """Sealed over plaintext, as asked."""
        return self.variants["ringfence"].seconds / self.variants["plaintext"].seconds

    @property
    def tuned_overhead(self) -> float:
        return self.tuned["ringfence"].seconds / self.tuned["plaintext"].seconds

    @property
    def loses(self) -> str:
        """Why ringfence takes longer than sealing hop by hop, as asked, and what to do; empty if it does not."""
        ours, other = self.variants["ringfence"], self.variants["hop-by-hop"]
        if ours.seconds <= other.seconds * (1 + _WORTH):
            return ""
        more = {term: ours.terms.get(term, 0.0) - other.terms.get(term, 0.0) for term in _CAUSES}
        term = max(more, key=lambda each: more[each])
        why, what = _CAUSES[term]
        share = more[term] / ours.seconds
        return f"{ours.seconds / other.seconds:.2f} times as long as sealed hop by hop: {why} ({term}, {share:.0%}); {what}"


def plan(hardware: Hardware, question: Question) -> Plan:
    """Answer a question as asked, then pull one lever after the other for the sealed variant."""
    question = replace(question, channels=channels_of(hardware, question))
    variants = {name: step(hardware, VARIANTS[name], question) for name in shown(hardware)}
    pulled = list(_pulled(hardware, question, "ringfence"))
    best, sealed = pulled[-1][1:] if pulled else (question, variants["ringfence"])
    tuned = {"plaintext": _in_the_clear(hardware, question, best), "ringfence": sealed}
    return Plan(question, best, variants, tuned, tuple(each for each, _, _ in pulled))


def _in_the_clear(hardware: Hardware, question: Question, sealed: Question) -> StepCost:
    """Return plaintext with what is best for it, or as the sealed variant if that is better.

    So the cost of sealing is relative to the best plaintext.
    """
    pulled = [asked for _, asked, _ in _pulled(hardware, question, "plaintext")]
    choices = (pulled[-1] if pulled else question, sealed)
    return min((step(hardware, VARIANTS["plaintext"], each) for each in choices), key=lambda found: found.seconds)


def _pulled(hardware: Hardware, question: Question, variant: str) -> Iterator[tuple[Advice, Question, StepCost]]:
    """Yield the levers that save enough for this variant, each on top of those before."""
    now = step(hardware, VARIANTS[variant], question)
    for choices in _levers(hardware, question):
        found = _better(hardware, variant, question, now, choices)
        if found is None:
            continue
        better, predicted = found
        changed = [lever for lever, field in _FIELDS.items() if getattr(better, field) != getattr(question, field)]
        value = ", ".join(_value_text(lever, getattr(better, _FIELDS[lever])) for lever in changed)
        why = _why(now, predicted)
        if "channels" in changed:
            why += f"; two have {CHANNELS[question.strategy][2]:g} times the rate of one, more were not measured"
        yield Advice(" and ".join(changed), value, 1 - predicted.seconds / now.seconds, why), better, predicted
        question, now = better, predicted


def shown(hardware: Hardware) -> list[str]:
    """Return the variants that a plan shows: Gloo only where it was measured, NCCL where there are GPUs."""
    gloo = ["gloo"] if "gloo" in hardware.variants else []
    nccl = ["nccl"] if hardware["device", "copy_rate"] else []
    return [*nccl, *gloo, "plaintext", "ringfence-unsealed", "ringfence", "hop-by-hop"]


_FIELDS: Final = {
    "bucket": "cap_mib",
    "unit": "blocks",
    "reshard_after_forward": "reshard",
    "channels": "channels",
}


def _levers(hardware: Hardware, question: Question) -> Iterator[list[dict[str, Any]]]:
    """Yield the positions of each lever."""
    per_worker = max(1.0, hardware["node", "cores"] / max(1.0, hardware["node", "workers"]))
    counts = [count for count in CHANNELS[question.strategy] if count <= per_worker]
    if question.strategy == "fsdp":
        yield [{"blocks": count} for count in BLOCKS]
        yield [{"reshard": reshard} for reshard in (True, False)]
        yield [{"channels": count} for count in counts]
        return
    yield [{"cap_mib": cap} for cap in CAPS]
    # With more channels, other buckets may be best than those that were best with one.
    yield [{"channels": count, "cap_mib": cap} for count in counts for cap in (question.cap_mib, *CAPS)]


def _better(
    hardware: Hardware, variant: str, question: Question, now: StepCost, choices: list[dict[str, Any]]
) -> tuple[Question, StepCost] | None:
    """Return, of all choices within 0.5 % of the best, the one that changes least; None if it saves too little."""
    asked = [replace(question, **choice) for choice in choices]
    predicted = [(each, step(hardware, VARIANTS[variant], each)) for each in asked]
    least = min(each.seconds for _, each in predicted)
    near = [(each, found) for each, found in predicted if found.seconds <= least * (1 + _WORTH / 2)]
    chosen = min(
        near, key=lambda pair: sum(getattr(pair[0], field) != getattr(question, field) for field in _FIELDS.values())
    )
    return chosen if chosen[1].seconds < now.seconds * (1 - _WORTH) else None


def _value_text(lever: str, value: object) -> str:
    if lever == "bucket":
        return "DDP's default" if value is None else f"{value:g} MiB"
    if lever == "channels":
        return f"{value} channels"
    if lever == "unit":
        return f"{value} blocks" if value != 1 else "1 block"
    return str(value)


def _why(before: StepCost, after: StepCost) -> str:
    what = "buckets" if before.of_buckets else "collectives"
    counts = f"{before.buckets} {what} become {after.buckets}; " if before.buckets != after.buckets else ""
    return f"{counts}{before.communication.dominant} dominated, now {after.communication.dominant}"


def sweep(hardware: Hardware, question: Question) -> Iterator[Plan]:
    """Answer the same question at other scales, one after the other."""
    return (plan(hardware, replace(question, workers=count)) for count in WORKERS)
