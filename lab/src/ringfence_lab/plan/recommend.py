"""Recommends settings with their expected gain: one lever after the other, those that exist first.

bucket    DDP's bucket_cap_mb                                 a number in the training script: can be set today
unit      blocks that FSDP wraps together                     in the training script: can be set today
reshard   FSDP's reshard_after_forward                        the same; without it, parameters stay in memory
channels  connections and threads of a link                   a setting of every worker: can be set today
schedule  another than the runtime's table chooses            no setting; over the links of devices: not built
every     synchronise once in H steps                         another training algorithm: its effect on learning is unknown

Two levels are no lever: the runtime uses them wherever several workers share a machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from ringfence_lab.plan.hardware import Hardware
from ringfence_lab.plan.steps import FLAT, Question, Step, hierarchical_possible, step
from ringfence_lab.plan.work import VARIANTS

CAPS: Final = (None, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0, 1000.0)
BLOCKS: Final = (1, 2, 4, 8)  # of the model in a unit of FSDP
CHANNELS: Final = (1, 2, 4, 8)  # of a link between machines
WORKERS: Final = tuple(1 << power for power in range(1, 15))  # 2 to 16,384
_WORTH: Final = 0.01  # a lever is pulled for no less than this
_BEARABLE: Final = 0.10  # of computing: what communication may add before fewer synchronisations are recommended
_MOST_STEPS: Final = 500  # between two synchronisations; published low-communication training stays below


@dataclass(frozen=True)
class Advice:
    """One lever: its new value, and the share of the step that it saves."""

    lever: str
    value: str
    gain: float
    built: bool  # whether it can be set today
    why: str
    needs: str = ""  # what would have to be built first


@dataclass(frozen=True)
class Plan:
    """The answer to one question."""

    question: Question
    best: Question
    variants: dict[str, Step]  # as asked, by variant
    tuned: dict[str, Step]  # with what can be set today: sealed as recommended, plaintext as is best for plaintext
    synchronous: Step  # sealed, with what is recommended but not built as well, and a synchronisation in each step
    all_levers: Step  # and with fewer synchronisations, if they are recommended
    advice: tuple[Advice, ...]

    @property
    def overhead(self) -> float:
        """Sealed over plaintext, as asked."""
        return self.variants["ringfence"].seconds / self.variants["plaintext"].seconds

    @property
    def tuned_overhead(self) -> float:
        return self.tuned["ringfence"].seconds / self.tuned["plaintext"].seconds


def plan(hardware: Hardware, question: Question) -> Plan:
    """Answer a question as asked, then pull one lever after the other for the sealed variant."""
    variants = {name: step(hardware, VARIANTS[name], question) for name in shown(hardware)}
    pulled = list(_pulled(hardware, question, "ringfence", _levers(hardware, question)))
    advice = [each for each, _, _ in pulled]
    best, now = (pulled[-1][1], pulled[-1][2]) if pulled else (question, variants["ringfence"])
    settable = [(asked, predicted) for each, asked, predicted in pulled if each.built]
    today, sealed = settable[-1] if settable else (question, variants["ringfence"])
    synchronous = now
    spaced = _spaced(hardware, best, now)
    if spaced is not None:
        best, now = spaced
        gain = 1 - now.seconds / synchronous.seconds
        advice.append(
            Advice(
                "every",
                f"{best.every} steps",
                gain,
                False,
                "communication still outweighs what it may add",
                "another training algorithm, which may change what the model learns",
            )
        )
    tuned = {"plaintext": _in_the_clear(hardware, question, today), "ringfence": sealed}
    return Plan(question, best, variants, tuned, synchronous, now, tuple(advice))


def _in_the_clear(hardware: Hardware, question: Question, sealed: Question) -> Step:
    """Return plaintext with what is best for it and can be set today, or as the sealed variant if that is better.

    So the cost of sealing is relative to the best plaintext.
    """
    levers = [each for each in _levers(hardware, question) if each[0]]
    pulled = [asked for _, asked, _ in _pulled(hardware, question, "plaintext", levers)]
    choices = (pulled[-1] if pulled else question, sealed)
    return min((step(hardware, VARIANTS["plaintext"], each) for each in choices), key=lambda found: found.seconds)


def _pulled(
    hardware: Hardware, question: Question, variant: str, levers: Iterable[tuple[bool, list[dict[str, Any]]]]
) -> Iterator[tuple[Advice, Question, Step]]:
    """Yield the levers that save enough for this variant, each on top of those before."""
    now = step(hardware, VARIANTS[variant], question)
    for built, choices in levers:
        found = _better(hardware, variant, question, now, choices)
        if found is None:
            continue
        better, predicted = found
        changed = [lever for lever, field in _FIELDS.items() if getattr(better, field) != getattr(question, field)]
        value = ", ".join(_value_text(lever, getattr(better, _FIELDS[lever])) for lever in changed)
        why = _why(now, predicted)
        if "schedule" in changed and better.schedule != "two-levels":
            why += "; today the runtime's table chooses"
        if "channels" in changed:
            why += "; as if channels did not slow each other down"
        needs = "" if built else _needs(changed, better)
        yield (
            Advice(" and ".join(changed), value, 1 - predicted.seconds / now.seconds, built, why, needs),
            better,
            predicted,
        )
        question, now = better, predicted


def shown(hardware: Hardware) -> list[str]:
    """Return the variants that a plan shows: Gloo only where it was measured."""
    gloo = ["gloo"] if "gloo" in hardware.variants else []
    return [*gloo, "plaintext", "ringfence-unsealed", "ringfence", "hop-by-hop"]


_FIELDS: Final = {
    "schedule": "schedule",
    "bucket": "cap_mib",
    "unit": "blocks",
    "reshard_after_forward": "reshard",
    "channels": "channels",
}


def _levers(hardware: Hardware, question: Question) -> Iterator[tuple[bool, list[dict[str, Any]]]]:
    """Yield for each lever whether it exists, and its positions. Schedules are tried together with bucket sizes."""
    per_worker = max(1.0, hardware["node", "cores"] / max(1.0, hardware["node", "workers"]))
    counts = [count for count in CHANNELS if count <= per_worker]
    if question.strategy == "fsdp":
        yield True, [{"blocks": count} for count in BLOCKS]
        yield True, [{"reshard": reshard} for reshard in (True, False)]
        yield True, [{"channels": count} for count in counts]
        return
    yield True, [{"cap_mib": cap} for cap in CAPS]
    # With more channels, other buckets may be best than those that were best with one.
    yield True, [{"channels": count, "cap_mib": cap} for count in counts for cap in (question.cap_mib, *CAPS)]
    yield False, [{"schedule": name, "cap_mib": cap} for name in FLAT for cap in CAPS]
    if hierarchical_possible(hardware, question.workers):
        yield False, [{"schedule": "two-levels", "cap_mib": cap} for cap in CAPS]


def _better(
    hardware: Hardware, variant: str, question: Question, now: Step, choices: list[dict[str, Any]]
) -> tuple[Question, Step] | None:
    """Return, of all choices within 0.5 % of the best, the one that changes least; None if it saves too little."""
    asked = [replace(question, **choice) for choice in choices]
    predicted = [(each, step(hardware, VARIANTS[variant], each)) for each in asked]
    least = min(each.seconds for _, each in predicted)
    near = [(each, found) for each, found in predicted if found.seconds <= least * (1 + _WORTH / 2)]
    chosen = min(
        near, key=lambda pair: sum(getattr(pair[0], field) != getattr(question, field) for field in _FIELDS.values())
    )
    return chosen if chosen[1].seconds < now.seconds * (1 - _WORTH) else None


def _spaced(hardware: Hardware, question: Question, now: Step) -> tuple[Question, Step] | None:
    """Return fewer synchronisations if communication still adds much more than `_BEARABLE`, else None."""
    if question.strategy == "fsdp" or now.exposed <= 2 * _BEARABLE * now.compute:  # FSDP gathers in every step
        return None
    wanted = now.communication.seconds / (_BEARABLE * now.compute)
    every = min(_MOST_STEPS, 1 << math.ceil(math.log2(max(2.0, wanted))))
    asked = replace(question, every=every)
    return asked, step(hardware, VARIANTS["ringfence"], asked)


def _needs(changed: list[str], better: Question) -> str:
    """Return what the runtime lacks for a lever."""
    if "schedule" not in changed:
        return "a runtime with the levers above"
    return "two levels over the links of devices" if better.schedule == "two-levels" else "a setting for the schedule"


def _value_text(lever: str, value: object) -> str:
    if lever == "bucket":
        return "DDP's default" if value is None else f"{value:g} MiB"
    if lever == "channels":
        return f"{value} channels"
    if lever == "unit":
        return f"{value} blocks" if value != 1 else "1 block"
    return str(value)


def _why(before: Step, after: Step) -> str:
    what = "buckets" if before.of_buckets else "collectives"
    counts = f"{before.buckets} {what} become {after.buckets}; " if before.buckets != after.buckets else ""
    return f"{counts}{before.communication.dominant} dominated, now {after.communication.dominant}"


def sweep(hardware: Hardware, question: Question, workers: tuple[int, ...] = WORKERS) -> Iterator[Plan]:
    """Answer the same question at other scales, one after the other."""
    return (plan(hardware, replace(question, workers=count)) for count in workers)
